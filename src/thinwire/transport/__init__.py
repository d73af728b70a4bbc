"""Transports carry messages between a parameter server and its workers; they do not interpret the contents."""

from thinwire.transport.addresses import connect, listen
from thinwire.transport.base import LARGEST, Buffer, Connection, Listener, Parts, Peer

__all__ = ["LARGEST", "Buffer", "Connection", "Listener", "Parts", "Peer", "connect", "listen"]
