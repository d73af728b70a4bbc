"""Auto: which setting a model, a machine and a network ask for, and when to think again.

It only computes: whoever measures gives every rank the same figures, and so every rank decides alike.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.tune.forecast import DENSE, SETTINGS, TIERED, Forecast, Setting, Workload, forecast
from thinwire.tune.network import Network


@dataclass(frozen=True)
class Policy:
    """What auto may choose, and how readily it changes its mind."""

    settings: tuple[Setting, ...] = SETTINGS
    alpha: float = 0.05  # the least share of the squared norm that a step must carry
    margin: float = 0.15  # what another setting must gain to be worth a change, as a share of the step
    compress_from: float = 0.05  # what compression must gain on dense to be worth its noise
    late: float = 0.01  # steps that are needed besides, as a share, where alpha is 1: what waits arrives late

    def cost(self, found: Forecast) -> float:
        """The time of a step, times the steps that it takes more than dense would.

        With 1 % alpha was about 0.12 on digits and 70 steps reached what 65 dense ones did; with 0.1 %, 0.015 and 120.
        """
        return found.seconds * (1.0 + self.late / max(found.alpha, 1e-6)) if found.setting.compressed else found.seconds


@dataclass(frozen=True)
class Decision:
    """A setting and what was expected of all."""

    setting: Setting
    forecasts: tuple[Forecast, ...]
    network: Network
    changed: bool

    @property
    def expected(self) -> Forecast:
        return next(f for f in self.forecasts if f.setting == self.setting)

    def why(self) -> str:
        """One line: what was chosen and why."""
        dense = next(f for f in self.forecasts if f.setting.name == DENSE.name)
        others = sorted((f for f in self.forecasts if f.setting != self.setting), key=lambda f: f.seconds)
        shown = {DENSE: dense, **{f.setting: f for f in others[:2]}}
        rest = ", ".join(f"{s} {1e3 * f.seconds:.0f} ms" for s, f in shown.items() if s != self.setting)
        best = self.expected
        share = f", alpha {best.alpha:.2f}" if best.setting.compressed else ""
        return f"{best.setting} at {1e3 * best.seconds:.0f} ms a step{share} (expected: {rest}); {self.network}"


def decide(work: Workload, network: Network, present: Setting | None = None, policy: Policy | None = None) -> Decision:
    """The cheapest setting that carries enough; the present one stays unless another is clearly cheaper."""
    policy = policy if policy is not None else Policy()
    settings = policy.settings + (TIERED if network.tiers is not None else ())
    forecasts = tuple(forecast(setting, work, network) for setting in settings)
    allowed = [f for f in forecasts if f.alpha >= policy.alpha]
    dense = next(f for f in forecasts if f.setting.name == DENSE.name)
    best = min(allowed, key=policy.cost, default=dense)
    if best.setting.name != DENSE.name and policy.cost(best) > (1.0 - policy.compress_from) * dense.seconds:
        best = dense
    now = next((f for f in allowed if f.setting == present), None)
    if now is not None and policy.cost(best) > (1.0 - policy.margin) * policy.cost(now):
        best = now
    return Decision(best.setting, forecasts, network, best.setting != present)


class Watch:
    """Notices from the time that training waits for the exchange that the network is not what it was.

    The first window after a decision is the yardstick; a later one that differs by half is a reason to probe again.
    """

    def __init__(self, *, factor: float = 1.5, least: float = 0.002) -> None:
        self._factor, self._least = factor, least
        self._usual: float | None = None

    def reset(self) -> None:
        """After a decision: what comes next is the new yardstick."""
        self._usual = None

    def suspicious(self, waits: Sequence[float], period: float) -> bool:
        """Whether a window of waits says that something has changed; `period` is the time of a whole step."""
        now = statistics.median(waits)
        if self._usual is None:
            self._usual = now
            return False
        changed = max(now, self._usual) > self._factor * min(now, self._usual)
        # Small waits may vary as they like: they are not worth a probe.
        return changed and abs(now - self._usual) > max(self._least, 0.1 * period)
