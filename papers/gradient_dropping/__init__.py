"""Aji and Heafield 2017: sparse communication by gradient dropping."""
