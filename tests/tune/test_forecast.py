"""Forecasts and decisions: arithmetic that every rank repeats, so that it must be right and steady."""

from dataclasses import replace

import pytest

from thinwire.tune.forecast import (
    DENSE,
    FP16,
    HIERARCHICAL,
    SETTINGS,
    ChangeDetector,
    Forecast,
    LinearTime,
    Network,
    Setting,
    Tiers,
    TuningPolicy,
    Workload,
    at_density,
    decide,
    density_setting,
    forecast,
    frame_bytes,
    scattered_parts,
    sent,
    update_settings,
)

# The convnet of SparsifyGradients on a slow core: 7 MB of gradients, 40 ms of computing.
WORK = Workload(
    0.04,
    (1_500_000, 256_426),
    (-0.02, 0.0),
    encode=0.002,
    decode=0.0002,
    copy=0.001,
    alpha={0.1: 0.6, 0.01: 0.12, 0.001: 0.02},
)


def test_a_network_from_a_rate_moves_what_the_collectives_move() -> None:
    network = Network.ideal(4, 1e8, 1e-4)
    assert network.gather(1000) == pytest.approx(1e-4 + 3 * 8000 / 1e8)  # to all ranks at once
    assert network.reduce(4_000_000) == pytest.approx(6 * 1e-4 + 1.5 * 32e6 / 1e8)
    assert network.scatter(4000) == pytest.approx(2 * network.gather(1000))
    assert network.bandwidth == pytest.approx(1e8)
    other = network.at_rate(2e8)
    assert other.bandwidth == pytest.approx(2e8) and other.reduce.fixed == network.reduce.fixed


def test_buckets_wait_for_their_messages_together() -> None:
    """However many buckets a step has, it waits for one message (gather) or two (scatter-reduce), not for each."""
    many = replace(WORK, buckets=(600_000,) * 8, ready=tuple(0.001 * i - 0.007 for i in range(8)))
    one = replace(many, buckets=(8 * 600_000,), ready=(0.0,))
    for name, rounds in (("gather", 1), ("scatter-reduce", 2)):
        setting = Setting("0.01", name, density=0.01)
        for work in (many, one):
            near, far = (forecast(setting, work, Network.ideal(4, 1e9, latency)).seconds for latency in (0.0, 0.05))
            # The last message takes 50 ms, and its packets are paced over up to 40 ms.
            assert rounds * 0.05 - 0.01 <= far - near <= rounds * 0.09 + 1e-9
    # An all-reduce is a ring of 2 (ranks - 1) messages that wait for one another, and two of them run at a time.
    near, far = (forecast(DENSE, one, Network.ideal(4, 1e9, latency)).seconds for latency in (0.0, 0.05))
    assert far - near == pytest.approx(6 * 0.05)
    near, far = (forecast(DENSE, many, Network.ideal(4, 1e12, latency)).seconds for latency in (0.0, 0.05))
    assert far - near == pytest.approx(4 * 6 * 0.05, abs=0.01)


def test_what_keeps_a_rank_busy_is_not_overlapped() -> None:
    many = replace(WORK, buckets=(600_000,) * 8, ready=(0.0,) * 8)
    quick = Network.ideal(4, 1e9, 0.05)
    busy = replace(quick, gather=replace(quick.gather, fixed=0.06))  # 10 ms of each message beyond its latency
    setting = Setting("0.01", "gather", density=0.01)
    assert forecast(setting, many, busy).seconds - forecast(setting, many, quick).seconds == pytest.approx(
        8 * 0.01, abs=0.01
    )


def test_tcp_paces_a_message_unless_the_link_takes_longer() -> None:
    """Measured with 50 ms one way: 51 ms for 2,500 bytes, 79 for 12,000, and 92 for 42,000 and for 160,000."""
    network = Network.ideal(4, 1e8 * 1448 / 1514, 0.05)
    for size, measured in ((2_500, 0.051), (12_000, 0.079), (42_000, 0.092), (160_000, 0.092)):
        assert network.exchange(size) == pytest.approx(measured, rel=0.1)
    learned = replace(network, paced=0.0)  # a connection that has sent longer messages: 61 ms for 42,000 bytes
    assert learned.exchange(42_000) == pytest.approx(0.061, rel=0.1)
    one = replace(WORK, buckets=(WORK.elements,), ready=(0.0,))
    setting = Setting("0.01", "gather", density=0.01)
    more = forecast(setting, one, network).seconds - forecast(setting, one, learned).seconds
    assert more == pytest.approx(network.exchange(25_000) - learned.exchange(25_000), abs=0.004)
    assert forecast(DENSE, WORK, network) == forecast(DENSE, WORK, learned)


