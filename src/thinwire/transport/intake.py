"""Intake: datagrams as they came are believed or not, and what is in them goes to their paths."""

import struct
from collections import Counter
from collections.abc import Mapping, Sequence

from thinwire import _native
from thinwire.errors import TransportError
from thinwire.transport.envelope import CONTROL, DATA, PROBE, read_control
from thinwire.transport.path import Path
from thinwire.transport.sealing import Split
from thinwire.transport.shares import SPAN

_DATA = bytes([DATA])


class Intake:
    """Takes datagrams in for some paths, by session; counts what makes no sense.

    finds: whether a datagram tells where its sender is, as a server must learn.
    """

    def __init__(self, paths: Mapping[int, Path], counts: Counter[str], *, finds: bool) -> None:
        self._paths, self._counts, self._finds = paths, counts, finds

    def take(self, datagrams: Sequence[tuple[Split, bytes, float]]) -> bool:
        """Datagrams, who sent them and when they came; True if their owner has something to do.

        Pieces of one path that came one after the other are read together.
        """
        news = False
        run: Path | None = None
        plains: list[bytes] = []
        stamps: list[float] = []
        for datagram, origin, stamp in datagrams:
            path = self._paths.get(datagram[0])
            if path is None:
                self._counts["foreign"] += 1
                continue
            plain = path.opener.open(datagram)
            if plain is None:
                continue
            if self._finds and path.origin != origin:
                news |= _found(path, origin)
            if plain[:1] != _DATA:
                if path is run:  # a word on pieces that came before it
                    news |= self._take_pieces(run, plains, stamps)
                    run = None
                news |= self._take_other(path, plain)
                continue
            if path is not run:
                news |= self._take_pieces(run, plains, stamps)
                run, plains, stamps = path, [], []
            plains.append(plain)
            stamps.append(stamp)
        return self._take_pieces(run, plains, stamps) or news

    def _take_pieces(self, path: Path | None, plains: list[bytes], stamps: list[float]) -> bool:
        if path is None:
            return False
        groups, broken = _native.read_data(plains, stamps, SPAN)
        if broken:
            self._counts["broken"] += broken
        return any([path.take_pieces(group) for group in groups])

    def _take_other(self, path: Path, plain: bytes) -> bool:
        try:
            if plain[0] == CONTROL:
                return path.take_control(*read_control(path.session, plain))
            if plain[0] != PROBE:
                raise TransportError("a datagram of a kind that there is not")
        except (TransportError, struct.error, IndexError):
            self._counts["broken"] += 1
        return False


def _found(path: Path, origin: bytes) -> bool:
    """A sender is there; whether it was unknown before."""
    first, path.origin, path.address = path.address is None, origin, _native.address_of(origin)
    if first:
        path.open_to_peer()
    return first
