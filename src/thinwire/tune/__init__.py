"""Self-tuning: what bits cost, how many of them pay, and which setting a network asks for."""
