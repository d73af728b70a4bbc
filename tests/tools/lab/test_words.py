"""Arguments of the lab and the messages that it sends to the kernel; these tests build no lab."""

import ast
from pathlib import Path

import pytest
import typer

import thinwire.tools.lab
from tests.tools.lab import kills
from thinwire.tools.cli import run
from thinwire.tools.lab import check, command, launching, registry
from thinwire.tools.lab.launching import HostTraffic, parse_counters
from thinwire.tools.lab.shaping import FRAME, bucket
from thinwire.tools.lab.units import Rates, format_rate, parse_delay, parse_loss, parse_rate, parse_rates


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10mbit", 10**7),
        ("1gbit", 10**9),
        ("500kbit", 500_000),
        ("1.5Mbit", 1_500_000),
        ("1mibit", 2**20),
        ("64000bit", 64_000),
        (10**8, 10**8),
        ("none", None),
        (None, None),
    ],
)
def test_rates_are_read_as_tc_reads_them(text: str | int | None, bits: int | None) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["abc", "", "10", "-5mbit", "10mbits", "mbit", "1e9", "nan", "9999tbit", "0", "1mbps"])
def test_bad_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text)


def test_a_rate_without_a_unit_is_asked_for_one() -> None:
    for text in ("100", "64000", "100/20mbit"):
        with pytest.raises(ValueError, match=r"(100|64000) of what\? Write (100|64000)mbit"):
            parse_rates(text)


def test_rates_of_both_directions() -> None:
    assert parse_rates("20mbit/100mbit") == Rates(20_000_000, 100_000_000)
    assert parse_rates("none/1gbit") == Rates(None, 10**9)
    assert str(parse_rates("20mbit/100mbit")) == "20mbit/100mbit"
    assert str(parse_rates("100mbit")) == "100mbit"
    assert parse_rates(str(Rates(1234567, None))) == Rates(1234567, None)
    assert format_rate(1_500_000) == "1500kbit"


def test_losses_and_delays() -> None:
    assert parse_loss("1%") == pytest.approx(0.01)
    assert parse_loss(0.2) == 0.2
    assert parse_delay("5ms") == pytest.approx(0.005)
    assert parse_delay("200us") == pytest.approx(0.0002)
    for bad in ("200%", "-1%", "1", "x%", 1.5, float("nan")):
        with pytest.raises(ValueError, match="loss"):
            parse_loss(bad)
    for bad in ("5", "ms", "-1ms", "61s", -1.0):
        with pytest.raises(ValueError, match="delay"):
            parse_delay(bad)


@pytest.mark.parametrize("rate", [8000, 10**7, 10**8, 10**9])
def test_a_bucket_holds_packets_and_a_queue(rate: int) -> None:
    burst, queue = bucket(rate)
    assert burst > 8 * FRAME  # a bundle
    assert queue >= 100 * FRAME


def test_counters_are_those_of_the_hosts_not_of_the_switch() -> None:
    text = "heading\nheading\n h0: 10 1 0 0 0 0 0 0 20 2 0 0 0 0 0 0\n lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n"
    assert parse_counters(text, 1) == [HostTraffic(10, 1, 20, 2)]


def test_the_summary_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = HostTraffic(10**10, 10**8, 10**10, 10**8)
    hosts = tuple(launching.HostResult(host, -15, 3600.12, 3600.12, traffic, ()) for host in (0, 249))
    command._summary(launching.RunResult(143, None, 12345.67, hosts), 1.5, "")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 4 and max(map(len, lines)) <= 80
    assert "packets in" in lines[1] and "10000.000" in lines[3]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "100", "--", "true"],
        ["--rate", "abc", "--", "true"],
        ["--hosts", "0", "--", "true"],
        ["--hosts", "251", "--", "true"],
        ["--hosts", "many", "--", "true"],
        ["--hosts", "2", "--host-rate", "2=1mbit", "--", "true"],
        ["--host-rate", "1:1mbit", "--", "true"],
        ["--loss", "200%", "--", "true"],
        ["--delay", "soon", "--", "true"],
        ["--asymmetric", "5mbit", "--", "true"],
        ["--rate", "1mbit", "--asymmetric", "1mbit/2mbit", "--", "true"],
        ["--per-host", "0", "--", "true"],
        ["--hosts", "2"],
        ["--", "no-such-command"],
        ["--json", "no/such/directory/x.json", "--", "true"],
        ["--check", "--", "true"],
        ["--check", "--clean"],
        ["--no-such-option", "--", "true"],
    ],
)
def test_bad_arguments_are_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("thinwire")
    assert captured.err.count("\n") == 1


def test_other_systems_than_linux_are_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    (found,) = check.check()
    assert (found.works, found.required) == (False, True)
    assert found.detail == "a lab needs Linux; this is darwin"


@pytest.mark.parametrize(
    ("number", "name"), [(9, "SIGKILL"), (35, "SIGRTMIN+1"), (50, "SIGRTMIN+16"), (33, "signal 33")]
)
def test_every_signal_has_a_name(number: int, name: str) -> None:
    assert launching._signal_name(number) == name


def test_a_lab_that_closes_during_the_search_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    gone, dead = (registry.directory() / f"tw{pid}-abc.hosts" for pid in (10**8, 10**8 + 1))
    dead.write_text("")

    def glob(folder: Path, pattern: str) -> list[Path]:
        return [gone, dead]

    monkeypatch.setattr(Path, "glob", glob)
    assert registry.living() == []
    assert registry.clean() == [dead.stem]


def test_a_run_file_that_is_left_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = registry.directory() / f"tw{10**8}-old.hosts"
    before.write_text("")
    monkeypatch.setattr(kills, "machine", dict)
    monkeypatch.setattr(kills, "namespaces", list)
    monkeypatch.setattr(kills, "one_kill", lambda mark, number, wait: None)
    kills.main(runs=1)  # files from before the run do not count
    monkeypatch.setattr(kills, "one_kill", lambda mark, number, wait: before.write_text(""))
    with pytest.raises(typer.Exit) as caught:
        kills.main(runs=1)
    assert caught.value.exit_code == 1


def test_the_lab_imports_nothing_else_of_thinwire() -> None:
    assert thinwire.tools.lab.__file__ is not None
    for path in Path(thinwire.tools.lab.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not name.startswith("torch"), path
                if name.split(".")[0] == "thinwire":
                    assert name == "thinwire.errors" or name.startswith("thinwire.tools.lab"), path
