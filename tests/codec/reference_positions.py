"""The positions of a block as Golomb codes of gaps, in plain Python: the bit-level part of `reference`."""


def divisor(parameter: int) -> tuple[int, int]:
    return (parameter + 1, 0) if parameter < 3 else (4 + (parameter - 3) % 4, (parameter - 3) // 4)


def choose_parameter(gaps: int, n: int) -> int:
    mean, rest = divmod(gaps, n)
    target = mean // 65536 * 45426 + (mean % 65536 * 45426 + rest * 45426 // n + 57671) // 65536
    target += target // 16
    if target < 4:
        return max(target - 1, 0)
    shift = target.bit_length() - 3
    return 3 + 4 * shift + (target >> shift) % 4


class Bits:
    """A string of bits; the first one is the lowest of the first byte."""

    def __init__(self, data: bytes = b"") -> None:
        self.word, self.length, self.at = int.from_bytes(data, "little"), 8 * len(data), 0

    def put(self, value: int, width: int) -> None:
        self.word |= value << self.length
        self.length += width

    def take(self, width: int) -> int:
        assert self.at + width <= self.length
        self.at += width
        return self.word >> (self.at - width) & ((1 << width) - 1)

    def bytes(self) -> bytes:
        return self.word.to_bytes(-(-self.length // 8), "little")


def put_truncated(bits: Bits, r: int, m: int) -> None:
    width = (m - 1).bit_length()
    short = (1 << width) - m
    if r < short:
        bits.put(r, max(width - 1, 0))
    else:  # the upper bits first, the lowest bit last
        bits.put((r + short) >> 1, width - 1 if width else 0)
        bits.put((r + short) & 1, 1 if width else 0)


def take_truncated(bits: Bits, m: int) -> int:
    width = (m - 1).bit_length()
    if width == 0:
        return 0
    short = (1 << width) - m
    r = bits.take(width - 1)
    return r if r < short else (r << 1 | bits.take(1)) - short


def write_gaps(positions: list[int], previous: int) -> bytes:
    n = len(positions)
    gaps = positions[-1] - previous - n
    if gaps == 0:
        return b"\xff"
    parameter = choose_parameter(gaps, n)
    factor, shift = divisor(parameter)
    bits = Bits()
    for position in positions:
        gap, previous = position - previous - 1, position
        quotient, r = divmod(gap >> shift, factor)
        bits.put(1 << quotient, quotient + 1)
        put_truncated(bits, r, factor)
        bits.put(gap & ((1 << shift) - 1), shift)
    return bytes([parameter]) + bits.bytes()


def read_gaps(data: bytes, n: int, previous: int) -> tuple[list[int], int]:
    if data[0] == 255:
        return list(range(previous + 1, previous + 1 + n)), 1
    factor, shift = divisor(data[0])
    bits = Bits(data[1:])
    positions = []
    for _ in range(n):
        quotient = 0
        while not bits.take(1):
            quotient += 1
        high = quotient * factor + take_truncated(bits, factor)
        previous += 1 + (high << shift | bits.take(shift))
        positions.append(previous)
    return positions, 1 + -(-bits.at // 8)
