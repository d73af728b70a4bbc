"""Training over datagrams: lost ones delay gradients, and server and worker still agree on the parameters."""

import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tests.server.serving import Threads, accuracy, gradients, lost_entries, residual, serving, small_net, train
from tests.server.test_training import DENSE, reference, same_bits, sgd
from tests.transport.lossy_socket import lose
from thinwire.codec.codec import Codec
from thinwire.codec.selection import TopK
from thinwire.codec.values import Float32
from thinwire.errors import TransportError
from thinwire.server.membership import Member
from thinwire.server.replicas import LossyReplicas
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.tools.race.served import ServerSettings
from thinwire.tools.race.training import Plan
from thinwire.transport.addresses import listen
from thinwire.transport.base import Buffer
from thinwire.transport.tcp import TcpConnection
from thinwire.transport.udp import endpoints as udp_listener
from thinwire.transport.udp.packet import EnvelopeKind, read_envelope, read_records


def one_layer() -> nn.Module:
    """A single part, so that steps are short, which still takes several datagrams."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 96))


def test_training_without_loss_equals_one_process_bit_for_bit() -> None:
    model = small_net()
    server = Server(model, sgd(model), expect=2, codec=None, cut=2000)
    threads = Threads()
    with serving(server, max_steps=8, transport="udp") as address:
        for slot in range(2):
            threads.start(lambda slot=slot: train(address, slot, codec=DENSE))
        threads.join()
    assert same_bits(server.model, reference(2, 8, "mean"))


@pytest.mark.parametrize(("mode", "on_loss"), [("async", "restore"), ("bsp", "ignore")])
def test_training_learns_in_spite_of_loss(mode: str, on_loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, 0.2)
    model = small_net()
    server = Server(model, sgd(model, 0.0), expect=2, codec=0.2, cut=2000, mode=mode, on_loss=on_loss)  # type: ignore[arg-type]
    threads = Threads()
    workers: list[Worker] = []
    with serving(server, max_steps=100, transport="udp") as address:
        for slot in range(2):
            threads.start(lambda slot=slot: workers.append(train(address, slot, codec=0.2)))
        threads.join()
    assert accuracy(server.model) > 0.6  # a guess is right in 25 % of cases; which datagrams are lost is chance
    assert all((worker._client.pushes.restored > 0) == (on_loss == "restore") for worker in workers)


def assert_agreed(server: Server, member: Member, net: nn.Module) -> None:
    """Check that a worker's replica equals its model bit for bit, except for entries known as lost."""
    assert isinstance(server.replicas, LossyReplicas)
    own, theirs = dict(server.model.named_parameters()), dict(net.named_parameters())
    for layer, part in server.layout.places():
        pieces = server.layout.layers[layer].parts[part]
        lost = lost_entries(server.replicas, member.session, layer, part)
        all_missing = residual(server.replicas, member.session, layer, part)
        for tensor, (piece, missing) in enumerate(zip(pieces, all_missing, strict=True)):
            ours = own[piece.parameter].detach().view(-1)[piece.begin : piece.end]
            replica = theirs[piece.parameter].detach().view(-1)[piece.begin : piece.end]
            agreed = torch.ones(len(missing), dtype=torch.bool)
            agreed[lost.get(tensor, torch.tensor([], dtype=torch.int64))] = False
            assert agreed.float().mean() > 0.8 or len(agreed) < 100  # at most what was lost of one step's 10 %
            assert torch.equal((ours - replica)[agreed], missing[agreed])


