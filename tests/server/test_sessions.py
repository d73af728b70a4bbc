"""Sessions: lost and invalid messages neither lose a gradient nor count one twice."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.server.serving import Leaky, Ones, Threads, serving, small_net, train
from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame
from thinwire.codec.selection import TopK
from thinwire.codec.values import Float32
from thinwire.errors import ServerError
from thinwire.server.protocol import Message, MessageKind, hello_of, parse, with_json
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.transport.addresses import connect
from thinwire.transport.base import Connection


def counting(**options: Any) -> Server:
    model = Ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Server(model, optimizer, reduce="sum", codec=0.3, cut=700, timeout=2.0, **options)


class CountingCodec(Codec):
    """A codec that counts the gradients that it encodes."""

    def __init__(self) -> None:
        super().__init__(TopK(0.3), Float32(), min_numel=10)
        self.given: dict[str, int] = {}

    def copy(self, **changes: Any) -> "CountingCodec":
        return self

    def encode(self, tensors: Any, **options: Any) -> Frame:
        for name in tensors:
            self.given[name] = self.given.get(name, 0) + 1
        return super().encode(tensors, **options)


LOSSES = {
    "a push": ("out", MessageKind.PUSH, 7),
    "the acknowledgement of a push that counted": ("in", MessageKind.ACK, 9),
    "a pull": ("out", MessageKind.PULL, 20),
    "a change": ("in", MessageKind.DELTA, 11),
    "the full parameters": ("in", MessageKind.FULL, 2),
    "a receipt": ("out", MessageKind.RECEIVED, 9),
    "a hello": ("out", MessageKind.HELLO, 1),
    "a welcome": ("in", MessageKind.WELCOME, 1),
}


@pytest.mark.parametrize("losses", [*([what] for what in LOSSES), list(LOSSES)], ids=[*LOSSES, "all of them"])
def test_every_gradient_counts_once_whichever_message_is_lost(losses: list[str]) -> None:
    server, codec, model = counting(), CountingCodec(), Ones()
    with serving(server) as address:
        connection = Leaky(address, *(LOSSES[what] for what in losses))
        with Worker(connection, model, codec) as worker:
            for _ in range(12):
                model().backward()
                worker.step()
            worker.wait()
        assert connection.lost == len(losses)
    owned = dict(server.model.named_parameters())
    for layer, part in server.layout.places():
        for piece in server.layout.layers[layer].parts[part]:
            counted = -owned[piece.parameter].detach().view(-1)[piece.begin : piece.end]
            kept = codec.residuals(piece.name)["residual"]
            assert torch.equal(counted + kept, torch.full_like(kept, codec.given[piece.name])), piece.name


def send_without_session(address: str, messages: list[Any]) -> list[Message]:
    """Send messages without a session; return the server's answers up to a refusal."""
    connection = connect(address)
    heard: list[Message] = []
    try:
        for message in messages:
            connection.send(message.parts() if isinstance(message, Message) else message)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not any(
            m.kind in (MessageKind.REFUSED, MessageKind.REJOIN) for m in heard
        ):
            heard += [parse(parts) for parts in connection.poll(0.1)]
    finally:
        connection.close()
    return heard


def admitted(address: str, model: nn.Module, recipe: str = "") -> tuple[Connection, int, int]:
    """Join by hand; return the connection, the session and the first step."""
    connection = connect(address)
    connection.send(with_json(MessageKind.HELLO, **hello_of(model, recipe, None, "x")).parts())
    while True:
        for parts in connection.poll(1.0):
            message = parse(parts)
            if message.kind is MessageKind.WELCOME:
                return connection, message.session, message.json["first"]


BAD: dict[str, Callable[[int, int], Message]] = {
    "header": lambda s, c: Message(MessageKind.PUSH, s, body=b"x" * 100, clock=c),
    "layer": lambda s, c: Message(MessageKind.PUSH, s, layer=2**32 - 1, clock=c),
    "clock": lambda s, c: Message(MessageKind.PUSH, s, clock=c + 5, body=good_frame()),
    "pull": lambda s, c: Message(MessageKind.PULL, s, clock=c + 7),
    "got": lambda s, c: Message(MessageKind.RECEIVED, s, number=10**12),
    "kind": lambda s, c: Message(MessageKind.ACK, s),
    "figures": lambda s, c: Message(MessageKind.HEARTBEAT, s, body=b'{"step": 1' + b"0" * 400 + b"}"),
    "buffers": lambda s, c: Message(MessageKind.BUFFERS, s, body=b"123"),
}


