"""What an event log records besides times and bytes: gradient magnitudes, the machine, the date."""

import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.events import Histogram

if TYPE_CHECKING:
    from torch import Tensor


def gradient_histogram(step: int, layer: str, gradient: "Tensor", *, per_decade: int = 4) -> Histogram:
    """The histogram of a gradient's magnitudes in bins of equal ratio, from 1e-12 to 1e3."""
    magnitudes = gradient.detach().abs().flatten()
    found = magnitudes[magnitudes > 0].log10()
    counts = found.clamp(-12, 3).histc(15 * per_decade, min=-12, max=3).long().tolist()
    used = [place for place, count in enumerate(counts) if count]
    first, last = (used[0], used[-1]) if used else (0, -1)
    edges = [10 ** (-12 + place / per_decade) for place in range(first, last + 2)] if used else []
    return Histogram(
        step=step,
        layer=layer,
        edges=edges,
        counts=counts[first : last + 1],
        zeros=magnitudes.numel() - found.numel(),
    )


def describe_machine() -> str:
    """One line about this machine: processor, cores, system, torch."""
    processor = platform.processor() or platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    except OSError:
        pass  # not Linux: the machine's architecture has to do
    system = f"{platform.system()} {platform.release()}"
    return f"{processor}, {os.cpu_count()} cores, {system}, torch {metadata.version('torch')}"


def now() -> str:
    """The date of a run, in UTC to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
