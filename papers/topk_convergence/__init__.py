"""Alistarh et al. 2018: the convergence of sparsified gradient methods."""
