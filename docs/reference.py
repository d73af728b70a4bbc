"""Writes docs/cli.md from the commands themselves: `python docs/reference.py`; a test fails when it is out of date."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from thinwire.tools.cli import app

PAGE = Path(__file__).parent / "cli.md"
HEAD = """# Command line

The command `thinwire` comes with the extra `tools`. This page is generated from its help by
`python docs/reference.py`; do not edit it by hand.

The same thing has one name in all commands:

- `--workers` is the number of training processes. `lab` counts `--hosts`, because it runs any command.
- `--rate` is the rate of every link: `100mbit`, `1gbit`, or `20mbit/100mbit` for up and down.
- `--delay` is the one-way delay between any two workers: `5ms`; races and benchmarks take several: `0,10ms,25ms`.
  `--host-delay 3=80ms` is the delay of one host.
- `--preset` is a [network preset](guides/lab.md#network-presets): it sets rate, delay and loss; options override it.
- `--method` and `--methods` are ways to average gradients: `dense`, `fp16`, a [preset](settings.md#presets),
  a density, or `auto`.
- `--json PATH` writes figures; `-` is stdout. `--report PATH` writes an HTML page.
"""
TAIL = """
## Configuration files

`train` and `serve` read what is seldom changed from a TOML file. `--print-config` writes one with all keys, their
defaults and a comment for each; options override the file:

    thinwire train --print-config > run.toml
    thinwire train digits --config run.toml --workers 8

## Exit codes

| code | meaning |
|---:|---|
| 0 | success |
| 1 | a run failed, or a benchmark missed a bar |
| 2 | wrong options or arguments |
| 124 | `lab --timeout` expired |
| 130 | interrupted by Ctrl-C |
"""
EXAMPLES = {
    "race": "thinwire race digits --workers 4 --rate 100mbit --methods dense,fp16,topk1 --report race.html",
    "advise": "thinwire advise digits --workers 8 --rate 100mbit",
    "lab": "thinwire lab --hosts 4 --rate 100mbit -- python train.py",
    "train": "thinwire train digits --workers 4 --method topk1 --rate 100mbit --target 0.97",
    "serve": "thinwire serve digits --workers 2",
    "work": "thinwire work digits --server tcp://127.0.0.1:7077",
    "report": "thinwire report runs/*.jsonl -o page.html",
    "reproduce": "thinwire reproduce request-scheduling --scale small --out DIR",
    "keys new": "thinwire keys new keys --name gpu-1 --name gpu-2",
}
GUIDES = {
    "race": "guides/races.md",
    "advise": "guides/tuning.md#thinwire-advise",
    "lab": "guides/lab.md",
    "train": "guides/races.md#train",
    "serve": "guides/parameter-server.md",
    "work": "guides/parameter-server.md",
    "report": "events.md#the-report",
    "recipes": "guides/recipes.md",
    "reproduce": "reproduce.md",
    "simulate": "guides/tuning.md#thinwire-simulate-scale",
    "simulate schedule": "guides/scheduling.md#the-simulator",
    "bench": "performance.md",
    "keys": "guides/transports.md#keys",
}


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def default_of(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or value == "" or callable(value) or parameter.required or parameter.nargs == -1:
        return ""
    return "on" if value is True else f"`{value}`"


def rows(command: Any) -> Iterator[str]:
    """Return one row of the table for each argument and option."""
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        if not names[0].startswith("-"):
            names = [names[0].upper()]
        text = cell(getattr(parameter, "help", None) or "")
        yield f"| {', '.join(f'`{name}`' for name in names)} | {text} | {default_of(parameter)} |"


def section(command: Any, path: str, level: int) -> Iterator[str]:
    """Return the section of a command and of the commands inside it."""
    yield f"\n{'#' * level} thinwire {path}\n"
    yield " ".join((command.help or "").split("\f")[0].split())
    if path in GUIDES:
        title = (PAGE.parent / GUIDES[path].split("#")[0]).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        yield f"\nSee [{title}]({GUIDES[path]})."
    if path in EXAMPLES:
        yield f"\n    {EXAMPLES[path]}"
    inner = getattr(command, "commands", {})
    table = [] if inner else list(rows(command))
    if table:
        yield "\n| argument or option | meaning | default |\n|---|---|---|"
        yield from table
    for name, sub in inner.items():
        if not sub.hidden:
            yield from section(sub, f"{path} {name}", level + 1)


def document() -> str:
    """Return the text of docs/cli.md."""
    lines = [HEAD.rstrip()]
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if not command.hidden:
            lines += section(command, name, 2)
    return "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
