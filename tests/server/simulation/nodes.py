"""The processes of a schedule: a real server and real clients, which compute, stall, crash and come back."""

import math
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.server.simulation.events import Events
from tests.server.simulation.ledger import Ledger, Values, check, plus
from tests.server.simulation.network import TcpLink
from thinwire.codec.codec import Codec
from thinwire.codec.selection import TopK
from thinwire.codec.values import Bits, Float32
from thinwire.errors import ServerError
from thinwire.server.client import Client
from thinwire.server.protocol import AcceptedPushes, MessageKind, Session, hello_of, parse
from thinwire.server.replicas import LossyReplicas
from thinwire.server.schedule import Request
from thinwire.server.server import Server
from thinwire.transport.base import Outgoing
from thinwire.transport.udp.congestion import FairShares

# Seconds between two calls of the server's timer.
_TURN = 0.25


class TinyModel(nn.Module):
    """Two layers of a few parameters, which begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(3, 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


@cache
def _hello() -> dict[str, Any]:
    """Return what all workers say of their model."""
    return hello_of(TinyModel(), "", None, "")


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Subtract all gradients."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.detach().sub_(parameter.grad)


class Node:
    """A process that may be stopped for a while, and whose clock may jump."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.offset = events.chance.uniform(0.0, 1000.0)
        self.alive = True
        self._stalled_until = 0.0
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def now(self) -> float:
        return self.events.now + self.offset

    def stall(self, seconds: float) -> None:
        """Stop the process for so many seconds; messages wait for it."""
        self._stalled_until = max(self._stalled_until, self.events.now + seconds)
        self.events.after(seconds, self._resume)

    def _resume(self) -> None:
        if self.events.now >= self._stalled_until:
            inbox, self._inbox = self._inbox, []
            for what, arguments in inbox:
                self.handle(what, *arguments)

    def handle(self, what: Callable[..., None], *arguments: Any) -> None:
        """Handle an event, now or when the process continues."""
        if not self.alive:
            return
        if self.events.now < self._stalled_until:
            self._inbox.append((what, arguments))
        else:
            what(*arguments)


