"""Adapters for training frameworks, each in a module of its own, which imports its framework.

`thinwire.integrations.lightning`, `.accelerate`, `.transformers` and `.ray`. `save_ranks` and `load_ranks` write and
read what every rank needs to resume, for scripts without a framework.
"""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:
    from thinwire.integrations.rank_files import load_ranks, save_ranks

__all__ = ["load_ranks", "save_ranks"]

__getattr__, __dir__ = lazy_names(__name__, {"thinwire.integrations.rank_files": ("load_ranks", "save_ranks")})
