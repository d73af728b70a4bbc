"""Tsai 2018, second half: request scheduling at a parameter server with bounded staleness."""
