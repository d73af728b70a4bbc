"""Settings of `thinwire train` and `thinwire serve`, from a TOML file and from options, which override the file.

The settings classes hold types and defaults; KEYS holds what `--print-config` writes about each setting.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import typer

from thinwire.tools.options import typed

Config = TypeVar("Config", bound="RunConfig")
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path, as a text"}


@dataclass(frozen=True)
class Key:
    """What the configuration file says of a setting; the example is shown where the default is None."""

    table: str
    comment: str
    example: Any = None
    least: float | None = None


KEYS = {
    "workers": Key("training", "Number of workers. A server waits for them before training begins.", least=1),
    "method": Key("training", "How gradients are averaged: dense, fp16, a preset, or a density such as 0.01."),
    "batch": Key("training", "Samples per worker and step. Default: the recipe's.", 8, 1),
    "lr": Key("training", "Learning rate. Default: the recipe's.", 0.01),
    "target": Key("training", "Stop when the metric on the test split reaches it. Default: the recipe's.", 0.97),
    "max_steps": Key("training", "Stop after this number of steps. Default: epochs.", 1000, 1),
    "epochs": Key("training", "Stop after this number of passes over the data. Default: the recipe's.", 10.0),
    "evaluate_every": Key("training", "Steps between evaluations. Default: a quarter of an epoch.", 50, 1),
    "seed": Key("training", "Seed of the weights and of the data order."),
    "data": Key("training", "Folder with the recipe's files.", "data"),
    "checkpoint": Key("training", "Folder for checkpoints.", "checkpoints"),
    "resume": Key("training", "Continue from the newest checkpoint in that folder."),
    "server": Key("training", "Train with a parameter server, on one host more."),
    "diagnose": Key("training", "Steps between two diagnoses of the compression; 0 makes none.", least=0),
    "mode": Key("server", "Synchronisation: bsp (every step), ssp (bounded staleness) or async."),
    "bound": Key("server", "With ssp: steps that the fastest worker may be ahead of the slowest.", least=0),
    "pull_method": Key("server", "How the server compresses what it sends back. Default: as method.", "topk1"),
    "reduce": Key("server", "The server applies the mean or the sum of the workers' gradients."),
    "policy": Key("server", "Order of the requests on a link: fifo, filo, stalest or forward."),
    "port": Key("server", "Port to listen on; 0 takes any that is free.", least=0),
    "bind": Key("server", "Address to listen on; one beyond loopback needs keys."),
    "keys": Key("server", "Folder made by thinwire keys new.", "keys"),
    "insecure": Key("server", "Listen beyond loopback without keys."),
    "timeout": Key("server", "Seconds without a heartbeat after which a worker is evicted.", least=0.5),
    "save_every": Key("server", "Steps between checkpoints.", least=1),
    "rate": Key("network", "Emulate hosts whose links have this rate. Default: local processes.", "100mbit"),
    "loss": Key("network", "With rate and server: the share of packets that every link loses.", "1%"),
    "transport": Key("network", "Transport between workers and server: tcp, udp, or mpi under mpirun."),
    "on_loss": Key("network", "With udp: restore lost gradient entries to the residual, or ignore them."),
    "mtu": Key("network", "With udp: bytes of a packet.", 1400),
    "events": Key("output", "Event log. Default: a file in the folder runs.", "run.jsonl"),
    "tensorboard": Key("output", "Folder for the same figures as TensorBoard scalars.", "board"),
    "metrics": Key("output", "Port for Prometheus metrics, on loopback.", 9090, 1),
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings that training and serving share."""

    workers: int = 4
    method: str = "topk1"
    batch: int | None = None
    lr: float | None = None
    target: float | None = None
    max_steps: int | None = None
    epochs: float | None = None
    evaluate_every: int | None = None
    seed: int = 0
    data: Path | None = None
    checkpoint: Path | None = None
    mode: str = "bsp"
    bound: int = 3
    pull_method: str | None = None
    reduce: str = "mean"
    policy: str = "forward"
    transport: str = "tcp"
    on_loss: str = "restore"
    mtu: int | None = None
    events: Path | None = None

    def plan_options(self) -> dict[str, Any]:
        """Return the settings that `make_plan` takes."""
        names = ("data", "batch", "lr", "target", "max_steps", "epochs", "evaluate_every", "checkpoint")
        return {name: getattr(self, name) for name in names}

    def server_options(self) -> dict[str, Any]:
        """Return the settings that `ServerSettings` takes."""
        names = ("workers", "seed", "method", "mode", "bound", "reduce", "policy", "transport", "on_loss", "mtu")
        pull = self.method if self.pull_method is None else self.pull_method
        return {**{name: getattr(self, name) for name in names}, "pull_method": pull}

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        """Raise ValueError if any of these settings differs from its default, because it would have no effect."""
        given = [item for item in fields(self) if item.name in names]
        changed = [item.name for item in given if getattr(self, item.name) != item.default]
        if changed:
            raise ValueError(f"{' and '.join(changed)} would have no effect: {why}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The settings of `thinwire train`."""

    server: bool = False
    resume: bool = False
    diagnose: int = 0
    rate: str | None = None
    loss: str | None = None
    tensorboard: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ServeConfig(RunConfig):
    """The settings of `thinwire serve`."""

    workers: int = 1
    port: int = 7077
    bind: str = "127.0.0.1"
    keys: Path | None = None
    insecure: bool = False
    timeout: float = 10.0
    save_every: int = 100
    metrics: int | None = None


def load_config(kind: type[Config], path: Path | None, context: typer.Context) -> Config:
    """Return the settings: defaults, then the file's, then the options that were typed."""
    found = _read(kind, path) if path is not None else {}
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind) if item.name in context.params]
    for name in typed(context, names):
        found[name] = _converted(context.params[name], hints[name])
    return kind(**found)


