"""Policies of scheduling: what the simulation predicts, and that the benchmark measures them on a real server."""

import pytest

from tests.needs import needs
from thinwire.tools.bench import BenchLab
from thinwire.tools.bench.server import ServerRun, policy_steps
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.race.profile import LayerTimes
from thinwire.tools.simulate.schedule import Case, compare, even_slices

RATE = 100e6
# As in the benchmark's model: eight layers of 512 x 512 whose first takes half a second, and a small one.
LAYERS = tuple(
    LayerTimes(f"{n}", 0.5 if n == 0 else 0.005, 0.001, 8.0 * 4 * elements / RATE)
    for n, elements in enumerate([512 * 513] * 8 + [5130])
)


def test_forward_is_faster_with_a_slow_first_layer_in_the_simulation() -> None:
    case = Case(LAYERS, workers=1, iterations=6, slices=even_slices(LAYERS, 4))
    fifo, forward = (outcome.makespan for outcome in compare(case, ("fifo", "forward")))
    assert fifo > 1.3 * forward


def test_the_benchmark_measures_policies_on_a_real_server(capfd: pytest.CaptureFixture[str]) -> None:
    """Which one is faster is for `thinwire bench server` to say: a busy machine may reverse it."""
    needs("lab")
    runs = [
        ServerRun(policy, policy=policy, model="slow_first", workers=1, push="dense", pull="dense", steps=4)
        for policy in ("fifo", "forward")
    ]
    measured = policy_steps(BenchLab(LinkSettings("100mbit")), runs)
    assert measured.keys() == {"fifo", "forward"} and min(measured.values()) > 0.0
    assert capfd.readouterr().err.startswith("2 hosts at 100mbit ...\n")  # progress without a terminal
