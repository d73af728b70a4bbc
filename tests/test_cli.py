"""The installed command: version, help and its options; a user's mistake is one sentence and exit code 2."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

from thinwire.tools import cli

# Every command with its arguments and options. Change this list on purpose only: people have them in scripts.
OPTIONS = {
    "race": "RECIPE --workers --preset --rate --delay --host-delay --loss --methods --target --max-steps --seeds "
    "--batch --lr --evaluate-every --data --diagnose --logs --json --report --transport --on-loss --method",
    "advise": "RECIPE --workers --preset --rate --delay --probe --methods --batch --data --json --report",
    "lab": "COMMAND --hosts --preset --rate --asymmetric --host-rate --loss --delay --host-delay --per-host --torchrun "
    "--timeout --json --quiet --check --clean",
    "train": "RECIPE --workers --method --preset --rate --delay --host-delay --loss --target --max-steps --batch --lr "
    "--seed --data --checkpoint --resume --server --config --print-config",
    "serve": "RECIPE --port --bind --workers --method --mode --target --max-steps --checkpoint --keys --insecure "
    "--json --config --print-config",
    "work": "RECIPE --server --method --slot --data --keys --overlap --profile --patience",
    "report": "LOGS --output --title --json",
    "recipes": "--json",
    "simulate schedule": "--layers --workers --iterations --staleness --forward --backward --transfer --from --slices "
    "--policies --window --server-rate --delay --slow --versions --waits-for --json --report",
    "simulate scale": "--parameters --compute --density --bits --rate --delay --stragglers --rate-spread --per-machine "
    "--bus --exchanges --workers --measured --calibrate-up-to --cores --json --report",
    "bench codec": "--json --n --quick",
    "bench ddp": "--workers --preset --rate --delay --host-delay --loss --methods --buckets --batch --steps --rounds "
    "--warmup --json",
    "bench fsdp": "--machines --ranks --preset --rate --delay --host-delay --loss --methods --recipe --batch --steps "
    "--rounds --warmup --json",
    "bench local": "--workers --preset --rates --delay --only --methods --recipe --batch --base --seconds --slower "
    "--rounds --turns --json",
    "bench advice": "--workers --preset --rates --delay --methods --batch --steps --rounds --json",
    "bench server": "--workers --preset --rate --delay --host-delay --loss --only --steps --seconds --json",
    "bench udp": "--only --workers --preset --rate --delay --host-delay --loss --steps --seconds --fuzzed --json",
    "bench fidelity": "--folder --only --methods --jobs --data --json",
    "keys new": "FOLDER --name",
    "reproduce": "",
}
COMMAND = str(Path(sys.executable).parent / "thinwire")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"thinwire {metadata.version('thinwire')}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("bench", "--help"), ("bench", "codec", "--help")])
def test_help(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    # Without arguments a tool may tell its usage with either code; asked for help it must succeed.
    assert done.returncode == 0 if "--help" in arguments else done.returncode in (0, 2)
    assert "Usage" in done.stdout


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All commands of the application with their names, those of groups too."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
    for key, each in (inner or {}).items():
        yield from commands(each, f"{name} {key}".strip())


def test_the_options_are_the_frozen_ones() -> None:
    found = {}
    for name, command in commands(typer.main.get_command(cli.app)):
        shown = [p for p in command.params if p.name != "help"]
        words = [p.name.upper() if p.param_type_name == "argument" else max(p.opts, key=len) for p in shown]
        found[name] = " ".join(words)
    assert found == OPTIONS


def test_every_option_of_a_command_has_help() -> None:
    for name, command in commands(typer.main.get_command(cli.app)):
        assert all(p.help for p in command.params if p.name != "help"), name
        assert command.help, name


def test_help_shows_what_a_user_does_first() -> None:
    said = run("--help").stdout
    first, _, rest = said.partition("More commands")
    assert all(name in first for name in ("race", "advise", "lab", "train", "serve", "work"))
    assert all(f" {name} " in rest for name in ("report", "recipes", "simulate", "bench", "keys", "reproduce"))


def test_help_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, thinwire.tools.cli; print({'torch', 'numpy', 'plotly', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_json_on_stdout_is_all_of_stdout(tmp_path: Path) -> None:
    done = run("simulate", "schedule", "--workers", "2", "--iterations", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["unit"] == "seconds"
    assert "2 workers, 8 layers" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("--frobnicate",),
        ("bench", "frobnicate"),
        ("bench", "codec", "--frobnicate"),
        ("bench", "codec", "--n", "many"),
        ("bench", "codec", "--n", "0"),
        ("bench", "codec", "--json", "/nowhere/at/all.json"),
        ("race", "--json", "/nowhere/at/all.json"),
        ("race", "--report", "/nowhere/at/all.html"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("thinwire") and lines[0].endswith(".")
