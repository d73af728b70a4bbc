"""Updates and local steps in forecasts: which preset is the cheapest that hides the network.

A preset fixes the number of steps between two exchanges and the share of the change that is sent. Fewer steps between
exchanges train better per step, and dense gradients best of all. Therefore the first setting in this order wins whose
step is about as fast as the fastest.
"""

from collections.abc import Sequence

from thinwire.codec.low_rank import LowRank
from thinwire.tune.forecast import DENSE, FP16, Forecast, Network, Setting, Workload, forecast
from thinwire.tune.presets import LOCAL, resolve_codec

# A step that is longer by so much, relative to the fastest setting's, still counts as one that hides the network.
HIDDEN = 0.05
EVERY = {"update": 1, **LOCAL}  # steps between two exchanges, by preset


def update_settings(world: int) -> tuple[Setting, ...]:
    """Return the presets that exchange updates, in the order of their local steps, as a link of so many ranks would."""
    exchange = "gather" if world <= 2 else "scatter-reduce"
    found = []
    for name, every in EVERY.items():
        codec = resolve_codec(name)
        assert isinstance(codec.selection, LowRank)
        found.append(Setting(name, exchange, density=codec.selection.density, bits=codec.values.bits, every=every))
    return tuple(found)


def settings_for_updates(world: int) -> tuple[Setting, ...]:
    """Return all settings for optimizers with which compressed gradients train worse, the best training first."""
    return (DENSE, FP16, *update_settings(world))


def cheapest_hidden(found: Sequence[Forecast]) -> Forecast:
    """Return the first forecast whose step is about as fast as the fastest of all."""
    least = min(each.seconds for each in found)
    return next(each for each in found if each.seconds <= (1.0 + HIDDEN) * least)


def decide_update(work: Workload, network: Network, settings: Sequence[Setting]) -> tuple[Setting, str]:
    """Return the setting to use, and one line that says why."""
    found = [forecast(setting, work, network) for setting in settings]
    best = cheapest_hidden(found)
    others = ", ".join(f"{f.setting.name} {1e3 * f.seconds:.0f} ms" for f in found if f is not best)
    return best.setting, (
        f"{best.setting.name} at {1e3 * best.seconds:.0f} ms a step is the first that hides the network "
        f"(computing takes {1e3 * work.compute:.0f} ms; expected: {others}); {network}"
    )
