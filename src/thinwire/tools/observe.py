"""What goes into an event log besides steps (histograms, machine, date), and its copy as TensorBoard scalars."""

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import LogError
from thinwire.tools.events import PHASES, Diagnosis, Eval, Event, Histogram, Step

if TYPE_CHECKING:
    from torch import Tensor


def gradient_histogram(step: int, layer: str, gradient: "Tensor", *, per_decade: int = 4) -> Histogram:
    """Return the histogram of a gradient's magnitudes in bins of equal ratio, from 1e-12 to 1e3."""
    magnitudes = gradient.detach().abs().flatten()
    found = magnitudes[magnitudes > 0].log10()
    counts = found.clamp(-12, 3).histc(15 * per_decade, min=-12, max=3).long().tolist()
    used = [place for place, count in enumerate(counts) if count]
    first, last = (used[0], used[-1]) if used else (0, -1)
    edges = [10 ** (-12 + place / per_decade) for place in range(first, last + 2)] if used else []
    zeros = magnitudes.numel() - found.numel()
    return Histogram(step=step, layer=layer, edges=edges, counts=counts[first : last + 1], zeros=zeros)


def describe_machine() -> str:
    """Describe this machine in one line: processor, cores, system, versions of Python and torch."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):  # not Linux: the architecture is all that is known
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    system = f"{platform.system()} {platform.release()}"
    versions = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
    return f"{processor}, {os.cpu_count()} cores, {system}, {versions}"


def now() -> str:
    """Return the present date and time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def mirrors(folder: Path | None) -> list[Callable[[Event], None]]:
    """Return the `mirrors` of an EventLog that writes to TensorBoard too, if there is a folder for it."""
    return [TensorBoardMirror(folder)] if folder is not None else []


class TensorBoardMirror:
    """Writes the events of a log as TensorBoard scalars; the log closes it at the end."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise LogError(
                "writing to TensorBoard needs the package tensorboard: install it with pip install tensorboard."
            ) from error
        self._writer = SummaryWriter(log_dir=str(folder))

    def __call__(self, event: Event) -> None:
        """Write the scalars of one event."""
        scalars: dict[str, float] = {}
        if isinstance(event, Step):
            scalars = {f"seconds/{name}": getattr(event, name) for name in PHASES}
            scalars |= {f"bytes/{way}": float(getattr(event, f"bytes_{way}")) for way in ("sent", "received")}
            scalars |= {"loss": event.loss, "density": event.density, "residual_norm": event.residual_norm}
        elif isinstance(event, Eval):
            scalars = {f"{event.metric}/{event.split}": event.value}
        elif isinstance(event, Diagnosis):
            scalars = {f"diagnosis/{name}": float(value) for name, value in vars(event).items() if name != "step"}
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, event.step)  # type: ignore[union-attr]

    def close(self) -> None:
        """Write what is still buffered."""
        self._writer.close()
