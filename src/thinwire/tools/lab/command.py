"""The command `thinwire lab`: run a program on emulated hosts, check what this machine supports, or clean up."""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from thinwire.tools.lab import check, registry
from thinwire.tools.lab.lab import Lab
from thinwire.tools.lab.launching import RunResult
from thinwire.tools.lab.links import DelayCost, LinkSettings, delay_json, delay_note, parse_hosts
from thinwire.tools.lab.presets import PRESETS, find_preset

_STDOUT = Path("-")


def lab_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="The command, after --. A leading `python` or `python3` is the Python that thinwire is installed in.",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of emulated hosts.")] = 2,
    preset: Annotated[str | None, typer.Option(help=f"Network: {', '.join(PRESETS)}; options override it.")] = None,
    rate: Annotated[str | None, typer.Option(help="Rate of every link in tc's notation: 100mbit, 1gbit.")] = None,
    asymmetric: Annotated[str | None, typer.Option(help="Rates UP/DOWN in place of --rate: 20mbit/100mbit.")] = None,
    host_rate: Annotated[list[str] | None, typer.Option(help="Rate of one host: 3=50mbit; may be repeated.")] = None,
    loss: Annotated[str | None, typer.Option(help="Share of packets lost between any two hosts: 1%.")] = None,
    delay: Annotated[str | None, typer.Option(help="One-way delay between any two hosts: 25ms.")] = None,
    host_delay: Annotated[list[str] | None, typer.Option(help="Delay of one host: 3=80ms; may be repeated.")] = None,
    per_host: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 1,
    torchrun: Annotated[bool, typer.Option("--torchrun", help="Start torchrun on every host.")] = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="Stop after this many seconds (exit code 124).")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write time and traffic per host as JSON; - is stdout."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no summary to stderr.")] = False,
    check_only: Annotated[bool, typer.Option("--check", help="Show what this machine supports, and exit.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what killed labs left behind, and exit.")] = False,
) -> int:
    """Run a command on emulated hosts: thinwire lab --hosts 4 --rate 100mbit -- python train.py."""
    if json_file is not None and (json_file.is_dir() or not os.access(json_file.absolute().parent, os.W_OK)):
        raise ValueError(f"--json {json_file} cannot be written, because it is a directory or its folder is read-only")
    if check_only or clean:
        if command or (check_only and clean):
            raise ValueError("--check and --clean take no command: give only one of them")
        return _check(json_file) if check_only else _clean()
    if asymmetric is not None and (rate is not None or "/" not in asymmetric):
        raise ValueError("--asymmetric takes UP/DOWN, such as 20mbit/100mbit, and replaces --rate")
    links = _links(preset, asymmetric or rate, delay, loss, host_delay)
    lab = links.lab(hosts, host_rates=parse_hosts(host_rate, "--host-rate", "3=50mbit"))
    words = _runnable(command)
    if torchrun:
        words, per_host = _torchrun(words, lab, per_host), 1
    result, up, cost = _run(lab, words, per_host, timeout, sys.stderr if json_file == _STDOUT else sys.stdout)
    figures = _figures(lab, command or [], result, up)
    _write_json(json_file, {**figures, "host_delays": dict(links.host_delays), "delay_line": delay_json(cost)})
    if not quiet:
        _summary(result, up, delay_note(links, cost))
    if result.failure:
        print(f"thinwire lab: {result.failure}.", file=sys.stderr)
    return result.exit_code


def _links(
    preset: str | None, rate: str | None, delay: str | None, loss: str | None, host_delay: list[str] | None
) -> LinkSettings:
    """Return the settings of the links: what was typed, else the preset's figures."""
    if preset is not None:
        chosen = find_preset(preset)
        rate, delay, loss = rate or chosen.rate, delay or chosen.delay, loss or chosen.loss
    single = parse_hosts(host_delay, "--host-delay", "3=80ms")
    return LinkSettings(rate, delay, loss, tuple(single.items()))