def test_exchanges_take_processor_time_from_ranks_on_the_same_core() -> None:
    """The step grows by the processor time of all ranks on a core; what is under way is hidden as before."""
    network = replace(Network.ideal(4, 1e8, 0.01), cpu=LinearTime(0.001, 0.0))
    setting = Setting("0.01", "gather", density=0.01)
    one = replace(WORK, buckets=(WORK.elements,), ready=(0.0,))
    alone, crowded = (forecast(setting, replace(one, crowd=crowd), network).seconds for crowd in (1.0, 2.0))
    assert crowded - alone == pytest.approx(WORK.encode + 4 * WORK.decode + 2.0 * 0.001)
    update = next(s for s in update_settings(4) if s.name == "update")
    waits = [forecast(update, replace(WORK, crowd=crowd), network).seconds for crowd in (1.0, 2.0)]
    assert waits[1] - waits[0] == pytest.approx(2.0 * 2 * 0.001)  # two rounds; its codec was not measured
    # An all-reduce slows down the backward pass, so that nothing of it is hidden.
    late = replace(WORK, ready=(0.0, 0.0))
    assert forecast(DENSE, replace(WORK, crowd=2.0), network) == forecast(DENSE, late, network)


def test_both_rounds_of_a_scatter_reduce_send_two_frames() -> None:
    for world in (4, 64):
        part, result = scattered_parts(8e6, world)
        assert (world - 1) * (part + result) == pytest.approx(2 * 8e6, rel=0.01)
        assert result > part


def test_long_networks_are_compressed_for_even_when_they_are_fast() -> None:
    """The ring of an all-reduce waits for 2 (ranks - 1) messages; a second round of messages must save enough."""
    assert decide(WORK, Network.ideal(8, 1e10, 1e-5)).setting.name in ("dense", "fp16")
    assert str(decide(WORK, Network.ideal(8, 1e10, 0.05)).setting).endswith("by gather")
    thin = Network.ideal(32, 1e8, 0.0)
    assert decide(WORK, thin).setting.exchange == "scatter-reduce"
    assert decide(WORK, replace(Network.ideal(32, 1e8, 0.5))).setting.exchange == "gather"


def test_probes_give_a_line_even_when_they_contradict_each_other() -> None:
    assert LinearTime.through((64, 0.001), (65_600, 0.011))(65_600) == pytest.approx(0.011)
    odd = LinearTime.through((64, 0.002), (65_600, 0.001))
    assert odd.per_byte > 0.0 and odd.fixed > 0.0


def test_what_the_backward_pass_hides_is_not_waited_for() -> None:
    network = Network.ideal(4, 1e9, 0.0)
    first = network.reduce(4 * 1_500_000)
    last = network.reduce(4 * 256_426)
    assert forecast(DENSE, WORK, network).seconds == pytest.approx(0.04 + max(first - 0.02, 0.0) + last)
    assert forecast(DENSE, WORK, network).sent == 2 * 4 * WORK.elements * 3 / 4


def test_frames_are_as_large_as_the_codec_makes_them() -> None:
    import torch

    import thinwire as tw

    for density in (0.1, 0.01, 0.001):
        frame = tw.Codec(tw.TopK(density, exact=True)).encode({"w": torch.randn(300_000)})
        assert frame_bytes(density_setting(density, "gather"), 300_000) == pytest.approx(len(frame), rel=0.08, abs=80)
    scattered, gathered = (
        sent(Setting("x", e, density=0.01), WORK, Network.ideal(64, 1e9, 0.0)) for e in ("scatter-reduce", "gather")
    )
    assert scattered < gathered / 10


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(20e6, "0.01 by scatter-reduce"), (200e6, "0.01 by gather"), (100e9, "dense")],
)
def test_thin_wires_are_compressed_for_and_fast_ones_are_not(rate: float, expected: str) -> None:
    decision = decide(WORK, Network.ideal(4, rate, 5e-5))
    assert str(decision.setting) == expected
    assert len(decision.forecasts) == len(SETTINGS)
    words = decision.why()
    assert words.startswith(expected) and "\n" not in words and f"{rate / 1e6:,.0f} Mbit/s" in words
    assert ("dense " in words) and ("alpha" in words) == decision.setting.compressed


