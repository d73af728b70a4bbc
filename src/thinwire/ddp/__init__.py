"""One line for DDP: the hook, the link, its state and its counters."""
