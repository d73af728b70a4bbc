"""Congestion control on a simulated link: it fills the link, shares it, and ignores random loss."""

import pytest

from tests.transport.bottleneck import Bottleneck
from thinwire.transport.udp.congestion import LossProbe


def test_a_single_sender_fills_the_link_without_loss() -> None:
    link = Bottleneck(4.0)
    assert link.run(1)[0] > 90 and link.lost < 0.001 * link.sent


@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_random_loss_does_not_slow_a_sender_down(loss: float) -> None:
    assert Bottleneck(4.0, loss=loss).run(1)[0] > 70 * (1.0 - loss)


def test_a_sender_and_a_tcp_stream_share_the_link() -> None:
    ours, tcp = Bottleneck(10.0).run(1, 1)
    assert ours + tcp > 90 and 0.5 < ours / tcp < 2.0


def test_a_sender_that_starts_later_does_not_starve_tcp() -> None:
    """It has never seen the queue empty. Without the probe it would lose half of its packets, and starve TCP."""
    link = Bottleneck(10.0)
    ours, tcp = link.run(1, 1, late=1.0)
    assert ours > 15 and tcp > 25 and link.lost < 0.02 * link.sent


def test_many_senders_to_one_receiver_do_not_collapse() -> None:
    link = Bottleneck(5.0)
    rates = link.run(13)
    assert sum(rates) > 80 and link.lost < 0.1 * link.sent
    assert min(rates) > 3.0


def test_a_probe_decides_after_four_rtts_and_128_packets() -> None:
    probe = LossProbe()
    assert not probe.is_due(100, 4, 0.0) and probe.is_due(100, 9, 0.1)
    assert probe.begin(64.0, 1.0) == 32.0 and probe.running
    assert probe.on_ack(200, 0, 0.01, 1.001) is None  # about packets that left before the probe
    assert probe.on_ack(100, 3, 0.01, 1.1) is None  # too few packets
    assert probe.on_ack(28, 1, 0.01, 1.2) == 64.0 and not probe.running  # as much is lost: the loss is the link's own
    assert not probe.is_due(100, 3, 1.3)  # and is not probed again for ten seconds
    assert probe.is_due(100, 3, 12.0)
