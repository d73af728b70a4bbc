"""Presets: codecs by name, and the one function that turns what a user gives into a codec."""

from collections.abc import Callable

from thinwire.codec.codec import Codec
from thinwire.codec.feedback import MomentumCorrection, NoFeedback
from thinwire.codec.low_rank import LowRank
from thinwire.codec.selection import Dynamic, Percentile, RandomK, Rotate, Selection, StdDev, TopK, Warmup
from thinwire.codec.values import Bits, Float32, Sign, Unary
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Measured, Payload

# The name of a preset, what it does in one sentence, and how it is made.
PRESETS: dict[str, tuple[str, Callable[[], Codec]]] = {
    "percentile90": (
        "SparsifyGradients: sends the largest 10 % in 32 bits; the rest is lost.",
        lambda: Codec(Percentile(90), Float32(), NoFeedback()),
    ),
    "percentile90-residual": (
        "Sends the largest 10 % in 8 bits; the rest stays in the residual.",
        lambda: Codec(Percentile(90), Bits(8)),
    ),
    "topk1": (
        "Sends the largest 1 % in about 2.6 bits; the rest stays in the residual.",
        lambda: Codec(TopK(0.01), Unary()),
    ),
    "topk0.1": (
        "Sends the largest 0.1 % in about 2.6 bits; the rest stays in the residual.",
        lambda: Codec(TopK(0.001), Unary()),
    ),
    "dgc": (
        "Deep Gradient Compression: momentum correction with 0.9 and a density that falls from 25 % to 0.1 % over 500 "
        "steps.",
        lambda: Codec(TopK(Warmup([0.25, 0.0625, 0.0156, 0.004, 0.001], 100)), Bits(8), MomentumCorrection(0.9)),
    ),
    "8bit": ("Sends the largest 1 % in 8 bits.", lambda: Codec(TopK(0.01), Bits(8))),
    "4bit": ("Sends the largest 1 % in 4 bits.", lambda: Codec(TopK(0.01), Bits(4))),
    "2bit": ("Sends the largest 1 % in 2 bits.", lambda: Codec(TopK(0.01), Bits(2))),
    "1bit": ("Sends the signs of the largest 1 % with two means per block.", lambda: Codec(TopK(0.01), Sign())),
    "stddev2": (
        "Sends magnitudes above two standard deviations in 8 bits.",
        lambda: Codec(StdDev(2.0), Bits(8)),
    ),
    "dynamic": (
        "Tsai's moving threshold: sends 0.1 % to 10 % in 8 bits.",
        lambda: Codec(Dynamic(), Bits(8)),
    ),
    "random1": (
        "Sends a random 1 % in 8 bits; the positions take no bytes.",
        lambda: Codec(RandomK(0.01), Bits(8)),
    ),
    "adaptive": (
        "Sends between 0.1 % and 10 % in 8 bits: the density with the most descent per second on this network.",
        lambda: Codec(Adaptive(Measured()), Bits(8)),
    ),
    "adaptive-bytes": (
        "Sends between 0.1 % and 10 % in 8 bits: the density with the most descent per byte.",
        lambda: Codec(Adaptive(Payload()), Bits(8)),
    ),
    "update": (
        "For updates of any optimizer: low-rank projections of the matrices, 0.15 numbers per element in 2 bits, more "
        "with more than four ranks.",
        lambda: Codec(LowRank(0.15, ranks=4), Bits(2)),
    ),
    "rotate": (
        "For updates of any optimizer: sends a rotating 8 % of the entries in 2 bits; the positions take no bytes.",
        lambda: Codec(Rotate(0.08), Bits(2)),
    ),
    "local4": (
        "Local steps: the change of 4 steps, as low-rank projections with 0.6 numbers per element in 2 bits.",
        lambda: Codec(LowRank(0.6, max_rank=256), Bits(2)),
    ),
    "local16": (
        "Local steps: the whole change of 16 steps in 4 bits.",
        lambda: Codec(LowRank(1.0), Bits(4)),
    ),
    "local64": (
        "Local steps: the change of 64 steps, as low-rank projections with 0.6 numbers per element in 2 bits.",
        lambda: Codec(LowRank(0.6, max_rank=256), Bits(2)),
    ),
    "dense": (
        "Sends everything in 32 bits.",
        lambda: Codec(TopK(1.0), Float32(), NoFeedback()),
    ),
}

# Presets with local steps: how many the optimizer takes between two exchanges, which overlap the next ones.
LOCAL = {"local4": 4, "local16": 16, "local64": 64}


def resolve_codec(what: Codec | Selection | float | str, world: int | None = None) -> Codec:
    """Return a new codec for a preset's name, a density, a selection, or another codec, whose settings are copied.

    A density may be text: "0.01" and "1%" are the same. With `world`, a selection that depends on the number of ranks
    is that for so many. ValueError if there is no such codec.
    """
    codec = _new_codec(what)
    return codec if world is None else codec.copy(selection=codec.selection.for_ranks(world))


def _new_codec(what: Codec | Selection | float | str) -> Codec:
    if isinstance(what, Codec):
        return what.copy()
    if isinstance(what, Selection):
        return Codec(what)
    if isinstance(what, str):
        return PRESETS[what][1]() if what in PRESETS else _top_density(_parse_density(what))
    if not isinstance(what, int | float) or isinstance(what, bool):
        raise ValueError(f"a codec is a Codec, a selection, a density or a preset's name, not {what!r}")
    return _top_density(float(what))


def _parse_density(text: str) -> float:
    """Return the number in a text such as "0.01" or "1%"."""
    number, percent, rest = text.partition("%")
    try:
        return float(number) / 100.0 if percent and not rest.strip() else float(text)
    except ValueError:
        known = f"there are {', '.join(PRESETS)}, a density such as 0.01"
        raise ValueError(f'no preset is called {text!r}; {known}, or in attach "auto"') from None


def _top_density(density: float) -> Codec:
    """Return the codec for a density; ValueError if it looks like a percentage."""
    if density == 1.0:
        raise ValueError(
            "a density of 1 sends every entry (100 %); did you mean 0.01 (1 %)? To send every entry, give TopK(1.0)"
        )
    return Codec(TopK(density))
