"""Datagrams: what both sides of the udp transport have in common: sizes, the way in, and figures for people."""

import struct
import time
from collections.abc import Sequence

from thinwire.transport.base import Buffer
from thinwire.transport.engine import Engine
from thinwire.transport.envelope import DATA_BYTES, Kind
from thinwire.transport.path import Path
from thinwire.transport.pieces import MOST_PIECES, pack_all
from thinwire.transport.sealing import OVERHEAD

# What a worker is told of its session: number, port, mtu; after it the keys.
SESSION = struct.Struct("<IHH")
TOKEN_BYTES = 8
# Seconds between two lines on a path in the log.
TOLD_EVERY = 30.0
# A message's head that every datagram repeats.
HEAD_BYTES = 48


def piece_bytes(mtu: int) -> int:
    """What a datagram has room for."""
    return mtu - OVERHEAD - DATA_BYTES - HEAD_BYTES


def send_pieces(engine: Engine, path: Path, head: bytes, pieces: Sequence[Buffer]) -> int | None:
    """Send a message in datagrams, or reliably where they do not pass; its ticket, or None if all will arrive."""
    if len(head) > HEAD_BYTES:
        raise ValueError(f"a head has at most {HEAD_BYTES} bytes, not {len(head)}")
    with engine.lock:
        if not pieces or len(pieces) > MOST_PIECES or not path.can_send(time.monotonic()):
            path.put(Kind.WHOLE, [head, pack_all(pieces)])
            return None
        ticket = path.submit(head, pieces)
        engine.pump(path)
        if path.queue:
            engine.poke()
    return ticket


def figures(path: Path) -> dict[str, float]:
    """What there is to know of a path."""
    gathering, sent = path.gathering, path.counts["sent"]
    missing = gathering.lost / max(gathering.lost + gathering.received, 1)
    return {
        "datagrams_sent": sent,
        "datagrams_lost": path.counts["lost"],
        "datagrams_received": gathering.received,
        "datagrams_missing": gathering.lost,
        "loss_sent": path.counts["lost"] / max(sent, 1),
        "loss_received": missing,
        "late": gathering.late,
        "repeated": gathering.repeated,
        "forged": path.opener.rejected["forged"],
        "replayed": path.opener.rejected["replayed"],
        "rate": path.pacer.rate,
        "round_trip": path.pacer.trip,
    }
