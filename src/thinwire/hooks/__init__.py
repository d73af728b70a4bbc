"""Hooks: what feeds a link with changes: DDP gradients today, each source in a file of its own."""
