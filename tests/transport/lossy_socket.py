"""A real UDP socket that loses, duplicates and reorders packets at random, with a seed."""

import random
import socket
from typing import Any

import pytest

from thinwire.transport.udp import endpoints


class LossySocket(socket.socket):
    """A socket of whose packets a share is lost, a share is sent twice, and a share is sent late."""

    def misbehave(self, loss: float, *, twice: float = 0.05, late: float = 0.05, seed: int = 0) -> None:
        self._chance, self._loss, self._twice, self._late = random.Random(seed), loss, twice, late
        self._delayed: list[tuple[Any, ...]] = []
        self.dropped = 0

    def send(self, data: Any, *rest: Any) -> int:
        return self._send(super().send, (data, *rest))

    def sendto(self, data: Any, *rest: Any) -> int:
        return self._send(super().sendto, (data, *rest))

    def sendmsg(self, buffers: Any, ancillary: Any = (), flags: int = 0, address: Any = None) -> int:
        """Send the packets that the kernel would split one by one, so that each is lost independently."""
        return sum(self.send(each) if address is None else self.sendto(each, address) for each in buffers)

    def _send(self, send: Any, arguments: tuple[Any, ...]) -> int:
        delayed, self._delayed = self._delayed, []
        if self._chance.random() < self._loss:
            self.dropped += 1
        elif self._chance.random() < self._late:
            self._delayed = [arguments]
        else:
            for _ in range(1 + (self._chance.random() < self._twice)):
                send(*arguments)
        for late in delayed:
            send(*late)
        return len(arguments[0])


def lose(monkeypatch: pytest.MonkeyPatch, loss: float, seed: int = 0) -> None:
    """Let all UDP sockets that the transport opens from now on lose this share of packets."""

    def open_socket(family: int) -> socket.socket:
        sock = LossySocket(family, socket.SOCK_DGRAM)
        sock.misbehave(loss, seed=seed)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        return sock

    monkeypatch.setattr(endpoints, "open_socket", open_socket)
