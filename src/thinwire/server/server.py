"""Server: the master of the parameter server; owns the model, takes gradients, gives parameters.

One thread does everything in the order of arrival. Messages are checked before they are believed: a worker that
sends nonsense is dropped with the reason in the log, and the others go on.
"""

import logging
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import thinwire
from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.errors import FrameError
from thinwire.server.aggregate import Aggregator, Reduce, cuts
from thinwire.server.clock import Clock
from thinwire.server.layers import Layout
from thinwire.server.lossy import Arrived, check_on_loss
from thinwire.server.lossy_views import LossyViews
from thinwire.server.members import Member, Members, Waiting
from thinwire.server.messages import Kind, Message, MessageError, field, parse, read_shapes, with_json
from thinwire.server.naming import named_codec
from thinwire.server.schedule import Pool, Request, Staleness, check_policy
from thinwire.server.store import Store
from thinwire.server.views import Views
from thinwire.transport.base import Listener, Peer

log = logging.getLogger("thinwire.server")

Mode = Literal["bsp", "ssp", "async"]
STALENESS = struct.Struct("<QI")
# Bytes that a part should take at the most on the wire, and that may be under way to or from one worker.
PART_BYTES = 1 << 18
WINDOW = 1 << 19
_MOST_WORKERS = 4096


