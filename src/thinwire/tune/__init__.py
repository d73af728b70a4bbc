"""Self-tuning: what bits cost, how many of them pay, and which setting a network asks for."""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names that load on first use
    from thinwire.tune.adaptive import Adaptive
    from thinwire.tune.cost import Affine, Measured, Packets, Payload

__all__ = ["Adaptive", "Affine", "Measured", "Packets", "Payload"]

_MODULES = {
    "thinwire.tune.adaptive": ("Adaptive",),
    "thinwire.tune.cost": ("Affine", "Measured", "Packets", "Payload"),
}
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
