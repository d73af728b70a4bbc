"""Tsai 2018, first half: how to choose a threshold."""
