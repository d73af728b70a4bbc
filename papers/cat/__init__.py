"""Khirirat et al. 2020: CAT, communication-aware adaptive tuning of the density."""
