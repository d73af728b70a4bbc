"""Messages: what server and workers say to each other; checked before they are believed.

A message is a header of fixed size, and after it a frame, parameters, or a small JSON object. See docs/server.md.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.transport.base import Buffer

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


class MessageError(ThinwireError, ValueError):
    """A message that is malformed or makes no sense where it came."""


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