class ServerNode(Node):
    """The server's process. `links` are the connections of all workers, by their peers' names."""

    def __init__(self, events: Events, ledger: Ledger, options: dict[str, Any], links: dict[bytes, TcpLink]) -> None:
        super().__init__(events)
        self.ledger, self.links, self._options = ledger, links, options
        self.on_handled: Callable[[bytes], None] = lambda peer: None  # called after each message
        self._start(options["expect"])

    def _start(self, expect: int) -> None:
        model = TinyModel()
        options = {key: value for key, value in self._options.items() if key not in ("expect", "pieces")}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.server = Server(model, optimizer, reduce="sum", expect=expect, **options)
        self.shares = FairShares()
        # The same as the optimizer's own step, whose profiling hooks take longer than the rest of a push.
        optimizer.step = partial(plain_step, optimizer)  # type: ignore[method-assign]
        self.server.open(self._options["pieces"], self.now, session=self.events.chance.getrandbits(30))
        self.ledger.check_restored(self.server)
        self.ledger.observe(self.server)
        self._step = self.server.clock.step
        self.incarnation = object()
        self.events.after(_TURN, self._turn, self.incarnation)

    def crash_and_restart(self, expect: int) -> None:
        """End the process, and begin another one from the last checkpoint."""
        self.ledger.on_crash()
        self._inbox.clear()
        self._stalled_until = 0.0
        for link in self.links.values():
            link.server_restarts()
        self._start(expect)
        for link in self.links.values():
            link.server.shares = self.shares

    def connect(self, peer: bytes, link: TcpLink) -> None:
        """Accept a worker's connection."""
        self.links[peer] = link
        link.server.handle, link.server.now, link.server.shares = self.handle, lambda: self.now, self.shares
        link.server.receive = partial(self._receive, peer)
        link.server.report = partial(self._report, peer)
        link.server.gap = partial(self._gap, peer)

    def end(self, reason: str) -> None:
        """End the training."""
        self.server.on_end(reason)
        self._pump()

    def _turn(self, incarnation: object) -> None:
        if self.alive and incarnation is self.incarnation:
            self.events.after(_TURN, self._turn, incarnation)
            self.handle(self._on_timer)

    def _on_timer(self) -> None:
        self.server.on_timer(self.now)
        self._pump()

    def _receive(self, peer: bytes, parts: Sequence[memoryview]) -> None:
        self.server.receive(peer, list(parts), self.now)
        self._pump()
        if parts[0][5] == MessageKind.RECEIVED:
            self.on_handled(peer)

    def _report(self, peer: bytes, ticket: int, lost: frozenset[int]) -> None:
        self.server.on_report(peer, ticket, lost, self.now)
        self._pump()

    def _gap(self, peer: bytes) -> None:
        self.server.on_gap(peer, self.now)
        self._pump()

    def _pump(self) -> None:
        """Send what the state machine wants to send, and check what must hold after every event."""
        touched: dict[bytes, TcpLink] = {}
        while (out := self.server.next_outgoing(self.now)) is not None:
            link = self.links.get(out.peer)
            if link is not None:
                touched[out.peer] = link
            if out.action != "send":
                if link is not None:
                    link.keep() if out.action == "keep" else link.forget()
            elif out.shards is not None:
                head = bytes(out.parts[0])
                ticket = None if link is None else link.server_sends_pieces(head, out.shards)
                self.server.on_ticket(out, ticket)
            elif (link is None or not link.server_sends(out.parts)) and out.session:
                self.server.on_unreachable(out.session, self.now)
        for link in touched.values():
            link.server_flushes()
            self.ledger.check_kept(self.server, link.kept_messages())
        self.ledger.check_memory(self.server)
        step = self.server.clock.step
        if step > self._step:
            self.ledger.steps += step - self._step
            every = self.server._save_every
            if step // every > self._step // every and self.server.save():
                self.ledger.on_save()
            self._step = step


