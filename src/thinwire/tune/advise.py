"""Advise: what each method would do on a network, which one to take, and where the answers change.

Arithmetic on a workload that was measured; see `thinwire advise` for the measuring.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.tune.auto import Policy
from thinwire.tune.forecast import DENSE, Forecast, Setting, Workload, forecast
from thinwire.tune.network import Network

# Rates over which the answers are drawn: 1 Mbit/s to 100 Gbit/s.
LOWEST, HIGHEST = 1e6, 1e11
# How far a prediction may be off where the network was measured, and where only its rate is known.
_PROBED, _RATED = 0.10, 0.25


@dataclass(frozen=True)
class Row:
    """One method's line of the table."""

    method: str
    exchange: str
    seconds: float
    tax: float  # beyond the step without any exchange, as a share of that
    sent: float  # bytes per host and step
    efficiency: float  # the share of the step that is computing
    alpha: float
    uncertainty: float  # as a share of the step
    setting: str  # how to ask for it


@dataclass(frozen=True)
class Advice:
    """The table and the answer."""

    rows: tuple[Row, ...]
    best: Row
    verdict: str

    @property
    def compress(self) -> bool:
        return self.best.method != DENSE.name


def cheapest(settings: Sequence[Setting], work: Workload, network: Network) -> list[Forecast]:
    """Each method with the exchange that suits it best."""
    best: dict[str, Forecast] = {}
    for setting in settings:
        found = forecast(setting, work, network)
        if setting.name not in best or found.seconds < best[setting.name].seconds:
            best[setting.name] = found
    return list(best.values())


def advise(
    settings: Sequence[Setting],
    work: Workload,
    network: Network,
    *,
    spread: float = 0.0,
    probed: bool = False,
    policy: Policy | None = None,
) -> Advice:
    """What to do on this network; `spread` is how much the measured computing varied, as a share of itself."""
    policy = policy if policy is not None else Policy()
    rows = tuple(_row(f, work, spread, _PROBED if probed else _RATED) for f in cheapest(settings, work, network))
    dense = next(row for row in rows if row.method == DENSE.name)
    allowed = [row for row in rows if row.alpha >= policy.alpha]
    least = min(row.seconds for row in allowed)
    # Of methods that take the same time, the one that carries the most.
    best = max((row for row in allowed if row.seconds <= 1.03 * least), key=lambda row: (round(row.alpha, 1), row.sent))
    gain = dense.seconds / best.seconds
    if best is dense or gain < 1.0 / (1.0 - policy.compress_from):
        words = (
            f"Do not compress: dense takes {_ms(dense.seconds)} a step, of which {dense.efficiency:.0%} is computing"
        )
        if best is not dense:
            words += f", and the best method, {best.method}, gains {gain - 1.0:.0%}"
        return Advice(rows, dense, words + ".")
    words = (
        f"Compress: {best.method} takes {_ms(best.seconds)} a step where dense takes {_ms(dense.seconds)} "
        f"({gain:.1f}x); use {'thinwire.' if best.exchange else ''}{best.setting}."
    )
    return Advice(rows, best, words)


def _row(found: Forecast, work: Workload, spread: float, doubt: float) -> Row:
    waiting = max(found.seconds - work.compute, 0.0) / found.seconds
    uncertainty = math.hypot((1.0 - waiting) * spread, waiting * doubt)
    return Row(
        found.setting.name,
        found.setting.exchange if found.setting.compressed else "",
        found.seconds,
        found.seconds / work.compute - 1.0,
        found.sent,
        work.compute / found.seconds,
        found.alpha,
        uncertainty,
        how_to(found.setting),
    )


def how_to(setting: Setting) -> str:
    """The line that asks for a setting."""
    if setting == DENSE:
        return "DDP as it is"
    if not setting.compressed:
        return "model.register_comm_hook(None, fp16_compress_hook)"
    return f'attach(model, "{setting.name}", exchange="{setting.exchange}")'


def at_rates(
    settings: Sequence[Setting], work: Workload, network: Callable[[float], Network], points: int = 61
) -> tuple[list[float], dict[str, list[float]]]:
    """Bits a second, and each method's seconds a step at each."""
    rates = [LOWEST * (HIGHEST / LOWEST) ** (i / (points - 1)) for i in range(points)]
    curves: dict[str, list[float]] = {}
    for rate in rates:
        for found in cheapest(settings, work, network(rate)):
            curves.setdefault(found.setting.name, []).append(found.seconds)
    return rates, curves


def crossings(
    settings: Sequence[Setting], work: Workload, network: Callable[[float], Network]
) -> dict[str, float | None]:
    """The rate up to which each method gains enough on dense to be worth it; None where it does at any rate."""
    found: dict[str, float | None] = {}
    for name in dict.fromkeys(s.name for s in settings if s != DENSE):
        those = [s for s in settings if s.name == name]

        def lead(rate: float, those: list[Setting] = those) -> float:
            """Seconds that the method is ahead of dense, beyond what it must be."""
            net = network(rate)
            enough = (1.0 - Policy().compress_from) * forecast(DENSE, work, net).seconds
            return enough - min(forecast(s, work, net).seconds for s in those)

        found[name] = _root(lead)
    return found


def _root(lead: Callable[[float], float]) -> float | None:
    low, high = LOWEST, HIGHEST
    if lead(low) <= 0.0:
        return low
    if lead(high) > 0.0:
        return None
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if lead(middle) > 0.0 else (low, middle)
    return high


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"
