"""Session: what the server agreed to with one worker, until it forgets it; and what the worker knows of its parts."""

from typing import Any

from torch import nn

from thinwire.codec.codec import Codec
from thinwire.server.layers import Layout
from thinwire.server.messages import Counter, Message, MessageError, field
from thinwire.server.naming import named_codec
from thinwire.server.schedule import Pool, Staleness, check_policy


class Session:
    """The terms of a WELCOME; MessageError if they make no sense, for a server may be hostile too."""

    def __init__(self, number: int, terms: dict[str, Any], model: nn.Module) -> None:
        self.number, self.counter = number, Counter()
        self.slot, self.first = field(terms, "slot", int, 0), field(terms, "first", int, 0)
        self.bound: int | None = None if terms.get("bound") is None else field(terms, "bound", int, 0)
        self.timeout = _seconds(terms)
        self.tell: dict[str, Any] = field(terms, "tell", dict)
        try:
            self.layout = Layout.of(model, field(terms, "cut", int, 0))
            policy = check_policy(field(terms, "policy", str))
        except ValueError as error:
            raise MessageError(f"the server's terms make no sense: {error}") from error
        self.known = Staleness.at_start(len(self.layout.layers), 1)
        self.pool = Pool(policy.name, self.known, field(terms, "window", int, 1))
        self.counted: list[int] | None = terms.get("counted")
        if self.counted is not None and (
            not isinstance(self.counted, list) or not all(type(n) is int for n in self.counted)
        ):
            raise MessageError("counted must be a list of whole numbers")
        # Per part: the clock of what has arrived, and its edition.
        self.arrived = [[-1] * len(layer.parts) for layer in self.layout.layers]
        self.editions = [[-1] * len(layer.parts) for layer in self.layout.layers]

    def stale(self, message: Message, before: int) -> int:
        """Steps that a part lacks as it comes; without a bound, the updates of others since the edition before."""
        if self.bound is not None:
            return max(0, message.clock - message.number)
        return max(0, message.number - before - 1) if before >= 0 else 0

    def codec(self) -> Codec:
        """The codec that the server tells its workers to push with."""
        push = self.tell.get("push", 0.01)
        if not isinstance(push, str | float | int):
            raise MessageError("the server's push must be the name of a codec or a density")
        try:
            return named_codec(push)
        except ValueError as error:
            raise MessageError(f"the server's terms make no sense: {error}") from error


def _seconds(terms: dict[str, Any]) -> float:
    value = terms.get("timeout")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise MessageError("timeout must be a number of seconds")
    return float(value)
