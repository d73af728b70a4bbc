"""Sealing: datagrams that only the other side of a session can have made, and that count once.

AES-GCM with a key for each direction; the nonce is a counter that travels in the clear, and a window of recent
counters finds what is sent again. See docs/udp.md.
"""

import secrets
from collections import Counter

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from thinwire import _native

# magic and version; in the clear, and authenticated, follow the session and the counter
PREFIX = b"TWU\x01"
_SESSION_BYTES, _COUNTER_BYTES, _TAG_BYTES = 4, 8, 16
KEY_BYTES = 32
OVERHEAD = len(PREFIX) + _SESSION_BYTES + _COUNTER_BYTES + _TAG_BYTES
# Counters behind the newest that may still come: reordering on a path is far below it.
WINDOW = 1 << 14

Split = tuple[int, int, bytes, bytes, bytes]  # session, counter, nonce, what is in the clear, what is sealed


def new_keys() -> bytes:
    """A key for each direction: the server's first."""
    return secrets.token_bytes(2 * KEY_BYTES)


def split(datagram: bytes) -> Split | None:
    """A datagram's parts, none of them believed yet; None if it is none of thinwire's."""
    return _native.split_datagram(datagram, PREFIX, OVERHEAD)


class Sealer:
    """One direction's sender."""

    def __init__(self, session: int, key: bytes) -> None:
        self._session, self._cipher, self._counter = session, AESGCM(key), 0

    def seal(self, plain: bytes) -> bytes:
        """A datagram; no two have the same counter."""
        return self.seal_all([plain])[0]

    def seal_all(self, plains: list[bytes]) -> list[bytes]:
        """A datagram for each."""
        encrypt = self._cipher.encrypt
        labelled = _native.label_datagrams(plains, PREFIX, self._session, self._counter + 1)
        self._counter += len(plains)
        return [clear + encrypt(nonce, plain, clear) for nonce, plain, clear in labelled]


class Opener:
    """One direction's receiver; `rejected` counts what was not believed, by reason."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._newest, self._seen = 0, bytearray(WINDOW)  # of the newest counters, each at its remainder: has it come?
        self.rejected: Counter[str] = Counter()

    def open(self, datagram: Split) -> bytes | None:
        """What was sealed; None, and nothing changes, for a datagram that is forged or has come before."""
        _, counter, nonce, clear, sealed = datagram
        age = self._newest - counter
        if age >= 0 and (age >= WINDOW or self._seen[counter % WINDOW]):
            self.rejected["replayed"] += 1
            return None
        try:
            plain = self._cipher.decrypt(nonce, sealed, clear)
        except InvalidTag:
            self.rejected["forged"] += 1
            return None
        if age < 0:
            if age < -1:
                for skipped in range(max(self._newest + 1, counter - WINDOW + 1), counter):
                    self._seen[skipped % WINDOW] = 0
            self._newest = counter
        self._seen[counter % WINDOW] = 1
        return plain
