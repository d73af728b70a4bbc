"""Presets that tune themselves, next to the codec's own."""

from collections.abc import Callable

from thinwire.codec.codec import Codec
from thinwire.codec.presets import PRESETS, codec_for
from thinwire.codec.selection import Selection
from thinwire.codec.values import Bits
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Measured, Payload

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
