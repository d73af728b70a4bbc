"""Server: the master of the parameter server; owns the model, takes gradients, gives parameters.

One thread does everything in the order of arrival. Messages are checked before they are believed: a worker that
sends nonsense is dropped with the reason in the log, and the others go on.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from thinwire.codec.codec import Codec
from thinwire.codec.selection import Selection
from thinwire.server.aggregate import Aggregator, Clock, Reduce
from thinwire.server.checkpoint import Store
from thinwire.server.dispatch import Answers, Attendance, Desk, OnFigures, Progress
from thinwire.server.layout import Buffers, Layout, cut_for
from thinwire.server.membership import Member, Members, Post, Reception, Terms
from thinwire.server.protocol import Door, Kind, Message
from thinwire.server.replicas import LossyViews, Views, check_on_loss
from thinwire.server.schedule import check_policy
from thinwire.transport.addresses import listen
from thinwire.transport.base import Listener
from thinwire.tune.presets import resolve_codec

log = logging.getLogger("thinwire.server")

Mode = Literal["bsp", "ssp", "async"]
# Bytes that may be under way to or from one worker.
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
        codec: Codec | Selection | float | str | None = 0.01,
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
        checkpoint: Path | str | None = None,
        save_every: int = 100,
        tell: dict[str, Any] | None = None,
        on_step: Callable[["Server"], None] = lambda server: None,
        on_figures: OnFigures = lambda member, figures: None,
    ) -> None:
        if mode not in ("bsp", "ssp", "async"):
            raise ValueError(f'mode is "bsp", "ssp" or "async", not {mode!r}')
        check_policy(policy)
        if expect < 1 or save_every < 1:
            raise ValueError(f"expect and save_every count from 1, not {expect} and {save_every}")
        self.model, self.optimizer, self.mode = model, optimizer, mode
        self.policy, self.expect = policy, expect
        # The whole model needs no deltas.
        self.codec = None if codec is None or codec == "dense" else resolve_codec(codec)
        self.layout = Layout.of(model, cut_for(optimizer, self.codec, cut))
        self.bound = {"bsp": 0, "ssp": bound, "async": None}[mode]
        told = {**(tell or {}), "on_loss": check_on_loss(on_loss)}
        terms = Terms(self.bound, policy, window, self.layout.cut, timeout, told)
        self.timeout, self.stall, self.window, self._save_every = timeout, stall, window, save_every
        door, self._buffers, self._post = Door(recipe, model), Buffers(model), Post()
        self._store = Store(Path(checkpoint)) if checkpoint is not None else None
        self._aggregator = Aggregator(model, optimizer, self.layout, reduce)
        self.members = Members()
        self.extra: dict[str, float] = {}  # figures of the owner's that go with the checkpoint
        start = self._restore()
        self.clock = Clock(len(self.layout.numbers), self.bound, start, phased=phased)
        self.views = Views(self.layout, self._aggregator.values, self.codec, start)
        self._reception = Reception(door, terms, self.layout, self.clock, self.members, self._post, expect)
        self._on_step, self._on_figures = on_step, on_figures
        self.stopped: str | None = None
        self._noted = self._resumed = start
        self.applied_at = time.monotonic()

    def _restore(self) -> int:
        state = self._store.load(self.model, self.optimizer, self.layout.cut) if self._store is not None else None
        if state is None:
            return 0
        self.members.counted, self.extra = state["counted"], state["extra"]
        log.info("resumed at step %d", state["step"])
        return int(state["step"])

    # For its owner

    def run(self, listener: Listener | str, *, max_steps: int | None = None) -> str:
        """Serve until `stop` is called or so many steps are complete; returns why it ended. Closes the listener.

        An address is listened on: loopback, without keys. For others make the listener by `transport.addresses.listen`.
        """
        listener = listen(listener) if isinstance(listener, str) else listener
        self._open(listener)
        self._max_steps = max_steps
        self._reception.started_at = time.monotonic()
        self._check_end()
        try:
            while self.stopped is None:
                self._turn(0.25)
            self.save()
            self._post.part(self.members, self.stopped, min(_PARTING, self.timeout))
        except Exception:
            self.stopped = self.stopped or "failed"  # workers hear of it, and need not wait for a server that is gone
            with contextlib.suppress(Exception):
                self._post.part(self.members, self.stopped, min(_PARTING, self.timeout))
            raise
        finally:
            listener.close()
        return self.stopped

    def stop(self, reason: str) -> None:
        """End training: workers are told, `run` returns. From another thread or a signal handler too."""
        self.stopped = self.stopped or reason

    def save(self) -> bool:
        """Write a checkpoint now, if there is a folder for it."""
        if self._store is None:
            return False
        counted = dict(self.members.counted)
        for member in self.members.active.values():
            known = member.known(self.clock.members[member.session].due)
            counted |= {} if known is None else {member.token: known}
        step = max(self.clock.lowest)
        return self._store.save(self.model, self.optimizer, self.layout.cut, step, counted, self.extra)

    def listener_figures(self, member: Member) -> dict[str, float]:
        """What the transport knows of the way to a worker."""
        return self._post.listener.figures(member.peer)

    @property
    def started(self) -> bool:
        """Whether all who were expected have come."""
        return self._reception.started

    @property
    def started_at(self) -> float:
        """When training began, or else `run` (time.monotonic)."""
        return self._reception.started_at

    @property
    def updates(self) -> int:
        """Updates of parts so far, by one worker or by all together."""
        return self._aggregator.updates

    # The loop

    def _open(self, listener: Listener) -> None:
        """Everything that depends on how messages travel."""
        self._post.listener = listener
        if listener.piece_bytes is not None:  # deltas may arrive in part
            self.views = LossyViews.of(self.views, listener.piece_bytes)
            self._reception.door.pieces = True
        answers = Answers(self.layout, self.clock, self.views, self._post)
        self._progress = Progress(
            self.layout, self.clock, self._aggregator, self.views, answers, self.members, self._note_step
        )
        self._attendance = Attendance(
            self.members, self.clock, self.views, self._progress, self._post, timeout=self.timeout, stall=self.stall
        )
        self._desk = Desk(
            self.layout,
            self.members,
            self._reception,
            self._attendance,
            self._progress,
            answers,
            self._buffers,
            self._post,
            staleness=self.policy == "stalest",
            on_figures=self._on_figures,
            settle=self.views.settle,
        )
        listener.on_report, listener.on_gap = self._desk.reported, self._desk.missed

    def _turn(self, timeout: float) -> None:
        arrived = self._post.listener.poll(timeout)
        self._attendance.watch({peer for peer, _ in arrived})
        if self._resumed:  # those who come back late join later
            self._reception.start_after(self.timeout)
        self._attendance.drop_lost()
        for peer, parts in arrived:
            self._desk.take(peer, parts)
            self._attendance.drop_lost()
            if self.stopped is not None:
                return

    # What follows from them

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
            self._post.send(asked, Message(Kind.BUFFERS, asked.session))
        self.members.excuse(time.monotonic() - began)
        self._check_end()

    def _check_end(self) -> None:
        if self._max_steps is not None and self.clock.step >= self._max_steps:
            self.stop("max_steps")
