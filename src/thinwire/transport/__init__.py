"""Transports: they move messages between a server and its workers, and know nothing of what is in them."""

from thinwire.transport.addresses import connect, listen
from thinwire.transport.base import LARGEST, Buffer, Connection, Listener, Parts, Peer

__all__ = ["LARGEST", "Buffer", "Connection", "Listener", "Parts", "Peer", "connect", "listen"]
