"""Naming: codecs of the two directions by the words of the command line."""

from thinwire.codec.codec import Codec
from thinwire.codec.memory import Drop
from thinwire.codec.presets import codec_for
from thinwire.codec.selection import Selection, TopK
from thinwire.codec.values import Float32


def named_codec(what: Codec | Selection | float | str) -> Codec:
    """A codec, preset or density; "dense" is every entry as it is."""
    return Codec(TopK(1.0), Float32(), Drop()) if what == "dense" else codec_for(what)
