"""Rates, losses and delays as people write them: tc's notation in, numbers out."""

import math
import re
from dataclasses import dataclass

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PREFIXES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:([kmgt]i?)?(bit|bps))?")
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SLOWEST = 8000
_FASTEST = 10**12


@dataclass(frozen=True)
class Rates:
    """Bits per second of a host's link, up (out of the host) and down (into it); None is unshaped."""

    up: int | None = None
    down: int | None = None

    def __str__(self) -> str:
        if self.up == self.down:
            return format_rate(self.up)
        return f"{format_rate(self.up)}/{format_rate(self.down)}"


def parse_rate(text: str | int | None) -> int | None:
    """Turn `100mbit` (also kbit, gbit, mibit, or bare bits) into bits per second."""
    if text is None or text == "none":
        return None
    match = _RATE.fullmatch(str(text).strip().lower())
    if not match:
        raise ValueError(f"the rate '{text}' is not understood; write it as tc does: 10mbit, 1gbit, 500kbit, none")
    number, prefix, unit = match.groups()
    if unit == "bps":  # to tc it is bytes, to most people bits
        raise ValueError(f"the rate '{text}' may mean bits or bytes; write bits: {number}{prefix or ''}bit")
    bits = float(number) * _PREFIXES[prefix or ""]
    if not _SLOWEST <= bits <= _FASTEST:
        raise ValueError(f"the rate '{text}' is out of range; the lab shapes 8kbit to 1tbit")
    return round(bits)


def parse_rates(text: "str | int | Rates | None") -> Rates:
    """Turn `100mbit`, or `20mbit/100mbit` for up/down, into both directions of a link."""
    if isinstance(text, Rates):
        return text
    if isinstance(text, str) and "/" in text:
        up, _, down = text.partition("/")
        try:
            return Rates(parse_rate(up), parse_rate(down))
        except ValueError as error:
            raise ValueError(f"{error} (in '{text}': up/down)") from None
    rate = parse_rate(text)
    return Rates(rate, rate)


def format_rate(rate: int | None) -> str:
    """Write a rate in tc's notation, in the largest unit that keeps it whole."""
    if rate is None:
        return "none"
    for prefix in "tgmk":
        if rate % _PREFIXES[prefix] == 0:
            return f"{rate // _PREFIXES[prefix]}{prefix}bit"
    return f"{rate}bit"


def parse_loss(loss: str | float | None) -> float:
    """Turn `1%`, or the fraction 0.01 as a number, into a fraction."""
    if loss is None:
        return 0.0
    try:
        value = float(loss.strip().removesuffix("%")) / 100 if isinstance(loss, str) else float(loss)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1 or (isinstance(loss, str) and not loss.strip().endswith("%")):
        raise ValueError(f"the loss '{loss}' is not understood; write a percentage from 0% to 100%, such as 1%")
    return value


def parse_delay(delay: str | float | None, what: str = "the delay") -> float:
    """Turn `5ms` (also us, s), or seconds as a number, into seconds."""
    if delay is None:
        return 0.0
    if isinstance(delay, str):
        match = _DELAY.fullmatch(delay.strip().lower())
        value = float(match[1]) * _SECONDS[match[2]] if match else math.nan
    else:
        value = float(delay)
    if not 0 <= value <= 60:
        raise ValueError(f"{what} '{delay}' is not understood; write a time up to 60s, such as 5ms or 200us")
    return value