def test_many_workers_scatter() -> None:
    assert decide(WORK, Network.ideal(256, 1e8, 1e-5)).setting.exchange == "scatter-reduce"


def test_machines_with_several_ranks_add_up_before_they_send() -> None:
    thin = Network.ideal(16, 2e8, 1e-4)
    assert decide(WORK, thin).setting.exchange != HIERARCHICAL
    # Eight ranks to a machine: one link for two frames where there were eight times fourteen.
    tiers = Tiers(8, LinearTime(1e-4, 1e-10), LinearTime(1e-4, 8 / 2e8))
    chosen = decide(WORK, replace(thin, tiers=tiers))
    assert chosen.setting.exchange == HIERARCHICAL and "by hierarchical" in chosen.why()
    expected, times = chosen.expected, WORK.times(chosen.setting)
    assert expected.sent == pytest.approx(times.frame / 8)
    slow_inside = replace(tiers, inside=LinearTime(1e-4, 1e-7))
    assert decide(WORK, replace(thin, tiers=slow_inside)).setting.exchange != HIERARCHICAL
    with pytest.raises(ValueError, match="hierarchical"):
        forecast(chosen.setting, WORK, thin)


def test_what_carries_too_little_is_not_chosen() -> None:
    slow = Network.ideal(4, 1e6, 1e-4)
    assert decide(WORK, slow).setting.density == 0.01
    assert decide(WORK, slow, policy=TuningPolicy(alpha=0.01)).setting.density == 0.001
    assert decide(WORK, slow, policy=TuningPolicy(alpha=0.9)).setting == FP16


def test_a_little_time_is_not_worth_many_steps() -> None:
    policy = TuningPolicy()
    some, few = (
        Forecast(Setting("x", "gather", density=d), s, 0.0, a) for d, s, a in ((0.01, 0.1, 0.12), (0.001, 0.097, 0.06))
    )
    assert policy.cost(some) < policy.cost(few) and policy.cost(Forecast(DENSE, 0.1, 0.0, 1.0)) == 0.1
    assert policy.cost(replace(few, seconds=0.05)) < policy.cost(some)


def test_a_small_gain_is_no_reason_to_change() -> None:
    present = density_setting(0.01, "gather")
    for rate in (80e6, 100e6, 120e6, 200e6):  # a network with moods
        decision = decide(WORK, Network.ideal(4, rate, 5e-5), present)
        assert not decision.changed
    assert decide(WORK, Network.ideal(4, 1e11, 5e-5), DENSE).setting == DENSE
    assert decide(WORK, Network.ideal(4, 20e6, 5e-5), DENSE).changed


def test_the_detector_notices_what_matters_and_nothing_else() -> None:
    detector = ChangeDetector()
    assert not detector.changed([0.1, 0.11, 0.1], 0.2)  # the yardstick
    assert not detector.changed([0.12, 0.1, 0.13], 0.2)
    assert detector.changed([0.5, 0.6, 0.4], 0.6)
    assert detector.changed([0.01, 0.02, 0.01], 0.1)
    detector.reset()
    assert not detector.changed([0.5, 0.6, 0.4], 0.6)
    detector.reset()
    assert not detector.changed([0.0001], 0.04)
    assert not detector.changed([0.0015], 0.04)  # fifteen times as long, and still nothing


def test_alpha_between_the_densities_that_were_measured() -> None:
    assert WORK.alpha is not None
    assert at_density(WORK.alpha, 0.01) == pytest.approx(0.12)
    assert 0.12 < at_density(WORK.alpha, 0.03) < 0.6
    assert at_density(WORK.alpha, 0.0001) == pytest.approx(0.002)
    assert at_density(WORK.alpha, 0.5) == 0.6
