"""Models that predict: the scheduler of the parameter server, and step times at scale."""