def _run(
    lab: Lab, words: list[str], ranks: int, timeout: float | None, stream: TextIO
) -> tuple[RunResult, float, DelayCost | None]:
    """Run the command on all hosts, print its lines to a stream; return the result, the set-up time and the delay's."""

    def show(host: int, line: str) -> None:
        encoding = stream.encoding or "utf-8"
        try:  # a character that the stream cannot encode must not end the run
            print(f"[h{host}] {line}".encode(encoding, "replace").decode(encoding), file=stream, flush=True)
        except BrokenPipeError:  # the reader of the output has ended, as after `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    began, before = time.monotonic(), signal.signal(signal.SIGTERM, end)
    try:
        with lab:
            up = time.monotonic() - began
            result = lab.run(words, per_host=ranks, timeout=timeout, output=show)
            return result, up, DelayCost.of(lab.delay_figures())
    finally:
        signal.signal(signal.SIGTERM, before)


def _runnable(command: list[str] | None) -> list[str]:
    """Check the command; `python` becomes the running interpreter, which has thinwire installed."""
    if not command:
        raise ValueError("there is no command; write it after --: thinwire lab --hosts 4 -- python train.py")
    if not command[0].endswith(".py") and command[0] not in ("python", "python3") and shutil.which(command[0]) is None:
        raise ValueError(f"the command '{command[0]}' is not found")
    return [sys.executable, *command[1:]] if command[0] in ("python", "python3") else command


def _torchrun(command: list[str], lab: Lab, per_host: int) -> list[str]:
    """Return the command line of torchrun; a leading Python interpreter in the command runs torchrun itself."""
    first, *rest = command
    if os.path.basename(first).startswith("python"):
        python, script = first, rest
    else:
        python, script = sys.executable, command if first.endswith(".py") else ["--no-python", *command]
    words = [python, "-m", "torch.distributed.run", f"--nnodes={lab.hosts}", f"--nproc-per-node={per_host}"]
    return [*words, "--rdzv-backend=c10d", f"--rdzv-endpoint={lab.address(0)}:29400", "--rdzv-id=lab", *script]


def _figures(lab: Lab, command: list[str], result: RunResult, up: float) -> dict[str, Any]:
    return {
        "command": command,
        "hosts": lab.hosts,
        "rate": str(lab.rate),
        "loss": lab.loss,
        "delay_seconds": lab.delay,
        "exit_code": result.exit_code,
        "failure": result.failure,
        "setup_seconds": up,
        "wall_seconds": result.wall,
        "per_host": [
            {
                "host": each.host,
                "rate": str(lab.rates[each.host]),
                "exit_code": each.code,
                "wall_seconds": each.wall,
                "cpu_seconds": each.cpu,
                **asdict(each.traffic),
            }
            for each in result.hosts
        ],
    }


def _summary(result: RunResult, up: float, note: str) -> None:
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for column in ("host", "exit", "wall s", "cpu s", "MB out", "MB in", "packets out", "packets in"):
        table.add_column(column, justify="left" if column == "host" else "right")
    for each in result.hosts:
        figures = [f"{each.wall:.2f}", f"{each.cpu:.2f}"]
        figures += [f"{count / 1e6:.3f}" for count in (each.traffic.sent_bytes, each.traffic.received_bytes)]
        figures += [str(each.traffic.sent_packets), str(each.traffic.received_packets)]
        table.add_row(f"h{each.host}", str(each.code), *figures)
    console = Console(stderr=True)
    console.print(table)
    console.print(f"{len(result.hosts)} hosts: set up in {up:.2f} s, ran for {result.wall:.2f} s", highlight=False)
    if note:
        console.print(f"{note}.", highlight=False)


def _check(json_file: Path | None) -> int:
    abilities = check.check()
    table = Table("feature", "works", "detail", box=SIMPLE, pad_edge=False)
    for ability in abilities:
        state = "yes" if ability.works else "NO" if ability.required else "no (optional)"
        table.add_row(ability.name, state, ability.detail)
    ready = check.ready(abilities)
    console = Console(stderr=json_file == _STDOUT)
    console.print(table)
    console.print("A lab with a rate can be built here." if ready else "A lab cannot be built here.", highlight=False)
    _write_json(json_file, [asdict(ability) for ability in abilities])
    return 0 if ready else 1


def _write_json(path: Path | None, figures: Any) -> None:
    text = json.dumps(figures, indent=1) + "\n"
    if path == _STDOUT:
        sys.stdout.write(text)
    elif path is not None:
        path.write_text(text)


def _clean() -> int:
    removed = registry.clean()
    for name in removed:
        print(f"removed {name}")
    kept = f"; still running: {', '.join(living)}" if (living := registry.living()) else ""
    print(f"{len(removed)} dead labs removed{kept}.")
    return 0