def _read(kind: type[RunConfig], path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read the configuration {path}: {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the configuration {path} is not TOML: {error}") from error
    hints, known = get_type_hints(kind), _tables(kind)
    found: dict[str, Any] = {}
    for table, values in tables.items():
        if table not in known or not isinstance(values, dict):
            raise ValueError(f"{path} has no use for {table!r}: its tables are {', '.join(f'[{t}]' for t in known)}")
        for name, value in values.items():
            if name not in known[table]:
                raise ValueError(f"{path}: [{table}] has no key {name!r}; its keys are {', '.join(known[table])}")
            found[name] = _checked(value, hints[name], KEYS[name].least, f"{path}: [{table}] {name}")
    return found


def _tables(kind: type[RunConfig]) -> dict[str, list[str]]:
    """Return the names of a command's settings by table, in the order of KEYS."""
    names = {item.name for item in fields(kind)}
    found: dict[str, list[str]] = {}
    for name, key in KEYS.items():
        if name in names:
            found.setdefault(key.table, []).append(name)
    return found


def _checked(value: Any, hint: Any, least: float | None, where: str) -> Any:
    """Return a value from the file as the setting's type; ValueError names the key."""
    kind = _kind(hint)
    accepted = {Path: (str,), float: (int, float)}.get(kind, (kind,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} must be {_KINDS[kind]}, not {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{where} must be at least {least:g}, not {value}")
    return _converted(value, hint)


def _kind(hint: Any) -> Any:
    """Return the type of a setting that may also be None."""
    return next((kind for kind in get_args(hint) if kind is not NoneType), hint)


def _converted(value: Any, hint: Any) -> Any:
    return None if value is None else _kind(hint)(value)


def config_text(kind: type[RunConfig], command: str) -> str:
    """Return a configuration file with every key at its default and a comment above each."""
    lines = [
        f"# Settings of `{command}`. Use it with `{command} RECIPE --config FILE`; options override it.",
        "# A key without a default is commented out and shows an example.",
    ]
    defaults = kind()
    for table, names in _tables(kind).items():
        lines += ["", f"[{table}]"]
        for name in names:
            value, key = getattr(defaults, name), KEYS[name]
            written = f"# {name} = {_toml(key.example)}" if value is None else f"{name} = {_toml(value)}"
            lines += [f"# {key.comment}", written]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str | Path) else repr(value)


def print_option(kind: type[RunConfig], command: str) -> Any:
    """Return the option `--print-config`, which prints the file and ends the command."""

    def show(asked: bool) -> None:
        if asked:
            typer.echo(config_text(kind, command))
            raise typer.Exit

    text = "Print a configuration file with all defaults, and exit."
    return typer.Option("--print-config", is_eager=True, callback=show, help=text)
