"""Settings of `thinwire train` and `thinwire serve`, from a TOML file and from options, which override the file."""

# ruff: noqa: RUF009 (the calls in the defaults of the classes make dataclass fields)

import sys
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

import typer

from thinwire.tools.lab.links import LinkSettings, parse_hosts
from thinwire.tools.lab.presets import PRESETS, find_preset
from thinwire.tools.options import typed

Config = TypeVar("Config", bound="RunConfig")
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path, as a text"}
TABLES = ("training", "server", "network", "output")  # of the configuration file


def _setting(table: str, default: Any, comment: str, example: Any = None, least: float | None = None) -> Any:
    """Return a field with what the file says of it; the example is shown where the default is None."""
    return field(default=default, metadata={"table": table, "comment": comment, "example": example, "least": least})


_train, _server, _network, _output = (partial(_setting, table) for table in TABLES)


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """The settings of emulated links."""

    preset: str | None = _network(None, f"Emulate a kind of network: {', '.join(PRESETS)}.", "wan")
    rate: str | None = _network(None, "Emulate hosts whose links have this rate. Default: local processes.", "100mbit")
    delay: str | None = _network(None, "Emulate hosts with this one-way delay between any two of them.", "25ms")
    host_delay: str | None = _network(None, "Delays of single hosts, comma-separated.", "3=80ms")
    loss: str | None = _network(None, "Emulate links that lose this share of packets.", "1%")

    def links(self) -> LinkSettings:
        """Return the settings of the emulated links: each as it was given, else the preset's."""
        figures = {name: getattr(self, name) for name in ("rate", "delay", "loss")}
        if self.preset is not None:
            chosen = find_preset(self.preset)
            figures = {name: getattr(chosen, name) if given is None else given for name, given in figures.items()}
        figures["rate"] = None if figures["rate"] == "none" else figures["rate"]
        single = parse_hosts([self.host_delay] if self.host_delay else [], "--host-delay", "3=80ms")
        return LinkSettings(**figures, host_delays=tuple(single.items()))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings that training and serving share."""

    workers: int = _train(4, "Number of workers. A server waits for them before training begins.", least=1)
    method: str = _train("topk1", "How gradients are averaged: dense, fp16, a preset, or a density such as 0.01.")
    batch: int | None = _train(None, "Samples per worker and step. Default: the recipe's.", 8, 1)
    lr: float | None = _train(None, "Learning rate. Default: the recipe's.", 0.01)
    target: float | None = _train(
        None, "Stop when the metric on the test split reaches it. Default: the recipe's.", 0.97
    )
    max_steps: int | None = _train(None, "Stop after this number of steps. Default: epochs.", 1000, 1)
    epochs: float | None = _train(None, "Stop after this number of passes over the data. Default: the recipe's.", 10.0)
    evaluate_every: int | None = _train(None, "Steps between evaluations. Default: a quarter of an epoch.", 50, 1)
    seed: int = _train(0, "Seed of the weights and of the data order.")
    data: Path | None = _train(None, "Folder with the recipe's files.", "data")
    checkpoint: Path | None = _train(None, "Folder for checkpoints.", "checkpoints")
    mode: str = _server("bsp", "Synchronisation: bsp (every step), ssp (bounded staleness) or async.")
    bound: int = _server(3, "With ssp: steps that the fastest worker may be ahead of the slowest.", least=0)
    pull_method: str | None = _server(
        None, "How the server compresses what it sends back. Default: as method.", "topk1"
    )
    reduce: str = _server("mean", "The server applies the mean or the sum of the workers' gradients.")
    policy: str = _server("forward", "Order of the requests on a link: fifo, filo, stalest or forward.")
    transport: str = _network("tcp", "Transport between workers and server: tcp, udp, or mpi under mpirun.")
    on_loss: str = _network("restore", "With udp: restore lost gradient entries to the residual, or ignore them.")
    mtu: int | None = _network(None, "With udp: bytes of a packet.", 1400)
    events: Path | None = _output(None, "Event log. Default: a file in the folder runs.", "run.jsonl")

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
class TrainConfig(RunConfig, LabConfig):
    """The settings of `thinwire train`."""

    resume: bool = _train(False, "Continue from the newest checkpoint in that folder.")
    server: bool = _train(False, "Train with a parameter server, on one host more.")
    diagnose: int = _train(0, "Steps between two diagnoses of the compression; 0 makes none.", least=0)
    tensorboard: Path | None = _output(None, "Folder for the same figures as TensorBoard scalars.", "board")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(RunConfig):
    """The settings of `thinwire serve`."""

    workers: int = _train(1, "Number of workers. A server waits for them before training begins.", least=1)
    port: int = _server(7077, "Port to listen on; 0 takes any that is free.", least=0)
    bind: str = _server("127.0.0.1", "Address to listen on; one beyond loopback needs keys.")
    keys: Path | None = _server(None, "Folder made by thinwire keys new.", "keys")
    insecure: bool = _server(False, "Listen beyond loopback without keys.")
    timeout: float = _server(10.0, "Seconds without a heartbeat after which a worker is evicted.", least=0.5)
    save_every: int = _server(100, "Steps between checkpoints.", least=1)
    metrics: int | None = _output(None, "Port for Prometheus metrics, on loopback.", 9090, 1)


def load_config(kind: type[Config], path: Path | None, context: typer.Context) -> Config:
    """Return the settings: defaults, then the file's, then the options that were typed."""
    found = _read(kind, path) if path is not None else {}
    for name in typed(context, [item.name for item in fields(kind)]):
        value = context.params[name]
        found[name] = ",".join(value) if isinstance(value, list) else value  # a list is of repeated options
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
    known = _tables(kind)
    found: dict[str, Any] = {}
    for table, values in tables.items():
        if table not in known or not isinstance(values, dict):
            raise ValueError(f"{path} has no use for {table!r}: its tables are {', '.join(f'[{t}]' for t in known)}")
        for name, value in values.items():
            if name not in known[table]:
                raise ValueError(f"{path}: [{table}] has no key {name!r}; its keys are {', '.join(known[table])}")
            found[name] = _checked(value, known[table][name], f"{path}: [{table}] {name}")
    return found


def _tables(kind: type[RunConfig]) -> dict[str, dict[str, Field[Any]]]:
    return {t: {item.name: item for item in fields(kind) if item.metadata["table"] == t} for t in TABLES}


def _checked(value: Any, item: Field[Any], where: str) -> Any:
    """Return a value from the file as the setting's type; ValueError names the key."""
    kind: Any = next((kind for kind in get_args(item.type) if kind is not NoneType), item.type)
    accepted = {Path: (str,), float: (int, float)}.get(kind, (kind,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} must be {_KINDS[kind]}, not {value!r}")
    least = item.metadata["least"]
    if least is not None and value < least:
        raise ValueError(f"{where} must be at least {least:g}, not {value}")
    return kind(value)


def config_text(kind: type[RunConfig], command: str) -> str:
    """Return a configuration file with every key at its default and a comment above each."""
    lines = [
        f"# Settings of `{command}`. Use it with `{command} RECIPE --config FILE`; options override it.",
        "# A key without a default is commented out and shows an example.",
    ]
    for table, items in _tables(kind).items():
        lines += ["", f"[{table}]"]
        for name, item in items.items():
            unset = item.default is None
            written = f"{name} = {_toml(item.metadata['example'] if unset else item.default)}"
            lines += [f"# {item.metadata['comment']}", f"# {written}" if unset else written]
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
