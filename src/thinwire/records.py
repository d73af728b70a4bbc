"""Records: the events of a run, one frozen value each; docs/events.md says what every field means."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

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
    rate: str = "none"  # of each host's link: "100mbit", or "none" where nothing is shaped
    # With a parameter server: the transport to it ("udp-ignore": with that policy), and the share of lost packets.
    transport: str = ""
    packet_loss: float = 0.0
    metric: str = "accuracy"
    target: float = math.nan
    version: str = ""
    machine: str = ""
    date: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one rank; the four phases are seconds, `step` counts from 1."""

    event: ClassVar[str] = "step"
    step: int
    epoch: float  # passes of the data done after this step
    wall: float  # seconds of training since its start, evaluation left out
    compute: float
    compress: float
    exchange: float
    apply: float
    bytes_sent: int
    bytes_received: int
    loss: float
    density: float = 1.0  # share of the gradient's entries that travelled
    residual_norm: float = 0.0
    rank: int = 0
    # With a parameter server: two parts of `exchange`, and by layer what was waited for and how stale it was.
    synchronise: float = 0.0
    aggregate: float = 0.0
    # Over udp: datagrams sent, those reported lost, and the sum of magnitudes that returned to the memory for them.
    datagrams: int = 0
    datagrams_lost: int = 0
    restored: float = 0.0
    waits: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.compute + self.compress + self.exchange + self.apply


@dataclass(frozen=True, kw_only=True)
class Eval:
    """The metric at a step, on the training or the test split."""

    event: ClassVar[str] = "eval"
    step: int
    epoch: float
    wall: float
    split: str
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many entries of a layer's gradient have a magnitude from edges[i] to edges[i + 1]: counts[i]."""

    event: ClassVar[str] = "histogram"
    step: int
    layer: str
    edges: list[float]
    counts: list[int]
    zeros: int = 0


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """How far a step's compressed mean was from what training would do without compression (docs/convergence.md)."""

    event: ClassVar[str] = "diagnosis"
    step: int
    delta: float  # ||sent||^2 / ||accumulated||^2
    xi: float  # ||selection of the mean - what was applied|| / ||dense mean||
    residual_ratio: float  # ||held back|| / ||gradient||
    cosine: float  # of what was applied and the dense mean
    age: float = math.nan  # steps that entries now held back have waited, on average
    age_oldest: int = 0
    waited: float = math.nan  # steps that entries waited which travelled since the last diagnosis, on average

    def text(self) -> str:
        """All figures in one line."""
        ages = f"age {self.age:.1f} steps (oldest {self.age_oldest}), waited {self.waited:.1f}"
        return (
            f"delta {self.delta:.3g}, xi {self.xi:.3g}, residual/gradient {self.residual_ratio:.3g}, "
            f"cosine {self.cosine:.3g}" + (f", {ages}" if math.isfinite(self.age) else "")
        )


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The run went on from a checkpoint after `step`: later records before this one are void."""

    event: ClassVar[str] = "resume"
    step: int


@dataclass(frozen=True, kw_only=True)
class End:
    """The last record: why the run ended, and its totals (bytes of the ranks that wrote steps here)."""

    event: ClassVar[str] = "end"
    reason: str
    steps: int
    wall: float
    bytes_sent: int
    bytes_received: int


Event = Run | Step | Eval | Histogram | Diagnosis | Resume | End