BAD_FIGURES = {
    "infinite": b'{"loss": 1e999}',
    "huge": b'{"bytes": 1' + b"0" * 300 + b"}",
    "a long text": b'{"loss": "' + b"x" * 500_000 + b'"}',
    "a text": b'{"loss": "' + b"x" * 100 + b'"}',
    "a long name": b'{"' + b"x" * 100 + b'": 1}',
    "a name with control characters": b'{"\\u001b[2J": 1}',
    "many": b"{" + b",".join(b'"n%d": 1' % i for i in range(100)) + b"}",
    "a long list": b'{"waits": [' + b",".join([b"1"] * 1000) + b"]}",
    "a nested list": b'{"waits": [[1]]}',
    "an object": b'{"waits": {"a": 1}}',
}


@pytest.mark.parametrize("body", BAD_FIGURES.values(), ids=BAD_FIGURES)
def test_figures_that_are_not_finite_numbers_or_too_long_are_refused(body: bytes) -> None:
    seen: list[Any] = []
    server = counting(on_figures=lambda member, figures: seen.append(figures))
    with serving(server) as address:
        connection, session, _ = admitted(address, Ones())
        connection.send(Message(MessageKind.HEARTBEAT, session, body=body).parts())
        assert next(m for m in answers(connection) if m.kind is not MessageKind.WELCOME).kind is MessageKind.REFUSED
        connection.close()
    assert not seen


