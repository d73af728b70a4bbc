"""The event log: what happened in one training run, as lines of JSON; all reports are made from it.

Every record is one line and is written when it happens, so a run that dies leaves everything up to its last step.
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

from thinwire.errors import LogError
from thinwire.link.stats import Diagnosis as Diagnosis  # for those who read logs

FORMAT = 2  # of the records; logs of thinwire 0.1 have none
PHASES = ("compute", "compress", "exchange", "apply")
REASONS = ("target", "max_steps", "interrupted", "failed")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The first record: what was run, how and where."""

    event: ClassVar[str] = "run"
    command: str
    recipe: str
    method: str
    workers: int
    batch: int  # samples per worker and step
    parameters: int
    seed: int = 0
    rate: str = "none"  # of each worker's link: "100mbit", or "none" where nothing is shaped
    delay: str = ""  # one way, between any two emulated hosts: "25ms", or "25ms, h3 80ms"
    packet_loss: float = 0.0  # share of packets that the emulated links lose
    transport: str = ""  # to a parameter server; with udp also the setting on_loss
    metric: str = "accuracy"
    higher_is_better: bool = True  # of the metric; logs that do not say so have such a metric
    target: float = math.nan
    version: str = ""
    machine: str = ""
    date: str = ""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one rank; the four phases are in seconds, `step` counts from 1."""

    event: ClassVar[str] = "step"
    step: int
    epoch: float  # passes of the data done after this step
    wall: float  # seconds of training since its start, without evaluation
    compute: float
    compress: float
    exchange: float
    apply: float
    bytes_sent: int
    bytes_received: int
    loss: float
    density: float = 1.0  # share of the gradient's entries that were sent
    residual_norm: float = 0.0
    rank: int = 0
    # With a parameter server: the two parts of `exchange`; `waits` and `staleness` have a figure for each layer.
    synchronise: float = 0.0
    aggregate: float = 0.0
    # Over udp: datagrams sent, datagrams lost, and the sum of the magnitudes that returned to the residual for them.
    datagrams: int = 0
    datagrams_lost: int = 0
    restored: float = 0.0
    waits: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds that the step took."""
        return self.compute + self.compress + self.exchange + self.apply


