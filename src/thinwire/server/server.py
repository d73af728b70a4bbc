"""Server: the master of the parameter server; owns the model, takes gradients, gives parameters.

One thread does everything in the order of arrival. Messages are checked before they are believed: a worker that
sends nonsense is dropped with the reason in the log, and the others go on.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.errors import FrameError
from thinwire.server.aggregate import Aggregator, Reduce, cuts
from thinwire.server.answers import Answers
from thinwire.server.buffers import Buffers
from thinwire.server.clock import Clock
from thinwire.server.handshake import MOST_WORKERS, Applicant, Door
from thinwire.server.layers import MOST_ELEMENTS, Layout
from thinwire.server.lossy import Arrived, check_on_loss
from thinwire.server.lossy_views import LossyViews
from thinwire.server.members import Member, Members, Waiting
from thinwire.server.messages import STALENESS, Kind, Message, MessageError, parse, with_json
from thinwire.server.naming import named_codec
from thinwire.server.schedule import Pool, Staleness, check_policy
from thinwire.server.store import Store
from thinwire.server.views import Views
from thinwire.transport.base import Buffer, Listener, Parts, Peer

log = logging.getLogger("thinwire.server")

Mode = Literal["bsp", "ssp", "async"]
# Bytes that a part should take at the most on the wire, and that may be under way to or from one worker.
PART_BYTES = 1 << 18
WINDOW = 1 << 19
# Steps after which a worker is asked for its buffers (running statistics), if the model has any.
BUFFERS_EVERY = 10
# Seconds that workers are given to hear of the end.
_PARTING = 3.0


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
        self.policy, self.expect = policy, expect
        # The whole model needs no deltas.
        self.codec = None if codec is None or codec == "dense" else named_codec(codec)
        self._tell = {**(tell or {}), "on_loss": check_on_loss(on_loss)}
        self.bound = {"bsp": 0, "ssp": bound, "async": None}[mode]
        self.timeout, self.stall, self.window = timeout, stall, window
        whole = not cuts(optimizer)
        self.layout = Layout.of(model, 0 if whole else _cut_for(self.codec) if cut is None else cut)
        self._door, self._buffers = Door(recipe, model), Buffers(model)
        self._store, self._save_every = (Store(checkpoint) if checkpoint is not None else None), save_every
        self._aggregator = Aggregator(model, optimizer, self.layout, reduce)
        self.members = Members()
        self.extra: dict[str, float] = {}  # figures of the owner's that go with the checkpoint
        start = self._restore()
        self._places = list(self.layout.places())
        self.clock = Clock(len(self._places), self.bound, start, phased=phased)
        self.views = Views(self.layout, self._aggregator.values, self.codec, start)
        self._open_answers()
        self._on_step, self._on_figures = on_step, on_figures
        self._handlers: dict[Kind, Callable[[Member, Message], None]] = {
            Kind.PUSH: self._on_push,
            Kind.PULL: self._on_pull,
            Kind.GOT: lambda member, message: self._answers.got(member, message.number),
            Kind.BEAT: self._on_beat,
            Kind.BUFFERS: self._on_buffers,
            Kind.BYE: self._on_bye,
        }
        self.started = False
        self._sessions = secrets.randbits(30)  # a restarted server must not give a session out again
        self._lost: list[Member] = []  # a message to them could not be sent
        self._refused: dict[Peer, None] = {}  # of late
        self.stopped: str | None = None
        self.updates = 0
        self._noted = self._resumed = start
        self.applied_at = self.started_at = self._watched = time.monotonic()

    def _restore(self) -> int:
        state = self._store.load(self.model, self.optimizer, self.layout.cut) if self._store is not None else None
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
            lossy = self.views = LossyViews.of(self.views, listener.piece_bytes)
            listener.on_report = lossy.settle
            self._door.pieces = True
            self._open_answers()
        self.started_at = time.monotonic()
        self._check_end()
        try:
            while self.stopped is None:
                self._turn(0.25)
            self.save()
            self._part(self.stopped)
        finally:
            listener.close()
        return self.stopped

    def _open_answers(self) -> None:
        self._answers = Answers(self.layout, self.clock, self.views, self._send_to, self._send_pieces)

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
        step = max(self.clock.lowest)
        return self._store.save(self.model, self.optimizer, self.layout.cut, step, counted, self.extra)

    def _turn(self, timeout: float) -> None:
        arrived = self._listener.poll(timeout)
        self._watch({peer for peer, _ in arrived})
        self._drop_lost()
        for peer, parts in arrived:
            self._take(peer, parts)
            self._drop_lost()
            if self.stopped is not None:
                return

    def _drop_lost(self) -> None:
        while self._lost:  # to drop one may be to answer others, who may be lost too
            member = self._lost.pop()
            if member.session in self.members.active:
                log.warning("%s is out: it cannot be reached", member.label)
                self._leave(member)

    def _take(self, peer: Peer, parts: Parts) -> None:
        member: Member | None = None
        try:
            message = parse(parts)
            member = self.members.find(peer, message.session)
            self._handle(peer, member, message, sum(map(len, parts)))
        except (MessageError, FrameError) as error:
            self._refuse(peer, member or self.members.by_peer(peer), str(error))

    def _watch(self, heard: set[Peer]) -> None:
        """Nobody waits for those who are silent, or who hold up everybody else."""
        now = time.monotonic()
        for member in self.members.active.values():
            if member.peer in heard:  # before anything else takes its time
                member.heard = now
        if now - self._watched < min(0.25, self.timeout / 8):
            return
        self._watched = now
        for member, reason in self.members.silent(self.timeout, self.stall, self._holding_up()):
            log.warning("%s is out: %s", member.label, reason)
            self._leave(member)
        self.members.tidy(self.timeout)
        if not self.started and self._resumed and now - self.started_at > self.timeout:
            self._start()  # those who come back late join later

    def _holding_up(self) -> list[int]:
        """The one worker, if any, that all others wait for."""
        reached = sorted((member.reached, session) for session, member in self.clock.members.items())
        alone = len(reached) > 1 and self.bound is not None and reached[0][0] < reached[1][0]
        return [reached[0][1]] if alone else []

    def _part(self, reason: str) -> None:
        """Tell everybody that it is over; those who come in these seconds too."""
        for member in self.members.active.values():
            self._send(member.peer, with_json(Kind.STOP, member.session, reason=reason))
        for waiting in self.members.waiting.values():
            self._send(waiting.peer, with_json(Kind.STOP, reason=reason))
        left = {member.peer for member in self.members.active.values()}
        deadline = time.monotonic() + min(_PARTING, self.timeout)
        while left and time.monotonic() < deadline:
            for peer, parts in self._listener.poll(0.1):
                try:
                    message = parse(parts)
                except MessageError:
                    continue
                if message.kind is Kind.BYE:
                    left.discard(peer)
                elif peer not in left:
                    self._send(peer, with_json(Kind.STOP, message.session, reason=reason))

    # Messages

    def _handle(self, peer: Peer, member: Member | None, message: Message, size: int) -> None:
        if message.kind is Kind.HELLO:
            self._on_hello(peer, message)
            return
        if member is None:
            if message.kind is Kind.BYE:
                self.members.waiting = {t: w for t, w in self.members.waiting.items() if w.peer != peer}
            else:
                self._forget(peer, message.session, "the server does not know this session")
            return
        if not member.counter.follows(message):
            log.warning("%s is out: messages were lost on the way", member.label)
            self._leave(member)
            self._forget(peer, message.session, "messages were lost on the way")
            return
        member.received += size
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise MessageError(f"a worker does not send a {message.kind.name}")
        handler(member, message)

    def _forget(self, peer: Peer, session: int, reason: str) -> None:
        self._send(peer, with_json(Kind.AGAIN, session, reason=reason))
        if self.members.by_peer(peer) is None:
            self._listener.forget(peer)

    def _on_hello(self, peer: Peer, message: Message) -> None:
        applicant = self._door.check(message)
        before = self.members.by_token(applicant.token)
        if before is not None and before.peer == peer and not before.received and before.welcome is not None:
            self._send(peer, before.welcome)  # it asked twice before we answered
            return
        if before is not None:
            self._leave(before, stays=before.peer == peer)
        if len(self.members.active) + len(self.members.waiting) >= MOST_WORKERS:
            raise MessageError(f"the server has {MOST_WORKERS} workers already")
        if self.started:
            self._admit(peer, applicant)
            return
        self.members.waiting[applicant.token] = Waiting(peer, applicant, time.monotonic())
        self._send(peer, Message(Kind.BEAT))  # it waits, and knows that we live
        if len(self.members.waiting) >= self.expect:
            self._start()

    def _start(self) -> None:
        """Training begins with those who wait; after a restart with those who are back."""
        if not self.members.waiting:
            return
        self.started = True
        self.started_at = time.monotonic()
        waiting, self.members.waiting = self.members.waiting, {}
        last = len(waiting)
        for each in sorted(waiting.values(), key=lambda w: last if w.applicant.slot is None else w.applicant.slot):
            self._admit(each.peer, each.applicant)

    def _admit(self, peer: Peer, applicant: Applicant) -> None:
        self._sessions += 1
        session, token, name = self._sessions, applicant.token, applicant.name
        first, slot = self.clock.join(session), self.members.slot(applicant.slot)
        pool = Pool(self.policy, Staleness.at_start(len(self.layout.layers), 1), self.window)
        now = time.monotonic()
        member = Member(peer, session, slot, token, name, first, pool, now, now)
        member.counted = self.members.counted.pop(token, None)
        self.members.active[session] = member
        self.members.joined += 1
        log.info("%s joins at step %d", member.label, first)
        terms = {
            "slot": slot,
            "first": first,
            "bound": self.bound,
            "policy": self.policy,
            "window": self.window,
            "cut": self.layout.cut,
            "timeout": self.timeout,
            "counted": member.counted,
            "tell": self._tell,
        }
        member.welcome = with_json(Kind.WELCOME, session, **terms)
        self._send_to(member, member.welcome)

    def _number(self, message: Message) -> int:
        number = self.layout.numbers.get((message.layer, message.part))
        if number is None:
            raise MessageError(f"there is no part {message.part} of a layer {message.layer}")
        return number

    def _on_push(self, member: Member, message: Message) -> None:
        layer, part, clock = message.layer, message.part, message.clock
        number = self._number(message)
        numels, size = self.layout.numels(layer, part), len(message.body)
        frame: FrameReader | Arrived
        if self._listener.piece_bytes is None:
            frame = FrameReader(Frame.from_bytes(memoryview(message.body)), numels)
        else:
            frame = Arrived(message.body, numels)
            size = frame.size
        fresh = self.clock.push(member.session, number, clock)
        if fresh:
            self._aggregator.keep(member.slot, number, clock, frame)
        taken = Message(Kind.ACK, member.session, layer, part, clock, size, self._staleness())
        self._send_to(member, taken)
        if not fresh:
            return
        if self.clock.members[member.session].reached > clock:
            member.steps.append(time.monotonic())
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
        self._answers.ask(member, self._number(message), message.clock, whole=bool(message.number))

    def _on_beat(self, member: Member, message: Message) -> None:
        if len(message.body):
            member.figures = message.json
            try:
                self._on_figures(member, member.figures)
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                raise MessageError(f"a worker's figures make no sense: {error}") from error
        self._send_to(member, Message(Kind.BEAT, member.session))

    def _on_buffers(self, member: Member, message: Message) -> None:
        if len(message.body):
            self._buffers.take(message.body)
        else:
            self._send_to(member, Message(Kind.BUFFERS, member.session, body=self._buffers.body()))

    def _on_bye(self, member: Member, message: Message) -> None:
        log.info("%s leaves", member.label)
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
                    self._answers.release(member, each)
            self._note_step()

    def _apply_one(self, member: Member, number: int, clock: int) -> None:
        self.updates += self._aggregator.apply_one(member.slot, number, clock, len(self.members.active)) > 0
        self.views.changed(*self._places[number])
        self.clock.settle(number)
        self._note_step()

    def _note_step(self) -> None:
        before, self._noted = self._noted, self.clock.step
        if self._noted <= before:
            return
        began = self.applied_at = time.monotonic()
        self._on_step(self)
        if self._noted // self._save_every > before // self._save_every:  # a step may have been passed over
            self.save()
        if self._buffers and self._noted // BUFFERS_EVERY > before // BUFFERS_EVERY and self.members.active:
            asked = min(self.members.active.values(), key=lambda member: member.slot)
            self._send_to(asked, Message(Kind.BUFFERS, asked.session))
        self.members.excuse(time.monotonic() - began)
        self._check_end()

    def _check_end(self) -> None:
        if self._max_steps is not None and self.clock.step >= self._max_steps:
            self.stop("max_steps")

    def _leave(self, member: Member, *, stays: bool = False) -> None:
        """Nobody waits for this worker any more; what it pushed before stays counted. Its connection may stay."""
        self.members.active.pop(member.session, None)
        self.members.remember(member, self.clock.members[member.session].due)
        self.members.left += 1
        self.clock.leave(member.session)
        self.views.forget(member.session)
        if not stays:
            self._listener.forget(member.peer)
        for number in range(len(self._places)):
            if self.bound is not None:
                self._progress(number)
            else:
                self.clock.settle(number)
        self._note_step()

    def _refuse(self, peer: Peer, member: Member | None, reason: str) -> None:
        short = " ".join(reason.split())[:300]
        if peer not in self._refused:  # who goes on and on must not fill the log
            self._refused[peer] = None
            while len(self._refused) > MOST_WORKERS:
                self._refused.pop(next(iter(self._refused)))
            log.warning("%s is refused: %s", "a stranger" if member is None else member.label, short)
        self._send(peer, with_json(Kind.REFUSED, member.session if member is not None else 0, reason=short))
        if member is not None:
            self._leave(member)
        else:
            self._listener.forget(peer)

    def _send(self, peer: Peer, message: Message) -> bool:
        return self._listener.send(peer, message.parts())

    def _send_to(self, member: Member, message: Message) -> None:
        """Send in a member's session. If that fails it would wait in vain for what it lacks: it is out."""
        parts = message.parts(member.counter.next(message.kind))
        member.sent += sum(map(len, parts))
        if not self._listener.send(member.peer, parts):
            self._lost.append(member)

    def _send_pieces(self, member: Member, message: Message, pieces: Sequence[Buffer]) -> int | None:
        """Send a body that may arrive in part; returns the transport's ticket."""
        head = bytes(message.parts(member.counter.next(message.kind))[0])
        member.sent += len(head) + sum(map(len, pieces))
        return self._listener.send_pieces(member.peer, head, pieces)


def _cut_for(codec: Codec | None) -> int:
    """Elements of a part so that it takes about PART_BYTES on the wire."""
    if codec is None:
        return PART_BYTES // 4
    n = 1 << 20
    bytes_each = codec.frame_bound([n], codec.expected_counts([n])) / n
    return min(MOST_ELEMENTS // 4, max(1 << 15, int(PART_BYTES / bytes_each)))
