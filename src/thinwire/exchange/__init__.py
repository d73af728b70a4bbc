"""Exchanges: how the frames of all ranks become a mean that every rank holds bit for bit."""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:
    from thinwire.exchange.base import Dense as Dense
    from thinwire.exchange.base import Exchange as Exchange
    from thinwire.exchange.gather import Gather as Gather
    from thinwire.exchange.hierarchical import Hierarchical as Hierarchical
    from thinwire.exchange.scatter_reduce import ScatterReduce as ScatterReduce

_NAMES = {
    "Exchange": "thinwire.exchange.base",
    "Dense": "thinwire.exchange.base",
    "Gather": "thinwire.exchange.gather",
    "ScatterReduce": "thinwire.exchange.scatter_reduce",
    "Hierarchical": "thinwire.exchange.hierarchical",
}

__all__ = sorted(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
