"""The benchmarks' verdicts and mistakes; what they measure is put in their place, for tests assert no times."""

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.tools.bench import advice, server, udp
from thinwire.tools.bench import codec as bars
from thinwire.tools.bench import codec as show
from thinwire.tools.bench.codec import BARS_FOR, Bar, CodecRow
from thinwire.tools.cli import run


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

    def cells(workers: int, rate: str, options: dict[str, Any]) -> list[advice.Cell]:
        return [advice.Cell(workers, rate, "dense", predicted_ms=float(workers), measured_ms=4.0)]

    monkeypatch.setattr(advice, "measure", cells)
    capsys.readouterr()
    assert run(["bench", "advice", "--workers", "4, 8", "--rates", "1gbit"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 bars missed."
    assert run(["bench", "advice", "--workers", "4", "--rates", "1gbit"]) == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["udp", "--rate", "none"], "leave incast out"),
        (["udp", "--only", "fair", "--rate", "fast"], "the rate 'fast'"),
        (["udp", "--only", "loss", "--loss", "0%,lots"], "the loss 'lots'"),
        (["advice", "--rates", "100mbit,fast"], "the rate 'fast'"),
        (["advice", "--workers", "4,1000"], "1 to 250 hosts, not 1000"),
        (["advice", "--workers", "4,"], "--workers"),
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
