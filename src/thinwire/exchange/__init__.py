"""Exchanges: how the frames of all ranks become a mean that every rank holds bit for bit."""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names that load on first use
    from thinwire.exchange.base import Dense, Exchange
    from thinwire.exchange.gather import Gather
    from thinwire.exchange.hierarchical import Hierarchical
    from thinwire.exchange.scatter_reduce import ScatterReduce

__all__ = ["Dense", "Exchange", "Gather", "Hierarchical", "ScatterReduce"]

_MODULES = {
    "thinwire.exchange.base": ("Exchange", "Dense"),
    "thinwire.exchange.gather": ("Gather",),
    "thinwire.exchange.scatter_reduce": ("ScatterReduce",),
    "thinwire.exchange.hierarchical": ("Hierarchical",),
}
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
