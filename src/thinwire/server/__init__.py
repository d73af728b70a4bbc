"""The parameter server: a server that owns the model, workers that push gradients and pull layers."""
