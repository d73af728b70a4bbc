"""The bars: what the codec must reach, next to what was measured.

Speed and size come from the benchmark's rows; density and memory have small measurements of their own.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.bench.codec import Row
from thinwire.codec.codec import Codec
from thinwire.codec.selection import TopK
from thinwire.codec.values import Bits

BARS_FOR = 25_000_000  # elements


@dataclass(frozen=True)
class Bar:
    """A limit and what was measured (None: it could not be); `most` tells the direction."""

    what: str
    limit: float
    measured: float | None
    unit: str
    most: bool = True

    @property
    def passed(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.limit if self.most else self.measured >= self.limit


def from_rows(rows: Iterable[Row], n: int) -> list[Bar]:
    """Bars on speed and size at 1 % (and where said at 10 % and 0.1 %)."""
    found = {(row.name, row.density): row for row in rows if row.n == n}

    def ratio(name: str, density: float = 0.01) -> float:
        return found[name, density].ratio_to_copy or 0.0

    def took(name: str) -> float:
        return found[name, 0.01].milliseconds or math.inf

    def smaller(name: str, density: float) -> float:
        return 32.0 / found[name, density].bits_per_element

    bars = [
        Bar("encode, sampled TopK", 2.5, ratio("encode TopK"), "x the copy"),
        Bar("the torch.topk way against it", 40.0, took("torch.topk") / took("encode TopK"), "x slower", most=False),
        Bar("encode, exact TopK", 6.0, ratio("encode TopK exact"), "x the copy"),
        Bar("encode, StdDev", 3.5, ratio("encode StdDev"), "x the copy"),
        Bar("encode, Dynamic", 3.5, ratio("encode Dynamic"), "x the copy"),
        Bar("encode, Adaptive", 1.5, ratio("encode Adaptive") / ratio("encode TopK"), "x sampled TopK"),
        Bar("decode and add one frame", 0.35, ratio("decode and add"), "x the copy"),
    ]
    for density in (0.1, 0.01, 0.001):
        row = found["encode TopK exact", density]
        bars.append(Bar(f"index bits at {density:.1%}", 1.015, row.bits_per_index / row.entropy_bits, "x the entropy"))
    sizes = [
        ("encode TopK exact", 0.1, 24.0, "10 %, 8 bits"),
        ("encode TopK exact", 0.01, 195.0, "1 %, 8 bits"),
        ("encode TopK exact, 2 bits", 0.01, 305.0, "1 %, 2 bits"),
        ("encode TopK exact", 0.001, 1550.0, "0.1 %, 8 bits"),
    ]
    for name, density, limit, words in sizes:
        bars.append(Bar(f"float32 against the frame, {words}", limit, smaller(name, density), "x larger", most=False))
    return bars


def _laws() -> dict[str, Callable[[int, torch.Generator], Tensor]]:
    return {
        "Gaussian": lambda n, g: torch.randn(n, generator=g),
        "Laplace": lambda n, g: -torch.rand(n, generator=g).clamp_(1e-7).log(),
        "Pareto": lambda n, g: torch.rand(n, generator=g).clamp_(1e-7).pow(-1 / 1.2),
    }


def density_bars(n: int) -> list[Bar]:
    """How far sampled TopK is from the density asked for, at its worst over densities and seeds."""
    bars = []
    for place, (law, make) in enumerate(_laws().items()):
        worst = 0.0
        for seed in range(2):
            x = make(n, torch.Generator().manual_seed(10 * place + seed))
            for density in (0.1, 0.01, 0.001):
                (count,) = Codec(TopK(density), Bits(8)).encode({"w": x}, step=seed).counts
                worst = max(worst, abs(count / (density * n) - 1.0))
        bars.append(Bar(f"sampled TopK's density, {law}", 10.0, 100.0 * worst, "% off at the worst"))
    return bars


# Run in a fresh process: the peak of resident memory during one encode or decode, less what was there before and the
# frame. Writing 5 to clear_refs resets the peak.
_PEAK = """
import sys, torch
from thinwire.codec.codec import Codec
from thinwire.codec.frame import FrameReader
from thinwire.codec.selection import TopK
torch.set_num_threads(1)
n, exact = int(sys.argv[1]), sys.argv[2] == "exact"
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
codec = Codec(TopK(0.01, exact=exact))
small = torch.randn(1000000)
FrameReader(codec.encode({"small": small}), [1000000]).add_to([small])
gradient, out = torch.randn(n), torch.ones(n)
codec.load_state_dict({"version": 1, "step": 0, "selection": {}, "memory": {"w": {"residual": torch.randn(n)}}})
def beyond(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    kept = work()
    return status("VmHWM") - before, kept
peak, frame = beyond(lambda: codec.encode({"w": gradient}))
decode, _ = beyond(lambda: FrameReader(frame, [n]).add_to([out]))
print(peak - len(frame), decode)
"""


def memory_bars(n: int) -> list[Bar]:
    """Peak memory beyond residual and frame, as a share of the tensor; not measured where the process fails.

    It does where Linux' /proc is missing, or memory for the tensors.
    """
    bars = []
    for way, words in (("sampled", "encode, sampled TopK"), ("exact", "encode, exact TopK")):
        done = subprocess.run([sys.executable, "-c", _PEAK, str(n), way], capture_output=True, text=True)
        found = [100.0 * max(0, int(part)) / (4 * n) for part in done.stdout.split()] if done.returncode == 0 else []
        encode, decode = found or (None, None)
        bars.append(Bar(f"memory beyond residual and frame, {words}", 5.0, encode, "% of the tensor"))
        if way == "sampled":
            bars.append(Bar("memory beyond the frame, decode", 5.0, decode, "% of the tensor"))
    return bars