def test_server_and_worker_agree_after_five_hundred_steps_with_twenty_percent_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every replica equals its worker's model, except for entries known as lost, and no gradient is lost."""
    lose(monkeypatch, 0.2)
    monkeypatch.setattr(udp_listener, "MTU", 300)  # many datagrams even of a small model
    model = one_layer()
    server = Server(model, torch.optim.SGD(model.parameters(), lr=0.0625), expect=2, codec=0.1, reduce="sum")
    begun = [p.detach().clone() for p in model.parameters()]
    threads, meeting = Threads(), threading.Barrier(3)
    workers: dict[int, Worker] = {}
    pushed = {slot: [torch.zeros_like(p) for p in model.parameters()] for slot in range(2)}

    def work(slot: int) -> None:
        net = one_layer()
        with Worker(address, net, Codec(TopK(0.1), Float32()), slot=slot, overlap=False) as worker:
            for _ in range(500):
                gradients(net, worker.clock, slot)
                for total, p in zip(pushed[slot], net.parameters(), strict=True):
                    assert p.grad is not None
                    total += p.grad
                worker.step()
            worker.wait()
            workers[slot] = worker
            meeting.wait(60)
            meeting.wait(60)

    with serving(server, transport="udp") as address:
        for slot in range(2):
            threads.start(work, slot)
        meeting.wait(200)
        # The last parts have arrived, but the reports on them may still be in flight.
        deadline = time.monotonic() + 60
        while any(m.pool.in_flight for m in server.membership.active.values()) or any(
            w._client.pushes.unacknowledged for w in workers.values()
        ):
            assert time.monotonic() < deadline, "reports of what arrived are missing"
            time.sleep(0.02)
        for member in server.membership.active.values():
            assert_agreed(server, member, workers[member.slot].model)
            figures = server.listener.figures(member.peer)
            assert figures["datagrams_lost"] > 100 and figures["datagrams_missing"] > 100
        for (name, p), start, one, two in zip(model.named_parameters(), begun, pushed[0], pushed[1], strict=True):
            applied = (start - p.detach()) / 0.0625
            whole = f"{name}[0:{p.numel()}]"
            held = [workers[slot].codec.residuals(whole)["residual"].view_as(p) for slot in range(2)]
            torch.testing.assert_close(applied + held[0] + held[1], one + two, rtol=0.0, atol=2e-2)
        meeting.wait(60)
        threads.join()


def lose_a_report(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lose one message that has only reports, as a broken connection does, after forty messages of a worker."""
    lost: list[str] = []
    said: Counter[int] = Counter()
    true = TcpConnection.send

    def send(self: TcpConnection, parts: Sequence[Buffer]) -> None:
        said[id(self)] += 1
        envelope = read_envelope(parts)
        if not lost and said[id(self)] > 40 and envelope is not None and envelope.kind is EnvelopeKind.BATCH:
            records = read_records(envelope.session, envelope.parts[0])
            if {record.kind for record in records} == {EnvelopeKind.ACK}:
                lost.append("a report")
                return
        true(self, parts)

    monkeypatch.setattr(TcpConnection, "send", send)
    return lost


@pytest.mark.parametrize("mode", ["bsp", "async"])
def test_a_report_that_is_lost_with_a_connection_only_ends_the_session(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_a_report(monkeypatch)
    model = small_net()
    server = Server(model, sgd(model), expect=2, codec=0.1, cut=2000, mode=mode)  # type: ignore[arg-type]
    threads = Threads()
    with serving(server, max_steps=60, transport="udp") as address:
        for slot in range(2):
            threads.start(lambda slot=slot: train(address, slot))
        threads.join()
    assert lost and server.membership.left >= 1 and server.clock.step >= 60


def test_options_of_the_command_line_are_checked() -> None:
    plan = Plan(8, 0.1, 0.9, 1, None, 1)
    assert ServerSettings(plan, transport="udp", on_loss="ignore", mtu=1200).on_loss == "ignore"
    for transport, on_loss, mtu, match in (
        ("tcp", "ignore", None, "need the transport udp"),
        ("tcp", "restore", 1200, "need the transport udp"),
        ("udp", "hope", None, "restore"),
        ("udp", "restore", 100, "--mtu is from 256"),
    ):
        with pytest.raises(ValueError, match=match):
            ServerSettings(plan, transport=transport, on_loss=on_loss, mtu=mtu)
    with pytest.raises(ValueError, match="--mtu goes with udp"):
        listen("tcp://127.0.0.1:0", mtu=1200)
    with pytest.raises(TransportError, match="make keys"):
        listen("udp://0.0.0.0:0")


def test_a_worker_must_use_the_servers_transport() -> None:
    model = small_net()
    with serving(Server(model, sgd(model)), transport="udp") as address, pytest.raises(Exception, match="same --trans"):
        train(address.replace("udp://", "tcp://"), 0)
    with serving(Server(model, sgd(model))) as address, pytest.raises(Exception, match="refused this worker"):
        train(address.replace("tcp://", "udp://"), 0)
