"""The last line of a benchmark with bars, and its exit code."""

from collections.abc import Iterable


def verdict(bars: Iterable[bool | None]) -> int:
    """Say how many bars were missed; 1 if any was. None is a bar that could not be measured."""
    met = list(bars)
    missed, unknown = met.count(False), met.count(None)
    if met:
        said = f"{missed} of {len(met)} bars missed" if missed else f"none of {len(met)} bars missed"
        print(f"{said}, {unknown} not measured." if unknown else f"{said}.")
    return 1 if missed else 0
