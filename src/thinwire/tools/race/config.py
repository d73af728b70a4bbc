"""Settings of `thinwire train` and `thinwire serve`, from a TOML file and from options, which override the file.

A settings class declares every key once: its table, type, default and the comment that `--print-config` writes.
"""

import sys
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import typer

from thinwire.tools.options import typed

Config = TypeVar("Config", bound="RunConfig")
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path, as a text"}


def _key(table: str, comment: str, *, example: Any = None, least: float | None = None) -> dict[str, Any]:
    """Describe a key; one whose default is None is printed as a comment with `example` for its value."""
    return {"table": table, "comment": comment, "example": example, "least": least}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys that training and serving share."""

    workers: int = field(default=4, metadata=_key("training", "Number of workers: training processes.", least=1))
    method: str = field(
        default="topk1",
        metadata=_key("training", "How gradients are averaged: dense, fp16, a preset, or a density such as 0.01."),
    )
    batch: int | None = field(
        default=None,
        metadata=_key("training", "Samples per worker and step. Default: the recipe's.", example=8, least=1),
    )
    lr: float | None = field(
        default=None, metadata=_key("training", "Learning rate. Default: the recipe's.", example=0.01)
    )
    target: float | None = field(
        default=None,
        metadata=_key("training", "Training stops when the metric on the test split reaches this value.", example=0.97),
    )
    max_steps: int | None = field(
        default=None, metadata=_key("training", "Training stops after this number of steps.", example=1000, least=1)
    )
    epochs: float | None = field(
        default=None,
        metadata=_key(
            "training", "Training stops after so many passes over the data, unless max_steps is set.", example=10.0
        ),
    )
    evaluate_every: int | None = field(
        default=None,
        metadata=_key("training", "Steps between evaluations. Default: a quarter of an epoch.", example=50, least=1),
    )
    seed: int = field(default=0, metadata=_key("training", "Seed of the weights and of the data order."))
    data: Path | None = field(
        default=None, metadata=_key("training", "Folder with the recipe's files.", example="data")
    )
    checkpoint: Path | None = field(
        default=None, metadata=_key("training", "Folder for checkpoints.", example="checkpoints")
    )

    mode: str = field(
        default="bsp", metadata=_key("server", "Synchronisation: bsp (every step), ssp (bounded staleness) or async.")
    )
    bound: int = field(
        default=3,
        metadata=_key("server", "With ssp: steps that the fastest worker may be ahead of the slowest.", least=0),
    )
    pull_method: str | None = field(
        default=None,
        metadata=_key("server", "How the server compresses what it sends back. Default: as method.", example="topk1"),
    )
    reduce: str = field(
        default="mean", metadata=_key("server", "The server applies the mean or the sum of the workers' gradients.")
    )
    policy: str = field(
        default="forward", metadata=_key("server", "Order of requests on a link: fifo, filo, stalest or forward.")
    )

    transport: str = field(
        default="tcp", metadata=_key("network", "Transport between workers and server: tcp, udp, or mpi under mpirun.")
    )
    on_loss: str = field(
        default="restore",
        metadata=_key("network", "With udp: restore lost gradient entries to the residual, or ignore them."),
    )
    mtu: int | None = field(default=None, metadata=_key("network", "With udp: bytes of a packet.", example=1400))

    events: Path | None = field(
        default=None, metadata=_key("output", "Event log. Default: a file in the folder runs.", example="run.jsonl")
    )

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
        changed = [
            item.name for item in fields(self) if item.name in names and getattr(self, item.name) != item.default
        ]
        if changed:
            raise ValueError(f"{' and '.join(changed)} would have no effect: {why}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The settings of `thinwire train`."""

    server: bool = field(default=False, metadata=_key("training", "Train with a parameter server, on one host more."))
    resume: bool = field(
        default=False, metadata=_key("training", "Continue from the newest checkpoint in the checkpoint folder.")
    )
    diagnose: int = field(
        default=0, metadata=_key("training", "Steps between two diagnoses of the compression; 0 makes none.", least=0)
    )
    rate: str | None = _key(
        "network",
        None,
        "Emulate hosts whose links have this rate. Default: processes on this machine.",
        example="100mbit",
    )
    loss: str | None = field(
        default=None,
        metadata=_key("network", "With rate and server: share of packets that every link loses.", example="1%"),
    )
    tensorboard: Path | None = field(
        default=None, metadata=_key("output", "Folder for the same figures as TensorBoard scalars.", example="board")
    )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(RunConfig):
    """The settings of `thinwire serve`."""

    workers: int = field(
        default=1, metadata=_key("training", "Number of workers that training waits for before it begins.", least=1)
    )
    port: int = field(default=7077, metadata=_key("server", "Port to listen on; 0 takes any that is free.", least=0))
    bind: str = field(
        default="127.0.0.1", metadata=_key("server", "Address to listen on; one beyond loopback needs keys.")
    )
    keys: Path | None = field(
        default=None, metadata=_key("server", "Folder made by `thinwire keys new`.", example="keys")
    )
    insecure: bool = field(default=False, metadata=_key("server", "Listen beyond loopback without keys."))
    timeout: float = field(
        default=10.0, metadata=_key("server", "Seconds without a heartbeat after which a worker is evicted.", least=0.5)
    )
    save_every: int = field(default=100, metadata=_key("server", "Steps between checkpoints.", least=1))
    metrics: int | None = field(
        default=None, metadata=_key("output", "Port for Prometheus metrics, on loopback.", example=9090, least=1)
    )


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
    hints = get_type_hints(kind)
    known: dict[str, dict[str, Field[Any]]] = {}
    for item in fields(kind):
        known.setdefault(item.metadata["table"], {})[item.name] = item
    found: dict[str, Any] = {}
    for table, values in tables.items():
        if table not in known or not isinstance(values, dict):
            raise ValueError(f"{path} has no use for {table!r}: its tables are {', '.join(f'[{t}]' for t in known)}")
        for name, value in values.items():
            if name not in known[table]:
                raise ValueError(f"{path}: [{table}] has no key {name!r}; its keys are {', '.join(known[table])}")
            found[name] = _checked(value, hints[name], known[table][name], f"{path}: [{table}] {name}")
    return found


