"""A real socket whose datagrams are lost, doubled and swapped, by a seeded throw of dice."""

import random
import socket
from typing import Any

import pytest

from thinwire.transport.udp import endpoints


class LossySocket(socket.socket):
    """Like a socket; of what is sent through it a share is lost, a share comes twice, a share comes late."""

    def misbehave(self, loss: float, *, twice: float = 0.05, late: float = 0.05, seed: int = 0) -> None:
        self._chance, self._loss, self._twice, self._late = random.Random(seed), loss, twice, late
        self._held: list[tuple[Any, ...]] = []
        self.dropped = 0

    def send(self, data: Any, *rest: Any) -> int:
        return self._throw(super().send, (data, *rest))

    def sendto(self, data: Any, *rest: Any) -> int:
        return self._throw(super().sendto, (data, *rest))

    def sendmsg(self, buffers: Any, ancillary: Any = (), flags: int = 0, address: Any = None) -> int:
        """Datagrams that the kernel would part: each is thrown for alone."""
        return sum(self.send(each) if address is None else self.sendto(each, address) for each in buffers)

    def _throw(self, send: Any, arguments: tuple[Any, ...]) -> int:
        held, self._held = self._held, []
        if self._chance.random() < self._loss:
            self.dropped += 1
        elif self._chance.random() < self._late:
            self._held = [arguments]
        else:
            for _ in range(1 + (self._chance.random() < self._twice)):
                send(*arguments)
        for late in held:
            send(*late)
        return len(arguments[0])


def lose(monkeypatch: pytest.MonkeyPatch, loss: float, seed: int = 0) -> None:
    """All sockets for datagrams that are opened from now on lose this share."""

    def open_socket(family: int) -> socket.socket:
        sock = LossySocket(family, socket.SOCK_DGRAM)
        sock.misbehave(loss, seed=seed)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        return sock

    monkeypatch.setattr(endpoints, "open_socket", open_socket)
