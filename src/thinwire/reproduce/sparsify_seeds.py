"""Seeds: a method's runs of SparsifyGradients that differ in their seed alone, and what they say together.

Test accuracy moves by a point and more from epoch to epoch, and the epoch that meets the target is luck to a few.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.reproduce.runs import Curve

SEEDS = {False: 1, True: 3}  # of each method, by whether the scale is full
LAST = 3  # evaluations of which a mean is taken


@dataclass(frozen=True)
class Seeds:
    """A method's curves by seed: at least one, and not those that were left out."""

    curves: dict[int, Curve]

    def __len__(self) -> int:
        return len(self.curves)

    @property
    def reached(self) -> list[int]:
        """The steps that met the target, of those seeds that met it."""
        return [curve.reached for curve in self.curves.values() if curve.reached]

    @property
    def steps(self) -> float | None:
        """Their mean; None unless every seed met the target, since a mean of the lucky ones would flatter."""
        return statistics.mean(self.reached) if len(self.reached) == len(self) else None

    @property
    def epochs(self) -> float | None:
        """The same in passes over the data."""
        return self.steps / self._per_epoch if self.steps else None

    def epochs_told(self) -> str:
        """What `epochs` is the mean of, or how many of the seeds met the target."""
        epochs = listed([f"{steps / self._per_epoch:g}" for steps in self.reached])
        few = f"{len(self.reached)} of {len(self)} seeds reached the target" if self.steps is None else ""
        return ": ".join(filter(None, [few, f"{epochs} epochs" if epochs else ""]))

    def tests(self, last: int = 1) -> list[float]:
        """Each seed's mean test accuracy over its last evaluations, in per cent."""
        return [100 * statistics.mean(curve.test[-last:]) for curve in self.curves.values()]

    def test(self, last: int = 1) -> float:
        """Their mean."""
        return statistics.mean(self.tests(last))

    def tests_told(self, last: int = 1) -> str:
        """What `test` is the mean of."""
        return f"{listed([f'{value:.2f}' for value in self.tests(last)])} %"

    @property
    def megabytes(self) -> float:
        """What a worker sent in all, on average."""
        return statistics.mean(curve.megabytes[-1] for curve in self.curves.values())

    @property
    def _per_epoch(self) -> int:
        return next(iter(self.curves.values())).steps_per_epoch


def run_name(method: str, seed: int) -> str:
    """What a run and its file are called."""
    return f"{method}-seed{seed}" if seed else method


def listed(words: Sequence[str]) -> str:
    """One, two and three."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def counted(seeds: dict[str, Seeds]) -> str:
    """How many seeds each method has."""
    return listed([f"{len(own)} of {name}" for name, own in seeds.items()])


def several(seeds: dict[str, Seeds]) -> bool:
    """Whether any method has more than one seed."""
    return any(len(own) > 1 for own in seeds.values())


def matched(seeds: dict[str, Seeds], name: str) -> tuple[Seeds, Seeds] | None:
    """A method and dense with those seeds alone that both have: a seed's luck is in both sides of a comparison then."""
    if not {name, "dense"} <= set(seeds):
        return None
    own, dense = seeds[name].curves, seeds["dense"].curves
    both = [seed for seed in own if seed in dense]
    return (Seeds({s: own[s] for s in both}), Seeds({s: dense[s] for s in both})) if both else None


def compared(seeds: dict[str, Seeds], name: str, told: Callable[[Seeds], str]) -> str:
    """The single seeds of a method next to dense's; nothing where neither has several, or they have none in common."""
    pair = matched(seeds, name)
    counts = {len(seeds[each]) for each in (name, "dense") if each in seeds}
    if pair is None or counts == {1}:
        return ""
    own, dense = pair
    which = listed([str(seed) for seed in own.curves])
    some = "" if counts == {len(own)} else f" ({'seed' if len(own) == 1 else 'seeds'} {which}, which both have)"
    return f"{name}: {told(own)}; dense: {told(dense)}{some}"
