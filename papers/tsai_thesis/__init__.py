"""Tsai 2018: thresholds for gradient sparsification, and request scheduling at a parameter server."""
