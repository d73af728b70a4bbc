"""Aji and Heafield 2017: gradient dropping."""
