"""Benchmarks: thinwire's speed and size, each figure next to the ways that it replaces."""
