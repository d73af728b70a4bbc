"""Presets that tune themselves, next to the codec's own."""

from collections.abc import Callable

from thinwire.codec.codec import Codec
from thinwire.codec.feedback import MomentumCorrection, NoFeedback
from thinwire.codec.selection import Dynamic, Percentile, RandomK, Selection, StdDev, TopK, Warmup
from thinwire.codec.values import Bits, Float32, Sign
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Measured, Payload

PRESETS: dict[str, tuple[str, Callable[[], Codec]]] = {
    "percentile90": (
        "SparsifyGradients: the largest 10 %, 32-bit values, the rest is lost",
        lambda: Codec(Percentile(90), Float32(), NoFeedback()),
    ),
    "percentile90-residual": (
        "the largest 10 % in 8 bits, the rest is kept for later",
        lambda: Codec(Percentile(90), Bits(8)),
    ),
    "topk1": ("the largest 1 % in 8 bits, the rest is kept for later", lambda: Codec(TopK(0.01), Bits(8))),
    "topk0.1": ("the largest 0.1 % in 8 bits", lambda: Codec(TopK(0.001), Bits(8))),
    "dgc": (
        "Deep Gradient Compression: momentum correction 0.9, density falling from 25 % to 0.1 % over 500 steps",
        lambda: Codec(TopK(Warmup([0.25, 0.0625, 0.0156, 0.004, 0.001], 100)), Bits(8), MomentumCorrection(0.9)),
    ),
    "4bit": ("the largest 1 % in 4 bits", lambda: Codec(TopK(0.01), Bits(4))),
    "2bit": ("the largest 1 % in 2 bits", lambda: Codec(TopK(0.01), Bits(2))),
    "1bit": ("the largest 1 % as signs with two means", lambda: Codec(TopK(0.01), Sign())),
    "stddev2": ("what exceeds two standard deviations, in 8 bits", lambda: Codec(StdDev(2.0), Bits(8))),
    "dynamic": ("Tsai's moving threshold, 0.1 % to 10 %, in 8 bits", lambda: Codec(Dynamic(), Bits(8))),
    "random1": ("a random 1 % in 8 bits; positions cost nothing", lambda: Codec(RandomK(0.01), Bits(8))),
}


def codec_for(what: Codec | Selection | float | str) -> Codec:
    """A codec from a preset's name, a density, a selection, or a codec (of which the configuration is taken)."""
    if isinstance(what, Codec):
        return what.fresh()
    if isinstance(what, Selection):
        return Codec(what)
    if isinstance(what, str):
        if what in PRESETS:
            return PRESETS[what][1]()
        try:
            what = float(what)
        except ValueError:
            raise ValueError(f"no preset is called {what!r}; there are {', '.join(PRESETS)}, or a density") from None
    if not isinstance(what, (int, float)):
        raise ValueError(f"a codec is a Codec, a selection, a density or a preset's name, not {what!r}")
    return Codec(TopK(float(what)))


TUNED: dict[str, tuple[str, Callable[[], Codec]]] = {
    "adaptive": (
        "as many entries as pay on this network, 0.1 % to 10 %, in 8 bits",
        lambda: Codec(Adaptive(Measured()), Bits(8)),
    ),
    "adaptive-bytes": (
        "as many entries as buy the most per byte, 0.1 % to 10 %, in 8 bits",
        lambda: Codec(Adaptive(Payload()), Bits(8)),
    ),
}


def any_codec_for(what: Codec | Selection | float | str) -> Codec:
    """As `codec_for`, with the presets that tune themselves."""
    if isinstance(what, str) and what in TUNED:
        return TUNED[what][1]()
    try:
        return codec_for(what)
    except ValueError:
        if isinstance(what, str) and what not in PRESETS:
            known = ", ".join([*PRESETS, *TUNED])
            raise ValueError(
                f'no preset is called {what!r}; there are {known}, a density, or in attach "auto"'
            ) from None
        raise
