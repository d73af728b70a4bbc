"""Server: owns the model, applies the gradients that workers push, and sends them the parameters that they pull.

One thread handles all messages in the order of arrival. An invalid message ends its sender's session with the reason
in the log; the other workers continue.
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
from thinwire.server.checkpoint import CheckpointWriter, load_checkpoint
from thinwire.server.dispatch import MessageDispatcher, OnFigures
from thinwire.server.layout import Buffers, Layout, cut_for
from thinwire.server.membership import Member, Membership
from thinwire.server.protocol import HelloCheck, Message, MessageKind, Waiting, check_timeout, server_codec
from thinwire.server.replicas import LossyReplicas, Replicas, check_on_loss
from thinwire.server.schedule import check_policy
from thinwire.transport.addresses import listen
from thinwire.transport.base import Listener

log = logging.getLogger("thinwire.server")

Mode = Literal["bsp", "ssp", "async"]
# The largest number of bytes in flight to or from one worker.
WINDOW = 1 << 19
# The number of steps after which the server asks a worker for its buffers (running statistics), if the model has any.
BUFFERS_EVERY = 10
# Seconds in which workers may confirm that they know of the end of the training.
_PARTING = 3.0
# `waiting` names so many workers at most.
_NAMED = 3


class Server:
    """Trains a model with the gradients of workers that may join and leave at any time.

    mode: "bsp" (bulk-synchronous: all workers step together), "ssp" (stale-synchronous: the fastest worker is at most
        `bound` steps ahead of the slowest) or "async" (every gradient is applied when it arrives).
    codec: how changes of the model are sent to the workers: a codec, preset or density; None sends parameters in full.
    reduce: "mean" or "sum" of the workers' gradients. policy: which layer is sent first.
    expect: training begins when so many workers have joined.
    phased: no parameters are sent before the whole step is complete; otherwise each part is sent as soon as it is.
    on_loss: what workers do with the parts of a gradient that a lossy transport lost: "restore" adds them to the
        residual, "ignore" drops them.
    recipe: workers with another recipe are refused. cut: the largest number of elements in a part; None chooses it.
    window: the largest number of bytes in flight to or from one worker.
    timeout: the server evicts a worker after so many seconds without a message. stall: and after so many seconds
        without progress while others wait for it.
    checkpoint: folder; the server writes to it every `save_every` steps, and resumes from it if it has a checkpoint.
    tell: sent to every worker that joins, as `Worker.tell`; its `push` is their codec if they choose none.
    on_step: called with the server after every step that is complete in all layers.
    on_figures: called with the figures that a worker reports; on a ValueError the worker is refused.
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
        check_timeout(timeout)
        if expect < 1 or save_every < 1:
            raise ValueError(f"expect and save_every count from 1, not {expect} and {save_every}")
        self.model, self.optimizer, self.mode = model, optimizer, mode
        self.policy, self.expect = policy, expect
        # To send every entry is to send the parameters in full.
        self.codec = None if codec is None or codec == "dense" else server_codec(codec)
        self.layout = Layout.of(model, cut_for(optimizer, self.codec, cut))
        self.bound = {"bsp": 0, "ssp": bound, "async": None}[mode]
        self.timeout, self._save_every = timeout, save_every
        self._buffers = Buffers(model)
        folder = Path(checkpoint) if checkpoint is not None else None
        self._checkpoint = CheckpointWriter(folder) if folder is not None else None
        self._aggregator = Aggregator(model, optimizer, self.layout, reduce)
        state: dict[str, Any] = {"step": 0, "accepted_steps": {}, "extra": {}}
        if folder is not None:
            state = load_checkpoint(folder, model, optimizer, self.layout.cut) or state
        self._last_step = self._resumed_at = int(state["step"])
        if self._resumed_at:
            log.info("the server resumes at step %d", self._resumed_at)
        self.extra: dict[str, float] = state["extra"]  # figures of the owner that are saved in the checkpoint
        self.clock = Clock(len(self.layout.numbers), self.bound, self._resumed_at, phased=phased)
        terms: dict[str, Any] = {"tell": {**(tell or {}), "on_loss": check_on_loss(on_loss)}, "timeout": timeout}
        terms |= {"bound": self.bound, "policy": policy, "window": window, "cut": self.layout.cut}
        self._check = HelloCheck(recipe, model)
        self.membership = Membership(
            self._check.applicant, terms, self.clock, len(self.layout.layers), expect=expect, stall=stall
        )
        self.membership.accepted_steps = state["accepted_steps"]
        self._on_step, self._on_figures = on_step, on_figures
        self.stopped: str | None = None
        self.applied_at = time.monotonic()  # when the last step was complete

    # For its owner

    def run(self, listener: Listener | str, *, max_steps: int | None = None) -> str:
        """Serve until `stop` is called or so many steps are complete; return why it ended. Closes the listener.

        An address must be on the loopback interface and uses no keys. For others make the listener by
        `transport.addresses.listen`.
        """
        listener = listen(listener) if isinstance(listener, str) else listener
        self._open(listener)
        self._max_steps = max_steps
        self.membership.started_at = time.monotonic()
        self._check_end()
        try:
            while self.stopped is None:
                self._turn(0.25)
            self.save()
            self.membership.announce_end(self.stopped, min(_PARTING, self.timeout))
        except Exception:
            self.stopped = self.stopped or "failed"  # workers are told, so that they do not wait for this server
            with contextlib.suppress(Exception):
                self.membership.announce_end(self.stopped, min(_PARTING, self.timeout))
            raise
        finally:
            listener.close()
        return self.stopped

    def stop(self, reason: str) -> None:
        """End the training: workers are told, and `run` returns. Any thread or signal handler may call this."""
        self.stopped = self.stopped or reason

    def save(self) -> bool:
        """Write a checkpoint now; return False if there is no folder for it or it cannot be written."""
        if self._checkpoint is None:
            return False
        figures = {"step": max(self.clock.lowest), "accepted_steps": self.membership.all_accepted_steps()}
        figures |= {"cut": self.layout.cut, "extra": self.extra}
        return self._checkpoint.save(self.model, self.optimizer, figures)

    def waiting(self) -> Waiting | None:
        """Return what the server waits for and how long it has, or None if it waits for nothing. Any thread may ask.

        Before the training: workers to join. In the modes "bsp" and "ssp": workers to push the next step.
        """
        now, membership = time.monotonic(), self.membership
        if self.stopped is not None:
            return None
        if not self.started:
            missing = max(0, self.expect - len(membership.waiting))
            return Waiting(f"{missing} of {self.expect} workers to join", now - self.started_at)
        clocks, members = dict(self.clock.workers), dict(membership.active)
        if not members:
            return Waiting("a worker to join, because all have left", now - membership.left_at)
        step = self.clock.step
        behind = [session for session, clock in clocks.items() if clock.first <= step and clock.reached <= step]
        late = [members[session] for session in behind if session in members]
        if self.bound is None or not late:
            return None
        named = ", ".join(member.label for member in sorted(late, key=lambda member: member.slot)[:_NAMED])
        more = f" and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
        return Waiting(f"{named}{more} to push step {step}", now - max(self.applied_at, self.started_at))

    def listener_figures(self, member: Member) -> dict[str, float]:
        """Return what the transport has measured on the way to a worker."""
        return self.membership.listener.figures(member.peer)

    @property
    def started(self) -> bool:
        """Whether training has begun."""
        return self.membership.started

    @property
    def started_at(self) -> float:
        """When training began, or before that when `run` was called (time.monotonic)."""
        return self.membership.started_at

    @property
    def updates(self) -> int:
        """The number of updates of parts so far, by one worker or by all together."""
        return self._aggregator.updates

    # The loop

    def _open(self, listener: Listener) -> None:
        """Make everything that depends on the transport."""
        self.membership.listener = listener
        values, start = self._aggregator.values, self._resumed_at
        if listener.piece_bytes is None:
            self.replicas = Replicas(self.layout, values, self.codec, start)
        else:
            self.replicas = LossyReplicas(self.layout, values, self.codec, start, budget=listener.piece_bytes)
            self._check.shards = True
        self._dispatcher = MessageDispatcher(
            self._aggregator,
            self.replicas,
            self._buffers,
            self.membership,
            staleness=self.policy == "stalest",
            on_figures=self._on_figures,
            on_advance=self._on_advance,
        )
        listener.on_report, listener.on_gap = self._dispatcher.handle_report, self._dispatcher.handle_gap

    def _turn(self, timeout: float) -> None:
        arrived = self.membership.listener.poll(timeout)
        self.membership.evict_silent({peer for peer, _ in arrived}, time.monotonic())
        if self._resumed_at:  # workers that come back later join then
            self.membership.start_late()
        self.membership.evict_unreachable()
        for peer, parts in arrived:
            self._dispatcher.handle(peer, parts)
            self.membership.evict_unreachable()
            if self.stopped is not None:
                return

    def _on_advance(self) -> None:
        """Call the owner, save and ask for buffers if a step has become complete in all parts."""
        before, self._last_step = self._last_step, self.clock.step
        if self._last_step <= before:
            return
        began = self.applied_at = time.monotonic()
        self._on_step(self)
        if self._last_step // self._save_every > before // self._save_every:  # several steps may complete at once
            self.save()
        members = self.membership.active
        if self._buffers and self._last_step // BUFFERS_EVERY > before // BUFFERS_EVERY and members:
            asked = min(members.values(), key=lambda member: member.slot)
            self.membership.send(asked, Message(MessageKind.BUFFERS, asked.session))
        self.membership.excuse(time.monotonic() - began)
        self._check_end()

    def _check_end(self) -> None:
        if self._max_steps is not None and self.clock.step >= self._max_steps:
            self.stop("max_steps")