class Server:
    """Trains a model with the gradients of workers that come and go.

    mode: "bsp" (all workers step together), "ssp" (at most `bound` steps apart) or "async" (nobody waits).
    codec: how changes of the model are sent to the workers: a codec, preset or density; None sends it in full.
    reduce: "mean" or "sum" of the workers' gradients. policy: which layer is answered first.
    phased: the whole model waits for the whole step, as in the paper; else every part goes its own way.
    on_loss: what workers do about pieces of gradients that a lossy transport lost: "restore" or "ignore".
    expect: training begins when so many workers are there. recipe: workers with another one are refused.
    timeout: seconds of silence, stall: seconds without progress, after which nobody waits for a worker any more.
    checkpoint: folder; written every `save_every` steps and read at the start if it holds one.
    tell: told to every worker that joins: its `push` is their codec if they name none.
    on_step: called with the server after every step that is complete in all layers.
    on_figures: called with what a worker tells of a step; a ValueError drops the worker.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mode: Mode = "bsp",
        bound: int = 3,
        codec: Codec | float | str | None = 0.01,
        reduce: Reduce = "mean",
        policy: str = "forward",
        expect: int = 1,
        phased: bool = False,
        on_loss: str = "restore",
        recipe: str = "",
        cut: int | None = None,
        window: int = WINDOW,
        timeout: float = 10.0,
        stall: float = 300.0,
        checkpoint: Path | None = None,
        save_every: int = 100,
        tell: dict[str, Any] | None = None,
        on_step: Callable[["Server"], None] = lambda server: None,
        on_figures: Callable[[Member, dict[str, Any]], None] = lambda member, figures: None,
    ) -> None:
        if mode not in ("bsp", "ssp", "async"):
            raise ValueError(f'mode is "bsp", "ssp" or "async", not {mode!r}')
        check_policy(policy)
        self.model, self.optimizer, self.mode = model, optimizer, mode
        self.policy, self.expect, self.recipe = policy, expect, recipe
        # The whole model needs no deltas.
        self.codec = None if codec is None or codec == "dense" else named_codec(codec)
        self._tell = {**(tell or {}), "on_loss": check_on_loss(on_loss)}
        self.bound = {"bsp": 0, "ssp": bound, "async": None}[mode]
        self.timeout, self.stall, self.window = timeout, stall, window
        whole = not cuts(optimizer)
        self.layout = Layout.of(model, 0 if whole else _cut_for(self.codec) if cut is None else cut)
        self._store, self._save_every = (Store(checkpoint) if checkpoint is not None else None), save_every
        self._aggregator = Aggregator(model, optimizer, self.layout, reduce)
        self.members = Members()
        self.extra: dict[str, float] = {}  # figures of the owner's that go with the checkpoint
        start = self._restore()
        self._places = list(self.layout.places())
        self.clock = Clock(len(self._places), self.bound, start, phased=phased)
        self.views = Views(self.layout, self._aggregator.values, self.codec, start)
        self._lossy: LossyViews | None = None
        self._on_step, self._on_figures = on_step, on_figures
        self._started = start > 0
        self._sessions = int(time.time()) & 0x7FFFFFFF  # a restarted server must not give a session out again
        self._sizes: dict[tuple[int, int], int] = {}
        self.stopped: str | None = None
        self.updates = 0
        self._noted = start
        self.applied_at = self.started_at = time.monotonic()

    def _restore(self) -> int:
        state = self._store.load(self.model, self.optimizer) if self._store is not None else None
        if state is None:
            return 0
        self.members.counted, self.extra = state["counted"], state["extra"]
        log.info("resumed at step %d", state["step"])
        return int(state["step"])

    # The loop

    def run(self, listener: Listener, *, max_steps: int | None = None) -> str:
        """Serve until `stop` is called or so many steps are complete; returns why it ended. Closes the listener."""
        self._listener, self._max_steps = listener, max_steps
        if listener.piece_bytes is not None:  # deltas may arrive in part
            self._lossy = self.views = LossyViews.of(self.views, listener.piece_bytes)
            listener.on_report = self._on_report
        self._check_end()
        try:
            while self.stopped is None:
                self._turn(0.25)
            self._say_stop()
        finally:
            listener.close()
        return self.stopped

    def listener_figures(self, member: Member) -> dict[str, float]:
        """What the transport knows of the way to a worker."""
        return self._listener.figures(member.peer)

    def stop(self, reason: str) -> None:
        """End training: workers are told, `run` returns. From another thread or a signal handler too."""
        self.stopped = self.stopped or reason

    def save(self) -> bool:
        """Write a checkpoint now, if there is a folder for it."""
        if self._store is None:
            return False
        counted = dict(self.members.counted)
        counted |= {m.token: self.clock.members[m.session].due for m in self.members.active.values()}
        return self._store.save(self.model, self.optimizer, max(self.clock.lowest), counted, self.extra)

    def _turn(self, timeout: float) -> None:
        for peer, parts in self._listener.poll(timeout):
            member: Member | None = None
            try:
                message = parse(parts)
                member = self.members.find(peer, message.session)
                self._handle(peer, member, message, sum(map(len, parts)))
            except (MessageError, FrameError, ValueError) as error:
                self._refuse(peer, member, str(error))
            if self.stopped is not None:
                return
        self._watch()

    def _watch(self) -> None:
        """Nobody waits for those who are silent, or who hold up everybody else."""
        holding = {s for s, m in self.clock.members.items() if self._holds_up(s)} if self.bound is not None else set()
        for member, reason in self.members.silent(self.timeout, self.stall, holding):
            log.warning("worker %d (%s) is out: %s", member.slot, member.name, reason)
            self._leave(member)
        now = time.monotonic()
        for token, waiting in list(self.members.waiting.items()):
            if now - waiting.heard > self.timeout:
                del self.members.waiting[token]

    def _holds_up(self, session: int) -> bool:
        mine = self.clock.members[session].reached
        others = [m.reached for s, m in self.clock.members.items() if s != session]
        return bool(others) and min(others) > mine

    def _say_stop(self) -> None:
        self.save()
        for member in self.members.active.values():
            self._send(member.peer, with_json(Kind.STOP, member.session, reason=self.stopped))

    # Messages

    def _handle(self, peer: Peer, member: Member | None, message: Message, size: int) -> None:
        if message.kind is Kind.HELLO:
            self._on_hello(peer, message)
            return
        if member is None:
            if message.kind is not Kind.BYE:
                reason = "the server does not know this session"
                self._send(peer, with_json(Kind.AGAIN, message.session, reason=reason))
            return
        member.heard = time.monotonic()
        member.received += size
        handlers: dict[Kind, Callable[[Member, Message], None]] = {
            Kind.PUSH: self._on_push,
            Kind.PULL: self._on_pull,
            Kind.GOT: self._on_got,
            Kind.BEAT: self._on_beat,
            Kind.BYE: self._on_bye,
        }
        if message.kind not in handlers:
            raise MessageError(f"a worker does not send a {message.kind.name}")
        handlers[message.kind](member, message)

    def _on_hello(self, peer: Peer, message: Message) -> None:
        hello = message.json
        token = field(hello, "token", str)
        recipe, version = field(hello, "recipe", str), field(hello, "version", str)
        if version != thinwire.__version__:
            raise MessageError(f"the worker runs thinwire {version}, the server {thinwire.__version__}")
        if recipe != self.recipe:
            raise MessageError(f"the worker trains the recipe {recipe!r}, the server {self.recipe!r}")
        if (hello.get("pieces") is True) != (self._lossy is not None):
            raise MessageError("server and worker must use the same --transport, and one of them uses udp")
        difference = self.layout.difference(read_shapes(hello))
        if difference is not None:
            raise MessageError(f"the models differ: {difference}")
        if len(self.members.active) + len(self.members.waiting) >= _MOST_WORKERS:
            raise MessageError(f"the server has {_MOST_WORKERS} workers already")
        before = self.members.by_token(token)
        if before is not None:
            self._leave(before)
        if self._started:
            if not self.members.joined:
                self.started_at = time.monotonic()
            self._admit(peer, hello)
            return
        self.members.waiting[token] = Waiting(peer, hello, time.monotonic())
        self._send(peer, Message(Kind.BEAT))  # it waits, and knows that we live
        if len(self.members.waiting) >= self.expect:
            self._started = True
            self.started_at = time.monotonic()
            wishes = sorted(self.members.waiting.values(), key=lambda w: _wish(w.hello, len(self.members.waiting)))
            self.members.waiting.clear()
            for waiting in wishes:
                self._admit(waiting.peer, waiting.hello)

    def _admit(self, peer: Peer, hello: dict[str, Any]) -> None:
        self._sessions += 1
        session, token = self._sessions, hello["token"]
        first, now = self.clock.join(session), time.monotonic()
        known = Staleness.at_start(len(self.layout.layers), 1)
        slot = self.members.slot(hello["slot"] if isinstance(hello.get("slot"), int) else None)
        name = str(hello.get("name", ""))[:64]
        pool = Pool(self.policy, known, self.window)
        member = Member(peer, session, slot, token, name, first, pool, now, now)
        self.members.active[session] = member
        self.members.joined += 1
        log.info("worker %d (%s) joins at step %d", slot, name, first)
        terms = {
            "slot": slot,
            "first": first,
            "bound": self.bound,
            "policy": self.policy,
            "window": self.window,
            "cut": self.layout.cut,
            "timeout": self.timeout,
            "counted": self.members.counted.pop(token, None),
            "tell": self._tell,
        }
        self._send(peer, with_json(Kind.WELCOME, session, **terms))

    def _on_push(self, member: Member, message: Message) -> None:
        layer, part, clock = message.layer, message.part, message.clock
        number = self.layout.number(layer, part)
        numels = self.layout.numels(layer, part)
        frame: FrameReader | Arrived
        if self._lossy is not None:
            frame = Arrived(message.body, numels)
        else:
            frame = FrameReader(Frame.from_bytes(memoryview(message.body)), numels)
        if self.clock.push(member.session, number, clock):
            self._aggregator.keep(member.slot, number, clock, frame)
        size = frame.size if isinstance(frame, Arrived) else len(message.body)
        taken = Message(Kind.ACK, member.session, layer, part, clock, size, self._staleness())
        self._send(member.peer, taken)
        member.progressed = time.monotonic()
        mine = self.clock.members[member.session]
        if mine.reached > clock:
            member.steps.append(member.progressed)
        if self.bound is None:
            self._apply_one(member, number, clock)
        else:
            self._progress(number)

    def _staleness(self) -> bytes:
        """Per layer: the lowest step, and how many workers hold it. Only one policy asks for it."""
        if self.policy != "stalest":
            return b""
        lowest: dict[int, int] = {}  # the part of each layer that is furthest behind
        for number, (layer, _) in enumerate(self._places):
            if layer not in lowest or self.clock.lowest[number] < self.clock.lowest[lowest[layer]]:
                lowest[layer] = number
        return b"".join(STALENESS.pack(self.clock.lowest[i], self.clock.holders(i)) for i in lowest.values())

    def _on_pull(self, member: Member, message: Message) -> None:
        layer, part = message.layer, message.part
        number = self.layout.number(layer, part)
        if number in member.parked:
            raise MessageError(f"a pull of part {part} of layer {layer} waits already")
        member.parked[number] = message.clock, bool(message.number)
        self._answer(member, number)

    def _on_report(self, peer: Peer, ticket: int, lost: frozenset[int]) -> None:
        """What became of a delta that was sent in pieces."""
        if self._lossy is not None:
            self._lossy.settle(peer, ticket, lost)

    def _on_got(self, member: Member, message: Message) -> None:
        member.pool.done(message.number)
        self._flush(member)

    def _on_beat(self, member: Member, message: Message) -> None:
        if len(message.body):
            member.figures = message.json
            self._on_figures(member, member.figures)
        self._send(member.peer, Message(Kind.BEAT, member.session))

    def _on_bye(self, member: Member, message: Message) -> None:
        log.info("worker %d (%s) leaves", member.slot, member.name)
        self._leave(member)

    # What follows from them

    def _progress(self, number: int) -> None:
        """Apply the steps of a part that are complete, and answer those who waited for them."""
        moved = False
        while self.clock.complete(number):
            self.updates += self._aggregator.apply(number, self.clock.lowest[number]) > 0
            self.clock.advance(number)
            self.views.changed(*self._places[number])
            moved = True
        if moved:
            ready = range(len(self._places)) if self.clock.phased else [number]
            for member in self.members.active.values():
                for each in ready:
                    self._answer(member, each)
            self._note_step()

    def _apply_one(self, member: Member, number: int, clock: int) -> None:
        self.updates += self._aggregator.apply_one(member.slot, number, clock, len(self.members.active)) > 0
        self.views.changed(*self._places[number])
        self.clock.settle(number)
        self._note_step()

    def _note_step(self) -> None:
        if self.clock.step <= self._noted:
            return
        self._noted = self.clock.step
        began = self.applied_at = time.monotonic()
        self._on_step(self)
        if self._store is not None and self._noted % self._save_every == 0:
            self.save()
        self.members.excuse(time.monotonic() - began)
        self._check_end()

    def _check_end(self) -> None:
        if self._max_steps is not None and self.clock.step >= self._max_steps:
            self.stop("max_steps")

    def _answer(self, member: Member, number: int) -> None:
        """Let the pull of a part go if it need not wait any more."""
        waiting = member.parked.get(number)
        if waiting is not None and self.clock.may_use(number, waiting[0]):
            clock, whole = member.parked.pop(number)
            layer, part = self._places[number]
            size = self._sizes.get((layer, part), PART_BYTES)
            # The sign of the part tells how it was asked for.
            member.pool.put(Request("pull", layer, ~part if whole else part, clock, size))
        self._flush(member)

    def _flush(self, member: Member) -> None:
        while (request := member.pool.next()) is not None:
            whole = request.part < 0
            part = ~request.part if whole else request.part
            answer = self.views.answer(member.session, request.layer, part, whole=whole)
            kind = Kind.WHOLE if answer.whole else Kind.DELTA
            size = len(answer.body) + sum(map(len, answer.shards))
            if not answer.whole or self.codec is None:
                self._sizes[request.layer, part] = size
            member.pool.sent(request, size)
            member.pool.known.here[request.layer] = request.clock
            message = Message(kind, member.session, request.layer, part, request.clock, answer.edition, answer.body)
            member.sent += size
            if self._lossy is None or answer.whole:
                self._send(member.peer, message)
            else:
                head = bytes(message.parts()[0])
                ticket = self._listener.send_pieces(member.peer, head, answer.shards)
                self._lossy.under_way(member.session, request.layer, part, member.peer, ticket)

    def _leave(self, member: Member) -> None:
        """Nobody waits for this worker any more; what it pushed before stays counted."""
        self.members.active.pop(member.session, None)
        self.members.remember(member.token, self.clock.members[member.session].due)
        self.members.left += 1
        self.clock.leave(member.session)
        self.views.forget(member.session)
        self._listener.forget(member.peer)
        if self.bound is not None:
            for number in range(len(self._places)):
                self._progress(number)

    def _refuse(self, peer: Peer, member: Member | None, reason: str) -> None:
        who = f"worker {member.slot} ({member.name})" if member is not None else "a stranger"
        log.warning("%s is refused: %s", who, " ".join(reason.split())[:300])
        session = member.session if member is not None else 0
        self._send(peer, with_json(Kind.REFUSED, session, reason=reason))
        if member is not None:
            self._leave(member)

    def _send(self, peer: Peer, message: Message) -> None:
        self._listener.send(peer, message.parts())


def _cut_for(codec: Codec | None) -> int:
    """Elements of a part so that it takes about PART_BYTES on the wire."""
    if codec is None:
        return PART_BYTES // 4
    n = 1 << 20
    return max(1 << 15, int(PART_BYTES * n / codec.frame_bound([n], codec.expected_counts([n]))))


def _wish(hello: dict[str, Any], last: int) -> int:
    slot = hello.get("slot")
    return slot if isinstance(slot, int) and not isinstance(slot, bool) else last
