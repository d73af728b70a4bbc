"""One line for DDP: attach(), the link it returns, its state, its counters and its checks."""
