"""Public names that load on first use, so that importing a package imports nothing heavy."""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str,
    modules: Mapping[str, Collection[str]],
    renamed: Mapping[str, str] | None = None,
    packages: Collection[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package (PEP 562) whose public names live in other modules.

    modules: the modules that define public names, and these names. renamed: names of earlier versions and what to use
    now. packages: public packages inside this one, which importing this one does not load.
    """
    names, old = {name: module for module, found in modules.items() for name in found}, renamed or {}

    def get(name: str) -> Any:
        if name in names:
            return getattr(import_module(names[name]), name)
        if name in packages:
            return import_module(f"{package}.{name}")
        if name in old:
            raise AttributeError(f"{package}.{name} is now {old[name]}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted([*names, *packages])
