"""Session: what the server agreed to with one worker, until it forgets it; and what the worker knows of its parts."""

import json
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import nn

import thinwire
from thinwire.codec.codec import Codec
from thinwire.errors import MessageError
from thinwire.server.layout import Buffers, Layout, Shapes, difference, frozen_difference, frozen_digests, trained
from thinwire.server.schedule import Pool, Staleness, check_policy
from thinwire.transport.base import Buffer
from thinwire.tune.presets import resolve_codec

PROTOCOL = 2
_MAGIC = b"TWPS"
# magic, protocol, kind, count, session, layer, part, clock, number
_HEADER = struct.Struct("<4sBBHIIIQQ")
# What an ACK may carry per layer: the lowest step, and how many workers hold it.
STALENESS = struct.Struct("<QI")
# Messages of a session are counted in each direction, so that a lost one is noticed; the count begins again here.
COUNTS = 1 << 16
# What a JSON object may take: names and shapes of many thousand parameters fit.
_MOST_JSON = 1 << 22
# A clock that anybody can reach; a larger one is a mistake.
MOST_CLOCK = 1 << 48


class Kind(IntEnum):
    """What a message is; the comment says which way it goes and what `number` means."""

    HELLO = 1  # worker: let me in; JSON
    WELCOME = 2  # server: you are in; JSON
    REFUSED = 3  # server: not you, and why; JSON
    AGAIN = 4  # server: I do not know you (any more), say hello again; JSON
    PUSH = 5  # worker: gradient of a part; number: nothing
    ACK = 6  # server: the push has been taken; number: its bytes
    PULL = 7  # worker: send me that part when it is fresh enough for `clock`; number: 1 asks for all of it
    DELTA = 8  # server: change of a part; number: its edition
    WHOLE = 9  # server: a part's parameters in full; number: its edition
    GOT = 10  # worker: answers have arrived since the last one; number: their bytes
    BEAT = 11  # both: I am alive; a worker's may hold JSON with figures to show
    BYE = 12  # worker: I leave
    STOP = 13  # server: training has ended; JSON
    BUFFERS = 14  # both: these are my model's buffers; without a body: send me yours


_WITH_JSON = {Kind.HELLO, Kind.WELCOME, Kind.REFUSED, Kind.AGAIN, Kind.BEAT, Kind.STOP}
_WITH_BYTES = {Kind.PUSH, Kind.DELTA, Kind.WHOLE, Kind.ACK, Kind.BUFFERS}
# These end a session or stand outside of it: they are believed whatever was lost before them.
UNCOUNTED = {Kind.HELLO, Kind.WELCOME, Kind.REFUSED, Kind.AGAIN, Kind.STOP, Kind.BYE}


