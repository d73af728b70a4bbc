"""Self-tuning: what bits cost, how many of them pay, and which setting a network asks for."""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:
    from thinwire.tune.adaptive import Adaptive as Adaptive
    from thinwire.tune.cost import Affine as Affine
    from thinwire.tune.cost import Measured as Measured
    from thinwire.tune.cost import Packets as Packets
    from thinwire.tune.cost import Payload as Payload

_NAMES = {
    "Adaptive": "thinwire.tune.adaptive",
    "Affine": "thinwire.tune.cost",
    "Measured": "thinwire.tune.cost",
    "Packets": "thinwire.tune.cost",
    "Payload": "thinwire.tune.cost",
}

__all__ = sorted(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
