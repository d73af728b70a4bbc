"""The pacing's rule on a computed link: it fills it, shares it, and takes random loss for what it is."""

import pytest

from tests.transport.bottleneck import Bottleneck


def test_alone_it_fills_the_link_and_loses_nothing() -> None:
    link = Bottleneck(4.0)
    assert link.run(1)[0] > 90 and link.lost < 0.001 * link.sent


@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_random_loss_does_not_slow_it_down(loss: float) -> None:
    assert Bottleneck(4.0, loss=loss).run(1)[0] > 70 * (1.0 - loss)


def test_next_to_tcp_neither_starves() -> None:
    ours, tcp = Bottleneck(10.0).run(1, 1)
    assert ours + tcp > 90 and 0.5 < ours / tcp < 2.0


def test_it_does_not_push_tcp_away_whose_queue_it_takes_for_the_path() -> None:
    """It comes later, and has never seen the queue empty: half of its datagrams would be lost, and all of TCP's."""
    link = Bottleneck(10.0)
    ours, tcp = link.run(1, 1, late=1.0)
    assert ours > 15 and tcp > 25 and link.lost < 0.02 * link.sent


def test_many_senders_to_one_receiver_do_not_collapse() -> None:
    link = Bottleneck(5.0)
    rates = link.run(13)
    assert sum(rates) > 80 and link.lost < 0.1 * link.sent
    assert min(rates) > 3.0
