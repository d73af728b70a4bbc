"""Sealing: datagrams that only the other side of a session can have made, and that count once.

AES-GCM with a key for each direction; the nonce is a counter that travels in the clear, and a window of recent
counters finds what is sent again. See docs/udp.md.
"""

import secrets
import struct
from collections import Counter

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# magic, version, session, counter; all of it is authenticated
_CLEAR = struct.Struct("<3sBIQ")
_MAGIC, _VERSION = b"TWU", 1
_TAG_BYTES = 16
KEY_BYTES = 32
OVERHEAD = _CLEAR.size + _TAG_BYTES
# Counters behind the newest that may still come: reordering on a path is far below it.
WINDOW = 1 << 14


def new_keys() -> bytes:
    """A key for each direction: the server's first."""
    return secrets.token_bytes(2 * KEY_BYTES)


def session_of(datagram: bytes) -> int | None:
    """Which session a datagram claims to be of; None if it is none of thinwire's."""
    if len(datagram) < OVERHEAD:
        return None
    magic, version, session, _ = _CLEAR.unpack_from(datagram)
    return int(session) if (magic, version) == (_MAGIC, _VERSION) else None


class Sealer:
    """One direction's sender."""

    def __init__(self, session: int, key: bytes) -> None:
        self._session, self._cipher, self._counter = session, AESGCM(key), 0

    def seal(self, plain: bytes) -> bytes:
        """A datagram; no two have the same counter."""
        self._counter += 1
        clear = _CLEAR.pack(_MAGIC, _VERSION, self._session, self._counter)
        return clear + self._cipher.encrypt(self._counter.to_bytes(12, "little"), plain, clear)


class Opener:
    """One direction's receiver; `rejected` counts what was not believed, by reason."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._newest, self._seen = 0, bytearray(WINDOW)  # of the newest counters, each at its remainder: has it come?
        self.rejected: Counter[str] = Counter()

    def open(self, datagram: bytes) -> bytes | None:
        """What was sealed; None, and nothing changes, for a datagram that is forged or has come before."""
        clear = datagram[: _CLEAR.size]
        counter = _CLEAR.unpack(clear)[3]
        age = self._newest - counter
        if age >= 0 and (age >= WINDOW or self._seen[counter % WINDOW]):
            self.rejected["replayed"] += 1
            return None
        try:
            plain = self._cipher.decrypt(counter.to_bytes(12, "little"), datagram[_CLEAR.size :], clear)
        except InvalidTag:
            self.rejected["forged"] += 1
            return None
        if age < 0:
            for skipped in range(max(self._newest + 1, counter - WINDOW + 1), counter):
                self._seen[skipped % WINDOW] = 0
            self._newest = counter
        self._seen[counter % WINDOW] = 1
        return plain