def _checked(value: Any, hint: Any, item: Field[Any], where: str) -> Any:
    """Return a value from the file as the key's type; ValueError names the key."""
    kind, least = _kind(hint), item.metadata["least"]
    accepted = {Path: (str,), float: (int, float)}.get(kind, (kind,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} must be {_KINDS[kind]}, not {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{where} must be at least {least:g}, not {value}")
    return _converted(value, hint)


def _kind(hint: Any) -> Any:
    """Return the type of a key that may also be None."""
    return next((kind for kind in get_args(hint) if kind is not NoneType), hint)


def _converted(value: Any, hint: Any) -> Any:
    return None if value is None else _kind(hint)(value)


def config_text(kind: type[RunConfig], command: str) -> str:
    """Return a configuration file with every key at its default and a comment above each."""
    lines = [
        f"# Settings of `{command}`. Use it with `{command} RECIPE --config FILE`; options override it.",
        "# A key without a default is commented out and shows an example.",
    ]
    for table in dict.fromkeys(item.metadata["table"] for item in fields(kind)):
        lines += ["", f"[{table}]"]
        for item in fields(kind):
            if item.metadata["table"] == table:
                given = item.default is not None
                value = _toml(item.default if given else item.metadata["example"])
                lines += [f"# {item.metadata['comment']}", f"{'' if given else '# '}{item.name} = {value}"]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str | Path) else repr(value)


def printer(kind: type[RunConfig], command: str) -> Any:
    """Return the callback of `--print-config`, which prints the file and ends the command."""

    def show(asked: bool) -> None:
        if asked:
            typer.echo(config_text(kind, command))
            raise typer.Exit

    return show
