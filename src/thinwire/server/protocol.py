"""Protocol: messages between the server and its workers, how a worker is admitted, and the session that it gets.

A message is a header of fixed size and, for some kinds, a body: JSON, a frame or raw tensors. Everything that a peer
sends is checked before it is used.
"""

import json
import math
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any

from torch import nn

import thinwire
from thinwire.codec.codec import Codec
from thinwire.codec.selection import Selection
from thinwire.errors import MessageError
from thinwire.server.layout import Buffers, Layout, Shapes, difference, frozen_difference, frozen_digests, trained
from thinwire.server.schedule import Pool, Staleness, check_policy
from thinwire.transport.base import Buffer
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Measured
from thinwire.tune.presets import resolve_codec


def server_codec(what: Codec | Selection | float | str) -> Codec:
    """The codec of one direction between a server and its workers; ValueError for one that only links can use."""
    codec = resolve_codec(what)
    if isinstance(codec.selection, Adaptive) and isinstance(codec.selection.cost, Measured):
        raise ValueError(f"{what!r} measures exchanges between ranks, which a parameter server has not: name another")
    return codec


PROTOCOL = 3
_MAGIC = b"TWPS"
# magic, protocol, kind, count, session, layer, part, clock, number
_HEADER = struct.Struct("<4sBBHIIIQQ")
# What an ACK may carry per layer: the lowest step, and how many workers are still at it.
STALENESS = struct.Struct("<QI")
# Messages of a session are numbered in each direction, so that a lost one is noticed. Numbers wrap around here.
COUNTS = 1 << 16
# The largest JSON body. Names and shapes of many thousand parameters fit.
_MOST_JSON = 1 << 22
# Limits on the figures that a worker reports: how many, the length of names and texts, and the size of whole numbers.
# Lists have a value for each layer, and the bytes that a report may have grow with the layers.
_MOST_FIGURES, _LONGEST_TEXT, _LARGEST_NUMBER = 64, 64, 1 << 63
_FIGURES_BYTES, _FIGURES_BYTES_PER_LAYER = 4096, 64
# The shortest and the longest timeout of a server, in seconds: heartbeats are sent four times in it.
LEAST_TIMEOUT, MOST_TIMEOUT = 0.1, 86_400.0
# No training reaches this step. A message that names a later one is invalid.
MOST_CLOCK = 1 << 48
MOST_WORKERS = 4096


class MessageKind(IntEnum):
    """What a message is. The comment names the sender and says what `number` means."""

    HELLO = 1  # worker: asks to join; JSON
    WELCOME = 2  # server: the worker is admitted; JSON with the terms of its session
    REFUSED = 3  # server: the worker is not admitted, or its message is invalid; JSON with the reason
    REJOIN = 4  # server: this session is unknown or over, the worker must send HELLO again; JSON with the reason
    PUSH = 5  # worker: gradient of a part; number is unused
    ACK = 6  # server: the push has been accepted; number: its bytes
    PULL = 7  # worker: asks for a part that is fresh enough for step `clock`; number: 1 asks for it in full
    DELTA = 8  # server: change of a part; number: its version
    FULL = 9  # server: a part's parameters in full; number: its version
    RECEIVED = 10  # worker: replies have arrived since the last such message; number: their bytes
    HEARTBEAT = 11  # both: the sender is alive; a worker's may carry figures of a step as JSON
    LEAVE = 12  # worker: leaves the training
    STOP = 13  # server: training has ended; JSON with the reason
    BUFFERS = 14  # both: the buffers of the sender's model; without a body: asks for the receiver's


_WITHOUT_BODY = {MessageKind.PULL, MessageKind.RECEIVED, MessageKind.LEAVE}
# Looking up a kind by IntEnum itself takes as long as the rest of a header.
_KINDS = {kind.value: kind for kind in MessageKind}
# These begin or end a session. They are valid even if messages before them were lost, so they are not numbered.
UNCOUNTED = {MessageKind[name] for name in ("HELLO", "WELCOME", "REFUSED", "REJOIN", "STOP", "LEAVE")}


