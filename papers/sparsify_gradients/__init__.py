"""Lam, Look and Whittell 2017: SparsifyGradients, the founding paper."""
