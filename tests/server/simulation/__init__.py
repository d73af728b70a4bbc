"""A deterministic simulation of the server's protocol: one seed decides everything that happens in a schedule."""
