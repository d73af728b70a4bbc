"""A step of the server costs one round trip, over tcp and udp, and lossy networks with long delays work."""

import pytest

from tests.server.simulation.events import Events
from tests.server.simulation.ledger import Ledger
from tests.server.simulation.network import Trouble, UdpLink, new_link
from tests.server.simulation.nodes import ServerNode, WorkerNode
from thinwire.codec.codec import Codec
from thinwire.codec.selection import TopK
from thinwire.codec.values import Float32

COMPUTE = 1e-3


def step_seconds(transport: str, trouble: Trouble, steps: int = 20, policy: str = "forward") -> float:
    """Return the virtual seconds of a step of bsp with four workers, after some steps."""
    events, ledger = Events(0), Ledger()
    pieces = UdpLink.piece_bytes if transport == "udp" else None
    codec = Codec(TopK(0.5), Float32(), min_numel=1)
    options = {"mode": "bsp", "codec": codec, "cut": 4, "policy": policy, "expect": 4, "timeout": 5.0, "pieces": pieces}
    server = ServerNode(events, ledger, options, {})
    for number in range(4):
        worker = WorkerNode(events, ledger, new_link(events, trouble, transport), number, COMPUTE)
        server.connect(worker.peer, worker.link)
    assert events.run(events.now + 600.0, lambda: server.server.clock.step >= 10)
    began = events.now
    assert events.run(events.now + 600.0, lambda: server.server.clock.step >= 10 + steps)
    assert server.server.membership.left == 0
    return (events.now - began) / steps


@pytest.mark.parametrize("transport", ["tcp", "udp"])
@pytest.mark.parametrize("policy", ["forward", "stalest"])
@pytest.mark.parametrize("delay", [0.01, 0.025, 0.05])
def test_a_step_takes_one_round_trip_more_than_without_delay(transport: str, policy: str, delay: float) -> None:
    without = step_seconds(transport, Trouble(delay=0.0), policy=policy)
    taken = step_seconds(transport, Trouble(delay=delay), policy=policy)
    assert 2 * delay <= taken < without + 2 * delay + 0.1 * delay


def test_lost_packets_cost_less_than_two_round_trips_more_at_100_milliseconds() -> None:
    """What is lost is given up at a deadline that the measured delays set, and not by a timeout of TCP."""
    without = step_seconds("udp", Trouble(delay=0.1), steps=40)
    lossy = step_seconds("udp", Trouble(delay=0.1, loss=0.05, jitter=0.005), steps=40)
    assert lossy < without + 2 * 0.2
