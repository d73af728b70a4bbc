"""Exchanges: how frames become a mean that every rank holds bit for bit."""
