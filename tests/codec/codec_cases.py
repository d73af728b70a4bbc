"""What the codec's tests share: gradients of many kinds, selections, value formats and feedbacks."""

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
import thinwire.codec
import thinwire.tune
from thinwire.codec.feedback import Feedback
from thinwire.codec.selection import Selection
from thinwire.codec.values import Values

# There are no deadlines: they would measure the machine.
quick = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])

VALUES: list[Values] = [
    tw.Float32(),
    tw.Float16(),
    tw.BFloat16(),
    tw.Bits(8),
    tw.Bits(4),
    tw.Bits(2),
    tw.Sign(),
    tw.Unary(),
    tw.Bits(8, seed=11),
    tw.Bits(4, seed=12),
    tw.Bits(2, seed=13),
]
FEEDBACKS: list[Feedback] = [
    tw.NoFeedback(),
    tw.ErrorFeedback(),
    tw.ErrorFeedback(0.75),
    tw.MomentumCorrection(0.9),
    tw.MomentumCorrection(0.5, nesterov=True),
]
# With these selections the kernels and torch operations choose the same entries.
EXACT: list[Selection] = [
    tw.TopK(0.01, exact=True),
    tw.TopK(0.3, exact=True),
    tw.TopK(1.0),
    tw.Percentile(90, exact=True),
    tw.Threshold(0.0),
    tw.Threshold(1.5),
    tw.RandomK(0.1, seed=5),
    tw.Rotate(0.1),
    tw.Rotate(0.3, min_window=64),
]
SELECTIONS: list[Selection] = [
    *EXACT,
    tw.TopK(0.05),
    tw.Percentile(90),
    tw.StdDev(2.0),
    tw.StdDev(1.0, exact=True),
    tw.Dynamic(),
    tw.TopK(tw.Warmup([0.5, 0.1, 0.01], 1)),
    tw.Adaptive(tw.tune.Affine(1e-4, 1e8)),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _normal(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, generator=g)


def _coarse(n: int, g: torch.Generator) -> Tensor:
    return torch.randint(-4, 5, (n,), generator=g) / 2.0


def _sparse(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.02)


def _constant(n: int, g: torch.Generator) -> Tensor:
    return torch.full((n,), float(torch.randn(1, generator=g)))


def _zero(n: int, g: torch.Generator) -> Tensor:
    return torch.zeros(n)


def _wide(n: int, g: torch.Generator) -> Tensor:
    """Return magnitudes over the whole range of float16, subnormals included."""
    exponents = torch.randint(-24, 16, (n,), generator=g)
    return torch.ldexp(torch.randn(n, generator=g).clamp(-1.9, 1.9), exponents)


KINDS: list[Callable[[int, torch.Generator], Tensor]] = [_normal, _coarse, _sparse, _constant, _zero, _wide]

sizes = st.lists(st.sampled_from([0, 1, 2, 7, 8, 31, 33, 200, 511, 512, 513, 1500, 4096, 4127, 9000]), max_size=4)


def gradients(shapes: list[int], dtype: torch.dtype, kind: int, seed: int) -> dict[str, Tensor]:
    """Return the gradients of one step, named by their index."""
    generator = torch.Generator().manual_seed(seed)
    made = [KINDS[(kind + i) % len(KINDS)](n, generator).to(dtype) for i, n in enumerate(shapes)]
    return {f"t{i}": t for i, t in enumerate(made)}


def positions_of(frame: tw.codec.Frame, numels: list[int]) -> dict[int, Tensor]:
    """Return the positions that were sent, by tensor."""
    reader = tw.codec.FrameReader(frame, numels)
    return {s.id: reader.entries(s)[0] for s in reader.sections}
