"""Handshake: what a worker says to be let in, and what it is checked for."""

import secrets
import socket
from dataclasses import dataclass
from typing import Any

from torch import nn

import thinwire
from thinwire.server.buffers import Buffers, frozen_difference, frozen_digests
from thinwire.server.layers import Shapes, difference, trained
from thinwire.server.messages import Message, MessageError, field, read_shapes

MOST_WORKERS = 4096


@dataclass(frozen=True)
class Applicant:
    """A worker that may come in."""

    token: str  # who it is, across sessions
    name: str
    slot: int | None  # the number that it would like to have


def hello_of(model: nn.Module, recipe: str, slot: int | None, name: str | None) -> dict[str, Any]:
    """What a worker says of itself."""
    return {
        "token": secrets.token_hex(8),
        "recipe": recipe,
        "version": thinwire.__version__,
        "parameters": [[n, list(p.shape)] for n, p in trained(model).items()],
        "buffers": [[n, list(shape)] for n, shape in Buffers(model).shapes],
        "frozen": frozen_digests(model),
        "slot": slot,
        "name": name if name is not None else socket.gethostname(),
    }


class Door:
    """Lets in those whose thinwire, recipe and model are the server's."""

    def __init__(self, recipe: str, model: nn.Module) -> None:
        self._recipe = recipe
        self.pieces = False  # whether messages travel in pieces, any of which may be lost
        self._parameters: Shapes = [(n, tuple(p.shape)) for n, p in trained(model).items()]
        self._buffers = Buffers(model).shapes
        self._frozen = frozen_digests(model)

    def check(self, message: Message) -> Applicant:
        """Who says hello; MessageError names what differs."""
        hello = message.json
        token, recipe, version = (field(hello, name, str)[:256] for name in ("token", "recipe", "version"))
        if version != thinwire.__version__:
            raise MessageError(f"the worker runs thinwire {version}, the server {thinwire.__version__}")
        if recipe != self._recipe:
            raise MessageError(f"the worker trains the recipe {recipe!r}, the server {self._recipe!r}")
        if (hello.get("pieces") is True) != self.pieces:
            raise MessageError("server and worker must use the same --transport, and one of them uses udp")
        if not 8 <= len(token) <= 64:
            raise MessageError("a worker's token has 8 to 64 characters")
        found = (
            difference(self._parameters, read_shapes(hello, "parameters"), "parameter")
            or difference(self._buffers, read_shapes(hello, "buffers"), "buffer")
            or frozen_difference(self._frozen, {k: str(v) for k, v in field(hello, "frozen", dict).items()})
        )
        if found is not None:
            raise MessageError(f"the models differ: {found}")
        slot = None if hello.get("slot") is None else field(hello, "slot", int, 0, MOST_WORKERS - 1)
        name = "".join(c for c in str(hello.get("name", ""))[:64] if c.isprintable())
        return Applicant(token, name, slot)
