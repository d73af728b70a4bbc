"""Benchmarks: every claim about speed is measured by one of these, as ratios within one run."""
