"""Mtu: how large a datagram may be; needs no library, so that a command line can be checked without one."""

MTU = 1400
LARGEST_DATAGRAM = 9216


def check_mtu(mtu: int) -> int:
    """Bytes of a datagram; ValueError if frames would not fit, or networks would cut it."""
    if not 256 <= mtu <= LARGEST_DATAGRAM:
        raise ValueError(f"--mtu is from 256 to {LARGEST_DATAGRAM} bytes, not {mtu}")
    return mtu
