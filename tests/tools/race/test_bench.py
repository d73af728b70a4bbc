"""The benchmarks' verdicts and mistakes; what they measure is put in their place, for tests assert no times."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs
from thinwire.errors import LabError
from thinwire.tools.bench import BenchLab, advice, fsdp, judge, local, server, udp
from thinwire.tools.bench import codec as bars
from thinwire.tools.bench import codec as show
from thinwire.tools.bench.codec import BARS_FOR, Bar, CodecRow
from thinwire.tools.cli import run
from thinwire.tools.lab.lab import Lab
from thinwire.tools.lab.links import DelayCost, LinkSettings


def codec_bars(*measured: float | None) -> tuple[list[CodecRow], list[Bar]]:
    row = CodecRow("encode TopK", BARS_FOR, 0.01, 2.0, 0.1, 8.0, 8.0, 1.0, 0.01)
    return [row], [Bar("speed", 2.5, each, "x the copy") for each in measured]


@pytest.mark.parametrize(
    ("measured", "said", "code"),
    [
        ((2.0, 2.5), "none of 2 bars missed.", 0),
        ((2.0, 3.0), "1 of 2 bars missed.", 1),
        ((2.0, None), "none of 2 bars missed, 1 not measured.", 0),
    ],
)
def test_the_codecs_bars_end_in_a_line_and_a_code(
    measured: tuple[float | None, ...],
    said: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(show, "_measure", lambda *_: codec_bars(*measured))
    file = tmp_path / "codec.json"
    assert run(["bench", "codec", "--json", str(file)]) == code
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == said
    assert ("not measured" in out) == (None in measured)
    written = json.loads(file.read_text())
    assert written["rows"][0]["name"] == "encode TopK"
    assert [bar["measured"] for bar in written["bars"]] == list(measured)
    assert [bar["passed"] for bar in written["bars"]] == [None if m is None else m <= 2.5 for m in measured]


def test_at_another_size_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "_measure", lambda *_: codec_bars(99.0))
    assert run(["bench", "codec", "--quick"]) == 0


def test_a_memory_probe_that_crashes_leaves_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "_PEAK", "raise MemoryError")
    found = bars.memory_bars(1000)
    assert [(bar.measured, bar.passed) for bar in found] == [(None, None)] * 3


def test_a_missed_bar_of_the_other_benchmarks_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(udp, "_sender", lambda: {"mbit": 499.0})
    assert run(["bench", "udp", "--only", "sender", "--json", str(tmp_path / "udp.json")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 bars missed."
    assert json.loads((tmp_path / "udp.json").read_text())["sender"]["mbit"] == 499.0
    monkeypatch.setattr(udp, "_sender", lambda: {"mbit": 501.0})
    assert run(["bench", "udp", "--only", "sender"]) == 0

    steps = {"fifo": 2.0, "filo": 2.0, "stalest": 3.0, "forward": 3.0}
    monkeypatch.setattr(server, "policy_steps", lambda *_: steps)
    assert run(["bench", "server", "--only", "policies"]) == 1
    steps["forward"] = 1.0
    assert run(["bench", "server", "--only", "policies"]) == 0

    def cells(workers: int, lab: BenchLab, options: dict[str, Any]) -> list[advice.Cell]:
        return [advice.Cell(workers, "1gbit", "0", "dense", predicted_ms=float(workers), measured_ms=4.0)]

    monkeypatch.setattr(advice, "measure", cells)
    capsys.readouterr()
    assert run(["bench", "advice", "--workers", "4, 8", "--rates", "1gbit"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 bars missed."
    assert run(["bench", "advice", "--workers", "4", "--rates", "1gbit"]) == 0


def ddp_records(
    lab: BenchLab, hosts: int, argv: list[str], *_: object, **__: object
) -> list[tuple[str, dict[str, Any]]]:
    """What methods would measure: topk1 waits for a round trip and sends 125 kB, a hundredth of a second.

    With `+scatter-reduce` its step takes 20 ms longer.
    """
    lab.costs.append(DelayCost(0.02, 0.3, 1000, 0) if lab.links.delayed else None)
    trip = 2 * lab.links.seconds
    common: dict[str, Any] = {"received": 1000.0, "hook_cpu": 0.001, "rank": 0, "round": 0, "messages": 2.0}
    infinite = {"method": "infinite", "step": 0.1, "sent": 100.0, "exchange": "", "round_trips": None, "cpu": 0.05}
    rows = [infinite]
    for name in (name for name in json.loads(argv[1])["methods"] if name != "infinite"):
        step = (0.13 if name.endswith("+scatter-reduce") else 0.11) + trip
        topk = {"method": name, "step": step, "sent": 125e3, "exchange": "Gather()", "round_trips": 1.0}
        rows.append({**topk, "cpu": 0.05 + 0.001125 * hosts})
    return [("ROW", {**common, **row}) for row in rows]


def test_several_delays_are_one_file_and_a_table_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BenchLab, "run", ddp_records)
    file = tmp_path / "ddp.json"
    words = ["bench", "ddp", "--workers", "2", "--rate", "100mbit", "--methods", "topk1", "--json", str(file)]
    assert run([*words, "--delay", "0,10ms"]) == 0
    near, far = json.loads(file.read_text())["delays"]
    assert (near["delay"], near["delay_line"], far["delay"]) == ("0", None, "10ms")
    assert far["delay_line"] == {"share": 0.02, "p99_late_ms": 0.3, "packets": 1000, "dropped": 0}
    assert [row["round_trips"] for row in far["rows"]] == [None, 1.0]
    assert far["rows"][1]["allowed_ms"] == pytest.approx(1.5 * 20 + 10)
    out = capsys.readouterr().out
    assert "2 workers at 100mbit, 10ms one way" in out and "trips" in out
    assert "Delay line: 2.0% of one core, p99 lateness 0.30 ms" in " ".join(out.split())
    assert (
        "topk1: step - infinite step = 30.0 ms, within 1.5 round trips + transfer of its bytes = 40.0 ms; "
        "step - infinite step without a delay = 30.0 ms" in out
    )
    assert out.splitlines()[-1] == "none of 1 bars missed."
    assert run([*words, "--delay", "10ms"]) == 0
    assert json.loads(file.read_text())["rows"][1]["name"] == "topk1"


@pytest.mark.parametrize(
    ("methods", "missed"), [("topk1+gather", 0), ("topk1,topk1+gather,topk1+scatter-reduce,topk0.1+scatter-reduce", 1)]
)
def test_steps_with_a_delay_are_judged_for_topk1_with_any_exchange(
    methods: str, missed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BenchLab, "run", ddp_records)
    words = ["bench", "ddp", "--workers", "2", "--rate", "100mbit", "--delay", "10ms", "--methods", methods]
    assert run(words) == missed
    judged = methods.count("topk1")
    last = f"1 of {judged} bars missed." if missed else f"none of {judged} bars missed."
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_processor_time_beyond_the_infinite_network_has_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BenchLab, "run", ddp_records)
    words = ["bench", "ddp", "--methods", "topk1", "--workers"]
    assert run([*words, "4", "--rate", "100mbit"]) == 0
    assert "met    topk1: 4.50 ms of CPU time beyond the infinite network (bar 4.5 ms)" in capsys.readouterr().out
    assert run([*words, "14"]) == 1
    assert "MISSED topk1: 15.75 ms of CPU time beyond the infinite network (bar 6.0 ms)" in capsys.readouterr().out
    monkeypatch.setattr(LinkSettings, "check", lambda *_: None)  # a delay line does not carry 14 such links
    assert run([*words, "14", "--delay", "10ms"]) == 0  # bars hold without a delay


def test_bars_are_not_judged_with_a_delay(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge([(LinkSettings(delay="5ms"), {"speed": (0.5, 1.0)})], "x") == 0
    assert judge([(LinkSettings(), {"speed": (0.5, 1.0)})], "x") == 1
    delayed, missed, _ = capsys.readouterr().out.splitlines()
    assert delayed == "5ms speed: 0.50x (bar 1.0x without a delay)" and missed == "MISSED speed: 0.50x (bar 1.0x)"


def local_records(
    lab: BenchLab, hosts: int, argv: list[str], *_: object, **__: object
) -> list[tuple[str, dict[str, Any]]]:
    """What two turns would measure: local16 takes 4 % longer at 50mbit and 20 % at 20mbit; a slow host is 3x slower."""
    part, longer = argv[1], {"50mbit": 1.04, "20mbit": 1.2}[str(lab.links.rate)]
    steps = {"infinite": 1.0, "local16": longer} if part == "steps" else {local.WAITING: 3.0, local.BY_TIME: 1.0}
    rows = []
    for name, step in steps.items():
        for turn, rank in ((turn, rank) for turn in range(2) for rank in range(hosts)):
            mine = 3.0 if name == local.BY_TIME and rank == hosts - 1 else step
            figures = {"step": mine, "samples_per_second": 1.0 / mine, "sent": 1e5}
            rows.append(("ROW", {"name": name, "turn": turn, "rank": rank, **figures}))
    return rows


def test_local_steps_are_judged_with_their_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BenchLab, "run", local_records)
    file = tmp_path / "local.json"
    assert run(["bench", "local", "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert "met    local16 at 50mbit: step without exchange / step: 0.96x (bar 0.952x)" in said
    assert "MISSED local16 at 20mbit: step without exchange / step: 0.83x (bar 0.909x)" in said
    assert "met    samples per second, rounds by time against waiting: 2.50x (bar 1.8x)" in said
    assert said.splitlines()[-1] == "1 of 3 bars missed."
    tables = json.loads(file.read_text())["tables"]
    assert [(t["part"], t["rate"], t["delay"]) for t in tables] == [
        ("steps", "50mbit", "25ms"),
        ("stragglers", "50mbit", "25ms"),
        ("steps", "20mbit", "25ms"),
    ]
    assert tables[0]["rows"][1]["ratio"] == pytest.approx(1.04)
    assert tables[1]["rows"][1]["samples_per_second"] == pytest.approx(3 + 1 / 3)
    assert run(["bench", "local", "--rates", "50mbit", "--only", "steps"]) == 0


@pytest.mark.long
def test_local_steps_are_measured_in_a_lab() -> None:
    """Real processes with a small model and hardly any base step; no times are compared."""
    needs("lab")
    small = local.LocalSettings("gpt", ("local4",), 1, 0.01, turns=1, rounds=1, seconds=0.3)
    for part, names in (("steps", ["infinite", "local4"]), ("stragglers", [local.WAITING, local.BY_TIME])):
        rows = local.measure(part, 2, BenchLab(LinkSettings("200mbit")), small)
        assert [row.name for row in rows] == names
        assert all(row.step_ms > 0.0 and row.samples_per_second > 0.0 for row in rows)
        assert all((row.bytes_sent > 1e3) == (row.name != "infinite") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["local", "--methods", "topk1"], "--methods takes presets with local steps, local4, local16, local64"),
        (["local", "--recipe", "digits"], "--recipe takes gpt or gpt-10m"),
        (["local", "--only", "speed"], "--only takes steps, stragglers"),
        (["local", "--rates", "fast"], "the rate 'fast'"),
        (["udp", "--rate", "none"], "leave incast out"),
        (["udp", "--only", "fair", "--rate", "fast"], "the rate 'fast'"),
        (["udp", "--only", "loss", "--loss", "0%,lots"], "the loss 'lots'"),
        (["advice", "--rates", "100mbit,fast"], "the rate 'fast'"),
        (["advice", "--workers", "4,1000"], "1 to 250 hosts, not 1000"),
        (["advice", "--workers", "4,"], "--workers"),
        (["advice", "--delay", "0,soon"], "the delay 'soon'"),
        (["ddp", "--delay", "10ms,"], "--delay '10ms,' has an empty item"),
        (
            ["ddp", "--preset", "moon"],
            "there is no network preset 'moon'; there are lan, office, home, wan, continents",
        ),
        (["server", "--delay", "10"], "the delay '10'"),
        (["udp", "--host-delay", "1:5ms"], "--host-delay takes HOST=VALUE, such as 3=80ms"),
        (["advice", "--methods", "dense,magic"], "magic"),
    ],
)
def test_mistakes_are_found_before_a_lab_is_built(
    arguments: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("a lab was built")

    monkeypatch.setattr("thinwire.tools.lab.lab.Lab.start", build)
    assert run(["bench", *arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert word in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "udp", "--only", "loss"], "loss, 5 hosts: the links carry 500mbit"),
        (["bench", "udp", "--only", "fair,incast"], "incast, 14 hosts: the links carry 1400mbit"),
        (["bench", "ddp", "--workers", "5", "--rate", "100mbit"], "the links carry 500mbit"),
        (["bench", "advice", "--workers", "4,5", "--rates", "100mbit"], "the links carry 500mbit"),
        (["bench", "local", "--rates", "50mbit,200mbit"], "the links carry 800mbit"),
        (
            ["bench", "server", "--rate", "20mbit", "--only", "policies,trips"],
            "trips, 14 hosts: the links carry 1400mbit",
        ),
        (["race", "digits", "--workers", "5", "--rate", "100mbit"], "the links carry 500mbit"),
    ],
)
def test_links_that_cannot_be_delayed_are_refused_before_anything_is_measured(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("delay")
    monkeypatch.setattr("thinwire.tools.lab.lab.Lab._shape", without_netem(Lab._shape))

    def measure(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr("thinwire.tools.lab.lab.Lab.run", measure)
    delays = "25ms" if "local" in arguments else "0,25ms"
    assert run([*arguments, "--delay", delays]) != 0
    assert words in capsys.readouterr().err


def without_netem(shape: Callable[[Lab], None]) -> Callable[[Lab], None]:
    """A kernel that has no netem."""

    def shaped(lab: Lab) -> None:
        if lab._netem_delay:
            raise LabError("the kernel refused to use the queue netem")
        shape(lab)

    return shaped


@pytest.mark.parametrize(("ratio", "code"), [(1.24, 0), (1.26, 1)])
def test_a_sharded_step_has_a_bar(
    ratio: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"infinite": 1.0, "hsdp": 4.0, "0.01": ratio}
    rows = [fsdp.ShardedFigures(name, 1e3 * step, step, 1.0, 1.0, 1.0, "") for name, step in steps.items()]
    monkeypatch.setattr(fsdp, "measure", lambda *_: (rows, 10_000_000))
    assert run(["bench", "fsdp", "--methods", "hsdp,0.01", "--json", str(tmp_path / "fsdp.json")]) == code
    assert f"{4.0 / ratio:.2f}x" in capsys.readouterr().out  # the speed-up over native HSDP
    written = json.loads((tmp_path / "fsdp.json").read_text())
    assert (written["batch"], written["parameters"], len(written["bars"])) == (4, 10_000_000, 1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_sharded_steps_send_less_between_machines() -> None:
    needs("lab")
    options = {"recipe": "gpt", "methods": ["infinite", "hsdp", "0.01"], "batch": 1, "steps": 1, "rounds": 1}
    rows, parameters = fsdp.measure(2, 2, BenchLab(LinkSettings("100mbit")), {**options, "warmup": 2})
    infinite, native, ours = (row.bytes_sent for row in rows)
    assert infinite < 0.01 * native  # what the ranks of a machine exchange does not leave it
    assert 4 * parameters < native < 4.5 * parameters  # each of two ranks sends its half of the gradients
    assert ours < 0.1 * native