@dataclass(slots=True)  # not frozen, because that would make its construction three times as slow
class Message:
    """One message between the server and a worker, in either direction."""

    kind: MessageKind
    session: int = 0
    layer: int = 0
    part: int = 0
    clock: int = 0
    number: int = 0
    body: Buffer = b""
    count: int = 0  # messages that this session sent before it in the same direction, modulo COUNTS

    def parts(self, count: int = 0) -> list[Buffer]:
        """Return the buffers that a transport sends for this message."""
        place = self.session, self.layer, self.part, self.clock, self.number
        head = _HEADER.pack(_MAGIC, PROTOCOL, self.kind, count, *place)
        return [head, self.body] if len(self.body) else [head]

    @property
    def json(self) -> dict[str, Any]:
        """The JSON object in the body; MessageError if the body is something else."""
        if len(self.body) > _MOST_JSON:
            raise MessageError(f"a {self.kind.name} message of {len(self.body)} bytes is too long")
        try:
            value = json.loads(bytes(self.body), parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise MessageError(f"the body of a {self.kind.name} message is not JSON") from error
        if not isinstance(value, dict):
            raise MessageError(f"the body of a {self.kind.name} message is not a JSON object")
        return value


class Counter:
    """Numbers the messages of one session in both directions."""

    def __init__(self) -> None:
        self._sent = self._received = 0

    def next(self, kind: MessageKind) -> int:
        """Return the count that the next message to send carries."""
        if kind in UNCOUNTED:
            return 0
        count, self._sent = self._sent, (self._sent + 1) % COUNTS
        return count

    def follows(self, message: Message) -> bool:
        """Return whether a message is the next in its direction; False if messages before it were lost."""
        if message.kind in UNCOUNTED:
            return True
        expected, self._received = self._received, (message.count + 1) % COUNTS
        return message.count == expected


def with_json(kind: MessageKind, session: int = 0, **values: Any) -> Message:
    """Return a message whose body is a JSON object of these values."""
    return Message(kind, session, body=json.dumps(values, allow_nan=False).encode())


def parse(parts: Sequence[Buffer]) -> Message:
    """Return the message in these buffers; MessageError says what is wrong with them."""
    if not 1 <= len(parts) <= 2:
        raise MessageError(f"a message has one or two parts, not {len(parts)}")
    if len(parts[0]) != _HEADER.size:
        raise MessageError(f"a header has {_HEADER.size} bytes, not {len(parts[0])}")
    magic, protocol, kind, count, session, layer, part, clock, number = _HEADER.unpack(parts[0])
    if magic != _MAGIC:
        raise MessageError("this is not a message of thinwire's parameter server")
    if protocol != PROTOCOL:
        raise MessageError(f"the peer speaks protocol {protocol}, this thinwire {PROTOCOL}: install the same version")
    known = _KINDS.get(kind)
    if known is None:
        raise MessageError(f"there is no message of kind {kind}")
    if clock > MOST_CLOCK:
        raise MessageError(f"step {clock} is beyond the largest possible step")
    if len(parts) == 2 and known in _WITHOUT_BODY:
        raise MessageError(f"a {known.name} message has no body")
    return Message(known, session, layer, part, clock, number, parts[1] if len(parts) == 2 else b"", count)


def field(values: dict[str, Any], name: str, kind: type, least: int | None = None, most: int = MOST_CLOCK) -> Any:
    """Return a value of a JSON body; MessageError if it has another type or is out of range."""
    value = values.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise MessageError(f"{name} must be of type {kind.__name__}, not {str(value)[:100]}")
    if least is not None and not least <= value <= most:  # type: ignore[operator]
        raise MessageError(f"{name} must lie between {least} and {most}, not {str(value)[:100]}")
    return value


def _finite(text: str) -> float:
    """Read a number. NaN is not JSON, and one that is too large for a float, such as 1e999, would become infinite."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} exceeds the range of numbers")
    return value


def read_figures(message: Message, layers: int) -> dict[str, Any]:
    """Return the figures in a worker's HEARTBEAT message; MessageError if they are too many, too long or no figures.

    Figures are finite numbers, null, short texts, and lists of at most as many numbers as there are layers (or 64).
    """
    if len(message.body) > (most := _FIGURES_BYTES + _FIGURES_BYTES_PER_LAYER * layers):
        raise MessageError(f"a worker's figures of {len(message.body)} bytes exceed {most} bytes")
    figures = message.json
    if len(figures) > _MOST_FIGURES:
        raise MessageError(f"a worker reports {len(figures)} figures, and {_MOST_FIGURES} are allowed")
    for name, value in figures.items():
        values = value if isinstance(value, list) else [value]
        if len(name) > _LONGEST_TEXT or not name.isprintable():
            raise MessageError(f"the name of a figure has up to {_LONGEST_TEXT} printable characters")
        if len(values) > max(layers, _MOST_FIGURES) or not all(map(_is_figure, values)):
            raise MessageError(f"the figure {name} is neither a finite number nor a short text nor a list of numbers")
    return figures


def _is_figure(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= _LARGEST_NUMBER
    return value is None or isinstance(value, float) or (isinstance(value, str) and len(value) <= _LONGEST_TEXT)


@dataclass(frozen=True)
class Applicant:
    """A worker that asks to join and may be admitted."""

    token: str  # identifies the worker across its sessions
    name: str
    slot: int | None  # the slot that it asks for


def hello_of(
    model: nn.Module, recipe: str, slot: int | None, name: str | None, domain: str = "gradient"
) -> dict[str, Any]:
    """Return the body of a HELLO message: what the server must know of a worker to admit it."""
    return {
        "token": secrets.token_hex(8),
        "recipe": recipe,
        "domain": domain,
        "version": thinwire.__version__,
        "parameters": [[name, list(p.shape)] for name, p in trained(model).items()],
        "buffers": Buffers(model).shapes,
        "frozen": frozen_digests(model),
        "slot": slot,
        "name": name if name is not None else socket.gethostname(),
    }


_DOMAINS = "workers with an optimizer of their own push updates to a server that was made without one"


class HelloCheck:
    """Checks that a worker's thinwire version, recipe, domain, transport and model are the server's."""

    def __init__(self, recipe: str, model: nn.Module, domain: str = "gradient") -> None:
        self._ours = hello_of(model, recipe, None, None, domain)
        self.shards = False  # whether the transport sends messages in shards, any of which may be lost

    def applicant(self, message: Message) -> Applicant:
        """Return the worker that sent a HELLO message; MessageError names what differs."""
        hello, ours = message.json, self._ours
        token, recipe, version = (field(hello, name, str)[:256] for name in ("token", "recipe", "version"))
        if version != ours["version"]:
            raise MessageError(f"the worker runs thinwire {version}, the server {ours['version']}")
        if recipe != ours["recipe"]:
            raise MessageError(f"the worker trains the recipe {recipe!r}, the server {ours['recipe']!r}")
        if (domain := field(hello, "domain", str)[:256]) != ours["domain"]:
            raise MessageError(f"the worker pushes {domain}s and the server takes {ours['domain']}s ({_DOMAINS})")
        if (hello.get("shards") is True) != self.shards:
            raise MessageError("server and worker must use the same --transport, and one of them uses udp")
        if not 8 <= len(token) <= 64:
            raise MessageError("a worker's token has 8 to 64 characters")
        found = (
            difference(ours["parameters"], _shapes(hello, "parameters"), "parameter")
            or difference(ours["buffers"], _shapes(hello, "buffers"), "buffer")
            or frozen_difference(ours["frozen"], {k: str(v) for k, v in field(hello, "frozen", dict).items()})
        )
        if found is not None:
            raise MessageError(f"the models differ: {found}")
        slot = None if hello.get("slot") is None else field(hello, "slot", int, 0, MOST_WORKERS - 1)
        name = "".join(c for c in str(hello.get("name", ""))[:64] if c.isprintable())
        return Applicant(token, name, slot)


def _shapes(values: dict[str, Any], name: str) -> Shapes:
    found: Shapes = field(values, name, list)
    for item in found:
        label, shape = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not isinstance(label, str) or not isinstance(shape, list) or not all(isinstance(n, int) for n in shape):
            raise MessageError(f"{name} must be a list of names and shapes")
    return found


def check_timeout(seconds: Any) -> float:
    """Return the seconds after which a server evicts a silent worker; ValueError if they are out of range."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not LEAST_TIMEOUT <= seconds <= MOST_TIMEOUT:
        limits = f"{LEAST_TIMEOUT:g} to {MOST_TIMEOUT:,.0f} seconds"
        raise ValueError(f"timeout is a number from {limits}, not {str(seconds)[:100]}")
    return float(seconds)


def check_on_loss(name: Any) -> str:
    """Return what workers do with lost shards of a gradient; ValueError if there is no such choice."""
    if name not in ("restore", "ignore"):
        raise ValueError(f'on-loss is "restore" or "ignore", not {str(name)[:100]!r}')
    return str(name)


# Pushes of which some shards were lost, by part and step: the ranges of these shards.
LostShards = dict[tuple[int, int], list[tuple[int, int]]]


@dataclass(frozen=True)
class AcceptedPushes:
    """Which pushes of a worker's last session the server has accepted. The worker adds the others to its residual.

    Steps of different sessions are not comparable: a worker may join again at a step below its last one.
    """

    session: int  # 0: of any session
    steps: list[int]  # by part: the pushes of all steps below it
    shards: LostShards  # of accepted pushes: the transport may not have reported what was lost

    def plain(self) -> dict[str, Any]:
        """Return it as plain values, for messages and checkpoints."""
        shards = [[part, clock, [list(each) for each in ranges]] for (part, clock), ranges in self.shards.items()]
        return {"session": self.session, "steps": list(self.steps), "shards": shards}

    @classmethod
    def read(cls, value: Any) -> "AcceptedPushes | None":
        """Read what `plain` returned; MessageError if it is something else."""
        if value is None:
            return None
        try:
            shards = {(part, clock): [(first, end) for first, end in ranges] for part, clock, ranges in value["shards"]}
            found = cls(value["session"], list(value["steps"]), shards)
        except (TypeError, ValueError, KeyError):
            raise MessageError("the accepted pushes must be a session, steps and shards") from None
        numbers = [found.session, *found.steps, *chain(*shards), *chain(*chain(*shards.values()))]
        if not all(type(number) is int for number in numbers):
            raise MessageError("the accepted pushes must be whole numbers")
        return found


class Session:
    """What a worker knows of its session: the terms of the WELCOME message, and which parameters have arrived.

    MessageError if the terms are invalid: the worker does not trust the server either.
    """

    def __init__(self, number: int, terms: dict[str, Any], model: nn.Module) -> None:
        self.number, self.counter = number, Counter()
        self.slot, self.first = field(terms, "slot", int, 0), field(terms, "first", int, 0)
        self.bound: int | None = None if terms.get("bound") is None else field(terms, "bound", int, 0)
        self.tell: dict[str, Any] = field(terms, "tell", dict)
        try:
            self.timeout = check_timeout(terms.get("timeout"))  # heartbeats at any pace would occupy this worker
            # Whether shards of a gradient that were lost are added to the residual again.
            self.restores = check_on_loss(self.tell.get("on_loss", "restore")) == "restore"
            self.layout = Layout.of(model, field(terms, "cut", int, 0))
            policy = check_policy(field(terms, "policy", str))
            self.codec = server_codec(self.tell.get("push", 0.01))  # for workers that choose none
        except ValueError as error:
            raise MessageError(f"the server's terms are invalid: {error}") from error
        self.known = Staleness.at_start(len(self.layout.layers), 1)
        self.pool = Pool(policy, self.known, field(terms, "window", int, 1))
        self.accepted = AcceptedPushes.read(terms.get("accepted"))
        # For each part: the step that the parameters here are fresh enough for, and their version.
        self.arrived = [[-1] * len(layer.parts) for layer in self.layout.layers]
        self.versions = [[-1] * len(layer.parts) for layer in self.layout.layers]

    def staleness(self, message: Message, previous: int) -> int:
        """Return how many steps the parameters in a reply lack.

        Without a staleness bound there is no such figure: return the updates by other workers since the previous
        version that this worker received.
        """
        if self.bound is not None:
            return max(0, message.clock - message.number)
        return max(0, message.number - previous - 1) if previous >= 0 else 0


@dataclass(frozen=True)
class Waiting:
    """What a server or a worker waits for, and for how many seconds it has waited."""

    what: str
    seconds: float

    def __str__(self) -> str:
        return f"waiting for {self.what}, {self.seconds:.0f} s so far"
