"""Network presets: named figures of the rate, the delay and the loss of emulated links.

Delays are one way, between any two hosts. Rates up are out of the host, rates down into it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkPreset:
    """The figures of a kind of network, in the notation of the options."""

    up: str
    down: str
    delay: str
    loss: str
    description: str

    @property
    def rate(self) -> str:
        """The value of the option `--rate`."""
        return self.up if self.up == self.down else f"{self.up}/{self.down}"


# The sources and assumptions of these figures are in docs/guides/lab.md.
PRESETS = {
    # A delay line cannot carry gigabits, and the lab itself takes about 0.1 ms: so there is no added delay.
    "lan": NetworkPreset("1gbit", "1gbit", "0", "0%", "machines at one switch"),
    "office": NetworkPreset("100mbit", "100mbit", "2ms", "0%", "offices in one city, joined by fibre"),
    "home": NetworkPreset("20mbit", "100mbit", "15ms", "0.1%", "homes with broadband in one country"),
    "wan": NetworkPreset("100mbit", "100mbit", "25ms", "0.01%", "data centres of one continent"),
    "continents": NetworkPreset("50mbit", "50mbit", "75ms", "0.01%", "data centres of two continents"),
}


def find_preset(name: str) -> NetworkPreset:
    """Return the preset of this name; ValueError lists them."""
    if name not in PRESETS:
        raise ValueError(f"there is no network preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
