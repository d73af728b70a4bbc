"""Transports: they move messages between a server and its workers, and know nothing of what is in them."""