class WorkerNode(Node):
    """A worker's process: it joins, pulls, computes and pushes as `thinwire.server.worker.Worker` does."""

    def __init__(self, events: Events, ledger: Ledger, link: TcpLink, number: int, compute: float) -> None:
        super().__init__(events)
        self.ledger, self.link, self.compute = ledger, link, compute
        self.token, self.peer = f"worker-{number:08d}", b"peer" + number.to_bytes(4, "little")
        self.model = TinyModel()
        self._shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        hello = {**_hello(), "name": self.token, "token": self.token}
        density = events.chance.choice([0.5, 1.0])
        self.codec = Codec(TopK(density), Float32(), min_numel=1)
        self.client = Client(self.model, self.codec, hello, self.now, piece_bytes=link.piece_bytes)
        self.given: dict[int, Values] = {}  # by part: the sum of all gradients that were encoded
        self._sent_in: dict[tuple[int, int, int], tuple[int, int]] = {}  # session and part of a push, by its place
        self.steps = 0  # completed
        self.clock = 0
        self.state = "joining"
        self.paused = False  # computes no further step
        self.left = False
        self._session: Session | None = None
        self._observe()
        link.worker.handle, link.worker.now = self.handle, lambda: self.now
        link.worker.receive, link.worker.report = self._receive, self._report
        self._turn()

    def _observe(self) -> None:
        encode = self.client.pushes.encode

        def observed(session: Session, request: Request, budget: int | None, now: float) -> Outgoing:
            pieces = session.layout.layers[request.layer].parts[request.part]
            gradients = self.client.pushes._gradients[request.layer, request.clock]
            total: list[float] = []
            for piece in pieces:
                whole = gradients.get(piece.parameter)
                total += [0.0] * len(piece) if whole is None else whole.view(-1).tolist()[piece.begin : piece.end]
            number = session.layout.numbers[request.layer, request.part]
            self._sent_in[request.layer, request.part, request.clock] = session.number, number
            if all(map(math.isfinite, total)):
                self.given[number] = plus(self.given.get(number), total)
            return encode(session, request, budget, now)

        self.client.pushes.encode = observed  # type: ignore[method-assign]

    # Events

    def _turn(self) -> None:
        if self.alive:
            self.events.after(self.client.pause, self._turn)
            self.handle(self._pump)

    def _receive(self, parts: Sequence[memoryview]) -> None:
        kind, pushes = parts[0][5], self.client.pushes
        before = dict(pushes.unacknowledged) if kind in (MessageKind.ACK, MessageKind.WELCOME) else {}
        try:
            self.client.receive(parts, self.now)
        except ServerError as error:
            check(False, "the server refused an honest worker", self.token, error)
        if before:
            welcome = kind == MessageKind.WELCOME
            accepted = AcceptedPushes.read(parse(parts).json["accepted"]) if welcome else None
            for layer, part, clock in before.keys() - pushes.unacknowledged.keys():
                session, number = self._sent_in[layer, part, clock]
                known = accepted is not None and accepted.session == session and clock < accepted.steps[number]
                if known or not welcome:
                    self.ledger.on_ack(session, number, clock)
            self.check_settled()
        self._pump()

    def _report(self, ticket: int, lost: frozenset[int]) -> None:
        self.client.on_report(ticket, lost)
        self.check_settled()

    def _pump(self) -> None:
        self.client.on_timer(self.now)
        self._advance()
        while (out := self.client.next_outgoing(self.now)) is not None:
            if out.shards is None:
                self.link.worker_sends(out.parts)
            else:
                head = bytes(out.parts[0])
                self.client.pushes.on_ticket(out, self.link.worker_sends_pieces(head, out.shards))
        self.link.worker_flushes()

    # Training, as `Worker` does it

    def _advance(self) -> None:
        client = self.client
        if self.left or client.stopped is not None:
            return
        if self.state == "joining":
            client.request_session(self.now)
            if client.session is not None:
                session = self._session = client.accept_session()
                assert session is not None
                self.clock = session.first
                client.fetch(session, self.clock, self.now)
                self.state = "waiting"
        if self.state == "waiting" and self._session is not None:
            arrived = client.arrived(range(len(self._session.layout.layers)), self.clock)
            if arrived is False:
                self.state = "joining"
                self._advance()
            elif arrived and not self.paused:
                self._check_fresh(self._session)
                self.state = "computing"
                seconds = self.compute * self.events.chance.uniform(0.5, 1.5)
                self.events.after(seconds, self.handle, self._computed, len(self._session.layout.layers) - 1)

    def _check_fresh(self, session: Session) -> None:
        """The parameters that a step is computed with contain all steps that they must contain."""
        if session.bound is not None:
            for versions in session.versions:
                stale = self.clock - min(versions)
                check(stale <= session.bound, "a step is computed with stale parameters", self.token, self.clock, stale)

    def _computed(self, layer: int) -> None:
        """The backward pass has reached a layer: push its gradients."""
        if self.left or self.client.stopped is not None or self._session is None:
            return
        chance = self.events.chance
        gradients = {}
        for name in self._session.layout.layers[layer].parameters:
            if chance.random() < 0.97:  # some parameters are not used in a step
                shape = self._shapes[name]
                values = [float(chance.getrandbits(3)) - 3.0 for _ in range(shape.numel())]
                if chance.random() < 0.01:
                    values[0] = math.nan
                gradients[name] = torch.frombuffer(array("f", values), dtype=torch.float32).view(shape)
        self.client.push(self._session, layer, self.clock, gradients)
        if layer:
            seconds = 0.1 * self.compute * chance.random()
            self.events.after(seconds, self.handle, self._computed, layer - 1)
        else:
            self.steps += 1
            self.clock += 1
            lost = self.client.lost or self.client.session is None
            self.state = "joining" if lost else "waiting"
        self._pump()

    def leave(self) -> None:
        """Leave the training, if nothing of this worker is on its way; try again otherwise."""
        if self.alive and not self.left:
            self.paused = True
            if self.client.goes_on and self.client.pushes.busy and self.events.chance.random() < 0.9:
                self.events.after(0.2, self.handle, self.leave)
                return
            self.client.leave(self.now)
            self._pump()
            self.left, self.alive = True, False  # the process ends; its last message is on its way

    def kill(self) -> None:
        """End the process."""
        self.alive = False
        self.link.close()

    # Invariants

    def check_settled(self) -> None:
        """When nothing of this worker is on its way, all its gradients are accounted for."""
        pushes = self.client.pushes
        session = self.client.session
        if pushes.unacknowledged or pushes._tickets or session is None or self.left:
            return
        for number, (layer, part) in enumerate(session.layout.places()):
            if number in self.given:
                residual: list[float] = []
                for piece in session.layout.layers[layer].parts[part]:
                    kept = self.codec.residuals(piece.name).get("residual")
                    residual += [0.0] * len(piece) if kept is None else kept.tolist()
                self.ledger.check_worker(self.token, number, self.given[number], residual)

    def _check_full(self, session: Session, server: Server) -> None:
        """Where parameters are sent in full, this worker has the server's, unless they have changed since."""
        for number, (layer, part) in enumerate(session.layout.places()):
            bound, version = server.clock.bound, session.versions[layer][part]
            newest = server.replicas._versions[layer, part] if bound is None else server.clock.lowest[number]
            theirs = server._aggregator.values[layer][part]
            for piece, values in zip(session.layout.layers[layer].parts[part], theirs, strict=True):
                mine = self.client.parameters.rows[piece.parameter][piece.begin : piece.end]
                same = version != newest or torch.equal(mine, values)
                check(same, "a worker differs from the server", self.token, layer, part)

    def check_replica(self, server: Server) -> None:
        """When no reply is on its way, this worker has what the server's replica of it has, but for what is owed."""
        session = self.client.session
        member = None if session is None else server.membership.active.get(session.number)
        if session is None or member is None or member.pool.in_flight:
            return
        if not server.replicas.deltas:
            self._check_full(session, server)
            return
        lossy = server.replicas if isinstance(server.replicas, LossyReplicas) else None
        for layer, part in session.layout.places():
            replica = server.replicas._at[layer, part].get(session.number)
            if replica is None:
                continue
            owed = {} if lossy is None else lossy._lost.get((session.number, (layer, part)), {})
            pieces = session.layout.layers[layer].parts[part]
            for i, (piece, theirs) in enumerate(zip(pieces, replica.values, strict=True)):
                mine = self.client.parameters.rows[piece.parameter].tolist()[piece.begin : piece.end]
                free = owed[i].tolist() if i in owed else ()
                same = all(a == b or j in free for j, (a, b) in enumerate(zip(mine, theirs.tolist(), strict=True)))
                check(same, "a worker differs from its replica", self.token, layer, part)


def server_options(events: Events, folder: Path, workers: int, pieces: int | None) -> dict[str, Any]:
    """Return the options of a schedule's server."""
    chance = events.chance
    mode = chance.choice(["bsp", "bsp", "ssp", "ssp", "async"])
    codec = chance.choice([None, Codec(TopK(0.5), Float32(), min_numel=1), Codec(TopK(0.3), Bits(8), min_numel=1)])
    if pieces is not None and codec is None:
        codec = Codec(TopK(0.5), Float32(), min_numel=1)
    return {
        "mode": mode,
        "bound": chance.randint(1, 3),
        "codec": codec,
        "phased": chance.random() < 0.15,
        "policy": chance.choice(["forward", "stalest", "fifo", "filo"]),
        "cut": chance.choice([4, 100]),
        "window": chance.choice([60, 150, 1 << 19]),
        "timeout": 2.0,
        "stall": 4.0,
        "expect": chance.randint(1, workers),
        "checkpoint": folder,
        "save_every": chance.choice([1, 2, 5]),
        "pieces": pieces,
    }