@dataclass(frozen=True)
class Message:
    """One message, either way."""

    kind: Kind
    session: int = 0
    layer: int = 0
    part: int = 0
    clock: int = 0
    number: int = 0
    body: Buffer = b""
    count: int = 0  # of this session's messages before it, in its direction

    def parts(self, count: int = 0) -> list[Buffer]:
        """As it travels."""
        head = _HEADER.pack(
            _MAGIC, PROTOCOL, self.kind, count, self.session, self.layer, self.part, self.clock, self.number
        )
        return [head, self.body] if len(self.body) else [head]

    @property
    def json(self) -> dict[str, Any]:
        """The body of a message that carries JSON."""
        if len(self.body) > _MOST_JSON:
            raise MessageError(f"a {self.kind.name} of {len(self.body)} bytes is too long")
        try:
            value = json.loads(bytes(self.body), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise MessageError(f"the body of a {self.kind.name} is not JSON") from error
        if not isinstance(value, dict):
            raise MessageError(f"the body of a {self.kind.name} is not a JSON object")
        return value


class Counter:
    """Counts the messages of one session, both ways."""

    def __init__(self) -> None:
        self._sent = self._heard = 0

    def next(self, kind: Kind) -> int:
        """The count that the next message to send carries."""
        if kind in UNCOUNTED:
            return 0
        count, self._sent = self._sent, (self._sent + 1) % COUNTS
        return count

    def follows(self, message: Message) -> bool:
        """Whether a message is the next in its turn, or others before it were lost."""
        if message.kind in UNCOUNTED:
            return True
        expected, self._heard = self._heard, (message.count + 1) % COUNTS
        return message.count == expected


def with_json(kind: Kind, session: int = 0, **values: Any) -> Message:
    """A message whose body is a JSON object."""
    return Message(kind, session, body=json.dumps(values, allow_nan=False).encode())


def parse(parts: Sequence[Buffer]) -> Message:
    """The message in these buffers; MessageError says what is wrong with them."""
    if not 1 <= len(parts) <= 2:
        raise MessageError(f"a message has one or two parts, not {len(parts)}")
    if len(parts[0]) != _HEADER.size:
        raise MessageError(f"a header has {_HEADER.size} bytes, not {len(parts[0])}")
    magic, protocol, kind, count, session, layer, part, clock, number = _HEADER.unpack(parts[0])
    if magic != _MAGIC:
        raise MessageError("this is not a message of thinwire's parameter server")
    if protocol != PROTOCOL:
        raise MessageError(f"the peer speaks protocol {protocol}, this thinwire {PROTOCOL}: install the same version")
    try:
        known = Kind(kind)
    except ValueError:
        raise MessageError(f"there is no message of kind {kind}") from None
    if clock > MOST_CLOCK:
        raise MessageError(f"nobody is at clock {clock}")
    if len(parts) == 2 and known not in _WITH_JSON | _WITH_BYTES:
        raise MessageError(f"a {known.name} has no body")
    return Message(known, session, layer, part, clock, number, parts[1] if len(parts) == 2 else b"", count)


def field(values: dict[str, Any], name: str, kind: type, least: int | None = None, most: int = MOST_CLOCK) -> Any:
    """A value of a JSON body, of the type it must have; a number in the range where it makes sense."""
    value = values.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise MessageError(f"{name} must be of type {kind.__name__}, not {str(value)[:100]}")
    if least is not None and not least <= value <= most:  # type: ignore[operator]
        raise MessageError(f"{name} must lie between {least} and {most}, not {str(value)[:100]}")
    return value


def read_shapes(values: dict[str, Any], name: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of tensors, as a HELLO lists them."""
    found = []
    for item in field(values, name, list):
        label, shape = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not isinstance(label, str) or not isinstance(shape, list) or not all(isinstance(n, int) for n in shape):
            raise MessageError(f"{name} must be a list of names and shapes")
        found.append((label, tuple(shape)))
    return found


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


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


class Session:
    """The terms of a WELCOME; MessageError if they make no sense, for a server may be hostile too."""

    def __init__(self, number: int, terms: dict[str, Any], model: nn.Module) -> None:
        self.number, self.counter = number, Counter()
        self.slot, self.first = field(terms, "slot", int, 0), field(terms, "first", int, 0)
        self.bound: int | None = None if terms.get("bound") is None else field(terms, "bound", int, 0)
        self.timeout = _seconds(terms)
        self.tell: dict[str, Any] = field(terms, "tell", dict)
        try:
            self.layout = Layout.of(model, field(terms, "cut", int, 0))
            policy = check_policy(field(terms, "policy", str))
        except ValueError as error:
            raise MessageError(f"the server's terms make no sense: {error}") from error
        self.known = Staleness.at_start(len(self.layout.layers), 1)
        self.pool = Pool(policy.name, self.known, field(terms, "window", int, 1))
        self.counted: list[int] | None = terms.get("counted")
        if self.counted is not None and (
            not isinstance(self.counted, list) or not all(type(n) is int for n in self.counted)
        ):
            raise MessageError("counted must be a list of whole numbers")
        # Per part: the clock of what has arrived, and its edition.
        self.arrived = [[-1] * len(layer.parts) for layer in self.layout.layers]
        self.editions = [[-1] * len(layer.parts) for layer in self.layout.layers]

    def stale(self, message: Message, before: int) -> int:
        """Steps that a part lacks as it comes; without a bound, the updates of others since the edition before."""
        if self.bound is not None:
            return max(0, message.clock - message.number)
        return max(0, message.number - before - 1) if before >= 0 else 0

    def codec(self) -> Codec:
        """The codec that the server tells its workers to push with."""
        push = self.tell.get("push", 0.01)
        if not isinstance(push, str | float | int):
            raise MessageError("the server's push must be the name of a codec or a density")
        try:
            return resolve_codec(push)
        except ValueError as error:
            raise MessageError(f"the server's terms make no sense: {error}") from error


def _seconds(terms: dict[str, Any]) -> float:
    value = terms.get("timeout")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise MessageError("timeout must be a number of seconds")
    return float(value)