@dataclass(frozen=True, kw_only=True)
class Eval:
    """The metric on the training or the test split after a step."""

    event: ClassVar[str] = "eval"
    step: int
    epoch: float
    wall: float
    split: str
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Magnitudes of a layer's gradient: counts[i] entries lie from edges[i] to edges[i + 1]."""

    event: ClassVar[str] = "histogram"
    step: int
    layer: str
    edges: list[float]
    counts: list[int]
    zeros: int = 0


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The run continued from a checkpoint at `step`: records of later steps that precede this one are void."""

    event: ClassVar[str] = "resume"
    step: int


@dataclass(frozen=True, kw_only=True)
class End:
    """The last record: why the run ended, and its totals (bytes of the ranks whose steps are in the log).

    Where the lab's delay line delayed packets: its share of one core, the 99th percentile of its lateness, and how many
    packets it passed on and dropped during the run.
    """

    event: ClassVar[str] = "end"
    reason: str
    steps: int
    wall: float
    bytes_sent: int
    bytes_received: int
    delay_line_share: float = math.nan
    delay_line_p99_late_ms: float = math.nan
    delay_line_packets: int = 0
    delay_line_dropped: int = 0


Event = Run | Step | Eval | Histogram | Diagnosis | Resume | End

_log = logging.getLogger("thinwire")

_KINDS: dict[str, type[Event]] = {kind.event: kind for kind in (Run, Step, Eval, Histogram, Diagnosis, Resume, End)}


@dataclass
class RunLog:
    """A log that was read, or is being written: the events of one run."""

    run: Run
    steps: list[Step] = field(default_factory=list)
    evals: list[Eval] = field(default_factory=list)
    histograms: list[Histogram] = field(default_factory=list)
    diagnoses: list[Diagnosis] = field(default_factory=list)
    end: End | None = None
    path: Path | None = None

    def add(self, event: Event) -> None:
        """Add one more event of this run."""
        if isinstance(event, End):
            self.end = event
        elif isinstance(event, Resume):
            self.end = None
            for events in self._by_kind().values():
                events[:] = [each for each in events if each.step <= event.step]
        elif not isinstance(event, Run):
            self._by_kind()[type(event)].append(event)

    def _by_kind(self) -> dict[type[Event], list[Any]]:
        return {Step: self.steps, Eval: self.evals, Histogram: self.histograms, Diagnosis: self.diagnoses}

    def totals(self, reason: str) -> End:
        """Return the end record of the steps so far."""
        return reduce(_with_step, self.steps, End(reason=reason, steps=0, wall=0.0, bytes_sent=0, bytes_received=0))


class EventLog:
    """Writes a log: a context manager with `write` for events and `end` for the reason of the end.

    An existing file is never overwritten: with `resume_at` the log continues from that step, else LogError is raised.
    With `keep=False` steps are written but not kept in `log`, because those of a long run may not fit in memory.
    """

    def __init__(
        self,
        path: Path | str,
        run: Run,
        *,
        resume_at: int | None = None,
        mirrors: Sequence[Callable[[Event], None]] = (),
        keep: bool = True,
    ) -> None:
        path = Path(path)
        self.path, self._mirrors, self._failed = path, tuple(mirrors), False
        self._sums: End | None = None
        exists = path.exists() and path.stat().st_size > 0
        if exists and resume_at is None:
            raise LogError(f"the log {path} exists already: remove it or choose another name.")
        self.log = read_log(path) if exists else RunLog(run, path=path)
        if exists and not (data := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)  # drops an incomplete last line
        first = Resume(step=resume_at) if exists and resume_at is not None else run
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1, encoding="utf-8")
            self._file.write(to_line(first) + "\n")
        except OSError as error:
            raise LogError(f"cannot write the log {path} ({error.strerror}): choose another place.") from error
        self._note(first)
        if not keep:
            self._sums = self.log.totals("interrupted")
            self.log.steps.clear()

    def write(self, event: Event) -> None:
        """Append one event and pass it to the mirrors; if the disk is full, say so once and continue."""
        try:
            self._file.write(to_line(event) + "\n")
        except OSError as error:
            if not self._failed:
                _log.warning("cannot write the log %s (%s): training goes on without it", self.path, error)
            self._failed = True
        self._note(event)

    def _note(self, event: Event) -> None:
        if self._sums is not None and isinstance(event, Step):
            self._sums = _with_step(self._sums, event)
        else:
            self.log.add(event)
        for mirror in self._mirrors:
            mirror(event)

    def end(self, reason: str, **delay_line: float) -> End:
        """Write the last record; the reason is `target`, `max_steps`, `interrupted` or `failed`.

        delay_line: the record's figures of the delay line, where one ran.
        """
        if reason not in REASONS:
            raise ValueError(f"the reason of the end must be one of {', '.join(REASONS)}, not {reason!r}.")
        end = self.log.totals(reason) if self._sums is None else replace(self._sums, reason=reason)
        end = replace(end, **delay_line)  # type: ignore[arg-type]
        self.write(end)
        return end

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.log.end is None:
            self.end("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")
        self.close()

    def close(self) -> None:
        """Close the file and the mirrors."""
        with contextlib.suppress(OSError):
            self._file.close()
        for mirror in self._mirrors:
            if callable(close := getattr(mirror, "close", None)):
                close()


def _with_step(sums: End, step: Step) -> End:
    return replace(
        sums,
        steps=max(sums.steps, step.step),
        wall=max(sums.wall, step.wall),
        bytes_sent=sums.bytes_sent + step.bytes_sent,
        bytes_received=sums.bytes_received + step.bytes_received,
    )


def to_line(event: Event) -> str:
    """Return an event as a line of JSON, without the newline."""
    # JSON has no NaN: a loss that diverged is written as null and read as NaN.
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(event).items()}
    return json.dumps({"event": event.event, **finite})


def read_log(path: Path) -> RunLog:
    """Read a log. An incomplete last line is left out; any other mistake raises LogError with the line's number."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise LogError(f"cannot read the log {path}: {error.strerror}.") from error
    lines = text.split("\n")
    log: RunLog | None = None
    for number, line in enumerate(lines, start=1):
        torn = number == len(lines)  # because every complete line ends with a newline
        if torn and not line:
            break
        try:
            event = from_line(line)
        except LogError as error:
            raise LogError(f"{path}: {error}.") from error
        except ValueError as error:
            if torn and log is not None:
                break
            raise LogError(f"{path}, line {number}: {error}; is this an event log of thinwire?") from error
        if log is None:
            if not isinstance(event, Run):
                raise LogError(f"{path}, line {number}: a log begins with a run record, not {event.event!r}.")
            log = RunLog(event, path=path)
        else:
            log.add(event)
    if log is None:
        raise LogError(f"the log {path} is empty: the run wrote nothing.")
    return log


def from_line(line: str) -> Event:
    """Return the event of a line; unknown keys are left out, so that older versions read newer logs."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from error
    kind = _KINDS.get(record.get("event", "")) if isinstance(record, dict) else None
    if kind is None:
        raise ValueError("not a record of a known event")
    if kind is Run and record.get("format") != FORMAT:
        version = record.get("version") or "0.1"
        raise LogError(
            f"thinwire {version} wrote this log in another format: make its report with that version, or run again"
        )
    given = [item for item in fields(kind) if item.name in record]
    values = {item.name: _checked(record[item.name], item.type, f"{kind.event}.{item.name}") for item in given}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"incomplete {kind.event} record ({error})") from error


def _checked(value: Any, kind: Any, name: str) -> Any:
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise ValueError(f"{name} is not a list")
        return [_checked(item, get_args(kind)[0], name) for item in value]
    if kind is float and value is None:
        return math.nan
    if type(value) is kind or (kind is float and type(value) is int):
        return kind(value)
    raise ValueError(f"{name} is {value!r}, not of type {kind.__name__}")
