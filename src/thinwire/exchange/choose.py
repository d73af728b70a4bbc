"""Choice of an exchange by the bytes that a rank would send, and of the way of all-gathers by what messages cost.

Gather takes one round and ScatterReduce two: the second round must save more traffic than it costs in latency.
Recursive doubling sends fewer messages than a direct all-gather and waits for more of them after one another: it must
save more time per message than it costs in latency.
"""

import time
from collections.abc import Mapping

import torch

from thinwire.codec.codec import Codec
from thinwire.exchange.base import Dense, Exchange
from thinwire.exchange.channel import Channel, share
from thinwire.exchange.doubling import hops
from thinwire.exchange.gather import Gather, gathered_bytes
from thinwire.exchange.scatter_reduce import ScatterReduce

# Bytes per rank and step that ScatterReduce must save to be worth its second round: 8 ms at 500 Mbit/s.
_WORTH = 512 * 1024
# Bytes below which a bucket is gathered even then: what a round costs in waiting and computing, at 500 Mbit/s.
_SMALL = 128 * 1024

# Bytes of the messages that are timed to choose the way of all-gathers, and how many are timed of each.
_PROBE, _PROBES = 64, 5

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


def choose_doubling(channel: Channel) -> str:
    """Measure both ways of an all-gather and choose one for a channel; returns what was chosen, "" if nothing was.

    Call it on all ranks while nothing is under way; they choose alike. A way costs the time until the slowest rank has
    all messages, and the processor time of a rank, which its training has to do without. Both grow with the number of
    messages; on a long link the latency of those that wait for one another outweighs everything else. There it is
    enough to time each way once.
    """
    if not channel.can_double:
        return ""
    for doubling in (False, True):  # the first ones post receives
        _cost(channel, doubling)
    costs: dict[bool, float] = {}
    for probes in (1, _PROBES - 1):
        for doubling in (False, True):
            costs[doubling] = min(costs.get(doubling, float("inf")), *(_cost(channel, doubling) for _ in range(probes)))
        rows = share(channel, [costs[False], costs[True]])
        direct, doubled = (max(column) for column in zip(*rows, strict=True))
        channel.doubling = doubled < direct
        if doubled > 2.0 * direct:
            break
    doubles = channel.doubling
    count, way = (len(hops(channel.world)), "by recursive doubling") if doubles else (channel.world - 1, "directly")
    return f"{count} messages a rank {way} ({1e3 * direct:.2f} ms directly, {1e3 * doubled:.2f} ms by doubling)"


def _cost(channel: Channel, doubling: bool) -> float:
    """Seconds of an all-gather of empty messages, and of this rank's processor time in them."""
    channel.doubling = doubling
    began = time.perf_counter() + time.process_time()
    channel.gather(torch.zeros(_PROBE, dtype=torch.uint8), 0).finish()
    return time.perf_counter() + time.process_time() - began
