"""Training with a metric that is better if it is lower: targets, verdicts, pages, the server, and simulated workers.

The recipe is a tiny GPT on a made-up text, with clipping and a schedule.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from papers.simulation import Curve, Goal, Simulation, TrainingSetting

from tests.cluster import Cluster
from tests.server.serving import Threads
from tests.tools.report.made_up import made_up
from thinwire.tools.events import Eval, Event, Step
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.race.launch import ClusterSpec, make_plan
from thinwire.tools.race.race import Result
from thinwire.tools.race.served import ServerSettings, Serving, work
from thinwire.tools.race.train import MethodResult
from thinwire.tools.race.training import Work, run_all
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.gpt import GPT
from thinwire.tools.recipes.recipe import Recipe
from thinwire.tools.report.page import figures, summary_rows, write_report
from thinwire.tools.report.summary import headline, reached, summarise
from thinwire.transport.addresses import listen
from thinwire.tune.presets import resolve_codec


def tiny() -> Recipe:
    """A recipe that commands find by this module's name."""
    return replace(get_recipe("gpt"), name="tiny", model=partial(GPT, context=64, layers=1, width=16, heads=2))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Each line of this text is like the others.\n" * 60)
    return path


def trained(rank: int, text: Path, **changes: Any) -> tuple[list[Event], str]:
    """Train on this rank; return the events and the reason of the end."""
    plan = make_plan(tiny(), workers=2, data=text, batch=4, lr=0.5, target=3.5, max_steps=60, evaluate_every=4)
    found: list[Event | str] = []
    work = Work(f"{__name__}:tiny", text, (("0.05", 0),), replace(plan, **changes))
    run_all(work, lambda run, event: found.append(event))
    *events, reason = found
    assert isinstance(reason, str)
    return [event for event in events if not isinstance(event, str)], reason


def losses(*parts: list[Event]) -> list[float]:
    return [event.loss for events in parts for event in events if isinstance(event, Step)]


def test_a_training_ends_at_the_loss_and_a_resumed_one_is_the_same(cluster: Cluster, text: Path) -> None:
    def train(**changes: Any) -> tuple[list[Event], str]:
        return cast(tuple[list[Event], str], cluster.run(partial(trained, **changes), 2, text)[0])

    whole, reason = train()
    values = [event.value for event in whole if isinstance(event, Eval) and event.split == "test"]
    assert reason == "target" and values[-1] <= 3.5 < min(values[:-1])
    first, _ = train(max_steps=4, checkpoint=text.parent / "saved")
    rest, reason = train(checkpoint=text.parent / "saved", resume=True)
    assert reason == "target" and losses(first, rest) == losses(whole)


def test_a_server_clips_schedules_and_stops_at_the_loss(text: Path) -> None:
    recipe = tiny()
    plan = make_plan(recipe, workers=1, data=text, batch=4, max_steps=60, target=3.0, lr=0.5, evaluate_every=4)
    assert (plan.train_samples, plan.test_samples) == (200, 200)
    events: list[Event] = []
    settings = ServerSettings(plan, workers=1, method="dense", pull_method="dense")
    serving, listener, threads = Serving(recipe, text, settings, events.append), listen("tcp://127.0.0.1:0"), Threads()
    reasons: list[str] = []
    threads.start(lambda: reasons.append(serving.run(listener)))
    threads.start(lambda: work(recipe, text, listener.address))
    threads.join()
    assert reasons == ["target"] and serving.server.clock.step < 60
    values = [e.value for e in events if isinstance(e, Eval) and e.split == "test"]
    assert values[-1] <= 3.0 < values[0]
    rate = serving.server.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(0.5 * (serving.server.clock.step + 1) / 100)


def simulated(text: Path, target: float | None) -> Curve:
    setting = TrainingSetting(2, 4, 0.5, 0.9, resolve_codec("0.05"))
    goal = Goal(24, 4, train_samples=0, test_samples=20, target=target, split="test")
    return Simulation("run", tiny(), tiny().load(text), setting, goal).run(text.parent)


def test_simulated_workers_stop_at_the_loss(text: Path) -> None:
    whole = simulated(text, None)
    assert whole.reached is None and whole.best_test == min(whole.test) < whole.test[0]
    assert whole.first_at(whole.test[2]) == 12 and whole.first_at(0.0) is None
    assert simulated(text, whole.test[2]).reached == 12


def test_the_report_of_a_loss(tmp_path: Path) -> None:
    of_run = {"metric": "loss", "higher_is_better": False, "target": 0.7}
    # The made-up value falls from 0.95 to 0.5 for a run that never "hits".
    logs = [made_up(name, hit=None, ms=ms, sent=40, **of_run) for name, ms in (("dense", 100), ("topk1", 10))]
    first = reached(logs[1])
    assert first is not None and first.step == 1 and reached(logs[1], 0.4) is None
    said = headline(summarise(logs), metric="loss")
    assert said.startswith("topk1 reached the target of loss 0.7000 in") and "10.0 times sooner than dense" in said
    data = figures(logs)
    assert (data["metric"], data["decimals"], data["higher_is_better"], data["target"]) == ("loss", 3, False, 0.7)
    assert summary_rows(summarise(logs), metric="loss")[0]["Final test loss"] == "0.5000"
    write_report(logs, tmp_path / "page.html")
    assert '"higher_is_better": false' in (tmp_path / "page.html").read_text()


def test_the_verdict_of_a_loss() -> None:
    dense = MethodResult("dense", 100.0, 10.0, 90.0, 1e6, 40.0, 60.0, 1.0, 1.4, 1.482)
    sparse = replace(dense, name="topk1", step_ms=10.0, seconds_to_target=12.0, speedup=5.0, test_metric=1.6)

    def verdict(*methods: MethodResult, target: float | None) -> str:
        place = ClusterSpec(2, LinkSettings("100mbit"), "")
        return Result(place, "gpt", "loss", target, 9.0, list(methods), [], higher_is_better=False).verdict()

    assert "topk1 reaches loss 1.700 5.0x sooner than dense" in verdict(dense, sparse, target=1.7)
    said = verdict(dense, sparse, target=None)
    assert "the time to a loss was not measured" in said and "topk1 still has loss 1.600, dense 1.482" in said
    assert "topk1 has loss 1.400, dense 1.482" in verdict(dense, replace(sparse, test_metric=1.4), target=None)