def answers(connection: Connection) -> Iterator[Message]:
    """Yield the server's messages; fail after 20 seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        yield from map(parse, connection.poll(0.1))
    raise AssertionError("the server does not answer")


def test_figures_that_come_too_often_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    server = counting(on_figures=lambda member, figures: seen.append(figures["loss"]))
    with serving(server) as address:
        connection, session, _ = admitted(address, Ones())
        heard = answers(connection)
        for first in range(0, 1000, 250):  # a connection does not queue a thousand messages for a busy server
            for i in range(first, first + 250):
                body = b'{"loss": %d, "waits": [0.5, null], "text": "short"}' % i
                connection.send(Message(MessageKind.HEARTBEAT, session, body=body).parts(i))
            assert sum(next(heard).kind is MessageKind.HEARTBEAT for _ in range(250)) == 250
        connection.close()
    assert 100 <= len(seen) < 400 and seen[:100] == list(range(100))
    assert caplog.text.count("reports figures too often") == 1


def test_a_worker_checks_the_figures_that_it_reports() -> None:
    seen: list[Any] = []
    server = counting(on_figures=lambda member, figures: seen.append(figures))
    with serving(server, max_steps=2) as address, Worker(address, model := Ones(), "dense") as worker:
        with pytest.raises(ValueError, match="the figure note is neither a finite number nor a short text"):
            worker.report(note="x" * 100)
        worker.report(loss=float("nan"), waits=[0.5, 0.25])
        while worker.stopped is None:
            model().backward()
            worker.step()
    assert seen == [{"loss": None, "waits": [0.5, 0.25]}]


@pytest.mark.parametrize("timeout", [1e-9, 0.0, float("inf"), float("nan")])
def test_a_server_has_a_timeout_that_workers_accept(timeout: float) -> None:
    model = Ones()
    with pytest.raises(ValueError, match=r"timeout is a number from 0\.1 to 86,400 seconds, not"):
        Server(model, torch.optim.SGD(model.parameters(), lr=1.0), timeout=timeout)


def good_frame() -> bytes:
    return Codec(1.0, Float32()).encode({"w": torch.ones(600)}).tobytes()


def test_invalid_messages_end_the_session_of_their_sender_only(caplog: pytest.LogCaptureFixture) -> None:
    def figures(member: Any, said: dict[str, Any]) -> None:
        float(said["step"])

    server = counting(on_figures=figures)
    with serving(server) as address, caplog.at_level(logging.WARNING):
        noise = [[os.urandom(36)], [b""], [os.urandom(36)] * 3, [b"TWPS" + bytes(32)]]
        for parts in noise:
            assert send_without_session(address, [parts])[-1].kind is MessageKind.REFUSED
        assert send_without_session(address, [Message(MessageKind.PUSH, 12345)])[-1].kind is MessageKind.REJOIN
        for what, bad in BAD.items():
            connection, session, first = admitted(address, Ones())
            connection.send(bad(session, first).parts())
            heard: list[Message] = []
            deadline = time.monotonic() + 20
            while not any(m.kind is MessageKind.REFUSED for m in heard) and time.monotonic() < deadline:
                heard += [parse(parts) for parts in connection.poll(0.1)]
            assert any(m.kind is MessageKind.REFUSED for m in heard), what
            connection.close()
        # A member that sends random bytes is removed as well.
        connection, _, _ = admitted(address, Ones())
        connection.send([os.urandom(36)])
        while server.membership.active:
            time.sleep(0.01)
        connection.close()
        with Worker(address, model := Ones(), "dense") as worker:
            for _ in range(3):
                model().backward()
                worker.step()
            worker.wait()
    assert {float(-p.detach().max()) for p in server.model.parameters()} == {3.0}
    assert "the server refuses a message of an unknown peer: this is not a message of thinwire's" in caplog.text
    assert "the server refuses a message of worker 0 (x): there is no part 0 of a layer 4294967295" in caplog.text


def test_a_refusal_names_the_other_recipe_or_parameter() -> None:
    server = counting(recipe="ones")
    with serving(server) as address:
        with pytest.raises(ServerError, match="the worker trains the recipe 'twos', the server 'ones'"):
            Worker(address, Ones(), "dense", recipe="twos")
        with pytest.raises(ServerError, match=r"parameter a\.weight that the worker's lacks"):
            Worker(address, small_net(), "dense", recipe="ones")


def test_an_error_in_on_step_is_raised_by_run_and_ends_the_training() -> None:
    def fail(server: Server) -> None:
        raise ValueError("my own mistake")

    server, threads = counting(on_step=fail), Threads()
    told: list[str | None] = []
    with pytest.raises(ValueError, match="my own mistake"), serving(server) as address:
        threads.start(lambda: told.append(train_ones(address)))
        while server.clock.step < 1:
            time.sleep(0.01)
    threads.join()
    assert told == ["failed"]  # the worker does not wait for a server that is gone


def train_ones(address: str, steps: int = 10**9, **options: Any) -> str | None:
    model = Ones()
    with Worker(address, model, "dense", **options) as worker:
        for _ in range(steps):
            if worker.stopped is not None:
                break
            model().backward()
            worker.step()
        return worker.stopped


def test_all_workers_learn_of_the_end_after_twenty_joins_and_leaves() -> None:
    server, threads = counting(expect=2), Threads()
    with serving(server) as address:
        for _ in range(2):
            threads.start(train_ones, address)
        for i in range(20):
            train_ones(address, steps=1 + i % 3)
        late = threads.start(train_ones, address)
        while server.membership.joined < 23:
            time.sleep(0.01)
        server.stop("target")
        late.join(30)
        threads.join()
    assert server.membership.joined == 23
    counts = {int(-value) for p in server.model.parameters() for value in p.detach().view(-1)}
    assert min(counts) >= 2 * 20  # two others trained with each of the twenty


@pytest.mark.parametrize("mode", ["bsp", "async"])
def test_a_gradient_that_is_not_finite_is_not_applied(mode: Any) -> None:
    model = small_net()
    server = Server(model, torch.optim.SGD(model.parameters(), lr=0.1), mode=mode, codec=0.2)
    start = [p.detach().clone() for p in model.parameters()]
    with serving(server) as address, Worker(address, net := small_net(), 0.1) as worker:
        for step in range(3):
            loss = net(torch.randn(4, 20)).sum() * (float("nan") if step == 1 else 1.0)
            loss.backward()
            worker.step()
        worker.wait()
    assert all(p.isfinite().all() for p in model.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))


def test_sums_beyond_float32_are_not_applied() -> None:
    server = counting(expect=2)
    threads = Threads()

    def work() -> None:
        net = Ones()
        with Worker(address, net, "dense") as worker:
            for factor in (1.0, 3e38, 1.0):
                (net() * factor).backward()
                worker.step()
            worker.wait()

    with serving(server, max_steps=3) as address:
        threads.start(work), threads.start(work)
        threads.join()
    assert {float(v) for p in server.model.parameters() for v in p.detach().view(-1)} == {-4.0}


def test_a_worker_rejoins_after_the_server_ended_its_session() -> None:
    """The server removes a worker at step 5, and the worker joins again by itself."""

    def forget(server: Server) -> None:
        if server.clock.step == 5 and server.membership.joined == 1:
            member = next(iter(server.membership.active.values()))
            server.membership.leave(member, time.monotonic(), keep_connection=True)

    model = small_net()
    server = Server(model, torch.optim.SGD(model.parameters(), lr=0.4), codec=0.2, on_step=forget)
    with serving(server, max_steps=12) as address:
        train(address, 0, codec=0.2)
    assert server.membership.joined == 2
    assert server.clock.step == 12
