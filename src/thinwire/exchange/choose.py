"""Choice of an exchange by the bytes that a rank would send, from the codec, the model's size and the number of ranks.

Gather takes one round and ScatterReduce two: the second round must save more traffic than it costs in latency.
"""

from collections.abc import Mapping

from thinwire.codec.codec import Codec
from thinwire.exchange.base import Dense, Exchange
from thinwire.exchange.gather import Gather, gathered_bytes
from thinwire.exchange.scatter_reduce import ScatterReduce

# Bytes per rank and step that ScatterReduce must save to be worth its second round: 8 ms at 500 Mbit/s.
_WORTH = 512 * 1024
# Bytes below which a bucket is gathered even then: what a round costs in waiting and computing, at 500 Mbit/s.
_SMALL = 128 * 1024

NAMES: dict[str, type[Exchange]] = {"dense": Dense, "gather": Gather, "scatter-reduce": ScatterReduce}


def choose_exchange(codec: Codec, sizes: Mapping[str, int], world: int) -> tuple[Exchange, str]:
    """An exchange, and the reason for it as the log shows it."""
    numels = list(sizes.values())
    gather = gathered_bytes(codec, numels, world)
    scatter = int(2.2 * gather / max(world - 1, 1))
    dense = 8 * sum(numels) * (world - 1) // max(world, 1)
    kb = f"{gather / 1e3:,.0f} kB a step and rank gathered, {scatter / 1e3:,.0f} scattered, {dense / 1e3:,.0f} dense"
    if not codec.selection.predictable:
        return Gather(), "gather: how many entries will pass is not known beforehand"
    if world > 1 and min(gather, scatter) >= dense:
        return Dense(), f"dense: the frames would be no smaller ({kb})"
    if gather - scatter > _WORTH:
        return ScatterReduce(gather_below=_SMALL), f"scatter-reduce: {kb}; small buckets are gathered"
    return Gather(), f"gather: {kb}"
