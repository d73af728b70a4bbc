"""Parsing of rates, losses and delays in the notation of tc, such as 100mbit, 1% and 5ms."""

import math
import re
from dataclasses import dataclass

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PREFIXES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:([kmgt]i?)?(bit|bps))?")
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Rates:
    """Rates of a host's link in bits per second, up (out of the host) and down (into it); None is unlimited."""

    up: int | None = None
    down: int | None = None

    @property
    def limited(self) -> bool:
        """Whether any direction has a limit."""
        return self.up is not None or self.down is not None

    def __str__(self) -> str:
        if self.up == self.down:
            return format_rate(self.up)
        return f"{format_rate(self.up)}/{format_rate(self.down)}"


def parse_rate(text: str | int | None) -> int | None:
    """Turn `100mbit` (also kbit, gbit, mibit), or a number of bits, into bits per second; `none` is unlimited."""
    if text is None or text == "none":
        return None
    if not (match := _RATE.fullmatch(str(text).strip().lower())):
        raise ValueError(f"the rate '{text}' is not understood; write a number and a unit, such as 10mbit, or none")
    number, prefix, unit = match.groups()
    if unit is None and isinstance(text, str):
        raise ValueError(f"the rate '{text}' has no unit: {text} of what? Write {number}mbit, for example")
    if unit == "bps":  # tc reads it as bytes, most people as bits
        raise ValueError(f"the rate '{text}' may mean bits or bytes per second; write bits: {number}{prefix or ''}bit")
    bits = float(number) * _PREFIXES[prefix or ""]
    if not 8000 <= bits <= 10**12:
        raise ValueError(f"the rate '{text}' is out of range; a rate is from 8kbit to 1tbit")
    return round(bits)


def parse_rates(text: "str | int | Rates | None") -> Rates:
    """Turn `100mbit`, or `20mbit/100mbit` for up and down, into the rates of both directions of a link."""
    if isinstance(text, Rates):
        return text
    if isinstance(text, str) and "/" in text:
        try:
            return Rates(*map(parse_rate, text.split("/", 1)))
        except ValueError as error:
            raise ValueError(f"{error} (in '{text}': up/down)") from None
    rate = parse_rate(text)
    return Rates(rate, rate)


def format_rate(rate: int | None) -> str:
    """Return a rate in the notation of tc, in the largest unit that gives a whole number."""
    if rate is None:
        return "none"
    for prefix in "tgmk":
        if rate % _PREFIXES[prefix] == 0:
            return f"{rate // _PREFIXES[prefix]}{prefix}bit"
    return f"{rate}bit"


def parse_loss(loss: str | float | None) -> float:
    """Turn `1%`, or the number 0.01, into a fraction."""
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
    """Turn `5ms` (also us and s), `0`, or a number of seconds, into seconds."""
    if delay is None or delay == "0":
        return 0.0
    if isinstance(delay, str):
        match = _DELAY.fullmatch(delay.strip().lower())
        value = float(match[1]) * _SECONDS[match[2]] if match else math.nan
    else:
        value = float(delay)
    if not 0 <= value <= 60:
        raise ValueError(f"{what} '{delay}' is not understood; write a time up to 60s, such as 5ms or 200us")
    return value


def format_delay(seconds: float) -> str:
    """Return a delay in the notation of tc: `25ms`, `1.5s`, or `0`."""
    if seconds == 0:
        return "0"
    unit = next(unit for unit in ("s", "ms", "us") if seconds >= _SECONDS[unit] or unit == "us")
    return f"{seconds / _SECONDS[unit]:.6g}{unit}"
