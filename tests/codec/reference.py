"""A reader and a writer of frames in plain Python and torch, as docs/wire-format.md describes them.

It is slow and simple, and shares no code with the kernels: equal bytes mean that two implementations agree.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.codec.reference_positions import Bits, read_gaps, write_gaps

BLOCK = 512
FLOAT32, FLOAT16, BFLOAT16, BITS8, BITS4, BITS2, SIGN, UNARY = range(8)
WIDTH = {FLOAT32: 32, FLOAT16: 16, BFLOAT16: 16, BITS8: 8, BITS4: 4, BITS2: 2, SIGN: 1}
GAPS, STRATA, WINDOW = range(3)
LARGEST, SMALLEST = 2.0**120, 2.0**-100
MASK64 = (1 << 64) - 1


@dataclass
class Part:
    """One section: ascending positions and float32 values.

    `strata` is the seed that stands for the positions, `start` the first position of a window.
    """

    id: int
    format: int
    numel: int
    positions: list[int]
    values: Tensor
    strata: int | None = None
    start: int | None = None
    rounding: int | None = None  # the seed of stochastic rounding


# Numbers


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK64
    return x ^ x >> 31


def varint(x: int) -> bytes:
    out = bytearray()
    while x >= 128:
        out.append(x & 127 | 128)
        x >>= 7
    out.append(x)
    return bytes(out)


def count_width(numel: int) -> int:
    return max(1, -(-numel.bit_length() // 8))


def strata_positions(seed: int, count: int, numel: int) -> list[int]:
    places = []
    for j in range(count):
        low, high = j * numel // count, (j + 1) * numel // count
        places.append(low + ((mix((seed + j) & MASK64) >> 33) * (high - low) >> 31))
    return places


# Values


def fixed_mean(magnitudes: Tensor, largest: Tensor) -> Tensor:
    """Return the mean in integer multiples of 2^(e - 24), where the block's largest magnitude is below 2^e."""
    if not len(magnitudes):
        return torch.tensor(0.0)
    exponent = int(torch.frexp(largest).exponent)
    total = (magnitudes * torch.tensor(2.0 ** (24 - exponent))).long().sum()
    return (total.double() / len(magnitudes) * 2.0 ** (exponent - 24)).float()


def quantise(values: Tensor, code: int, rounding: int | None, counter: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes and the two scales of a block."""
    nothing = torch.tensor(0.0)
    values = values.clamp(-LARGEST, LARGEST)
    magnitudes, negative = values.abs(), values.signbit()
    largest, smallest = magnitudes.max(), magnitudes.min()
    if code == SIGN:
        codes = negative.long()
        if largest < SMALLEST:
            return codes, nothing, nothing
        return codes, fixed_mean(magnitudes[~negative], largest), fixed_mean(magnitudes[negative], largest)
    if largest < SMALLEST:
        return torch.zeros(len(values), dtype=torch.long), nothing, nothing
    top = (1 << (WIDTH[code] - 1)) - 1
    if code == BITS2 and rounding is None:
        up = magnitudes > fixed_mean(magnitudes, largest)
        base = fixed_mean(magnitudes[~up], largest)
        step = fixed_mean(magnitudes[up], largest) - base if up.any() else nothing
        levels = up.long()
    else:
        base, step = smallest, (largest - smallest) / top
        exact = (magnitudes - base) / step if step > 0 else torch.zeros_like(magnitudes)
        if rounding is not None:
            random = [mix((rounding + counter + i) & MASK64) >> 40 for i in range(len(values))]
            exact = (exact + torch.tensor(random, dtype=torch.float32) * 2.0**-24).floor()
        levels = exact.round().long().clamp(max=top)
    return negative.long() << (WIDTH[code] - 1) | levels, base, step


def unary_levels(values: Tensor) -> tuple[list[int], float, float]:
    """Return the levels of a block and its two scales before they are rounded to bfloat16."""
    magnitudes = values.abs().clamp(max=LARGEST)
    largest = magnitudes.max()
    if largest < SMALLEST:
        return [0] * len(values), 0.0, 0.0
    exponent = int(torch.frexp(largest).exponent)
    parts = [int(m) for m in (magnitudes * torch.tensor(2.0 ** (24 - exponent))).tolist()]
    excesses = [part - min(parts) for part in parts]
    mean = torch.tensor(sum(excesses) / len(parts), dtype=torch.float64).float()
    quotients = torch.tensor(excesses, dtype=torch.float32) / mean if mean > 0 else torch.zeros(len(parts))
    levels = [int(q) for q in quotients.tolist()]
    lowest = [part for part, level in zip(parts, levels, strict=True) if level == 0]
    first, squares = sum(lowest) / len(lowest), sum(level * level for level in levels)
    weighted = sum(level * part for level, part in zip(levels, parts, strict=True))
    second = (weighted - sum(levels) * first) / squares if squares else 0.0
    return levels, first * 2.0 ** (exponent - 24), second * 2.0 ** (exponent - 24)


def write_unary(values: Tensor) -> bytes:
    levels, *means = unary_levels(values)
    scales = torch.tensor(means, dtype=torch.float64).float().to(torch.bfloat16)
    scales[scales.float() < 2.0**-126] = 0.0
    negative = values.signbit().tolist() if scales.any() else [False] * len(values)
    signs, ones = Bits(), Bits()
    for sign in negative:
        signs.put(int(sign), 1)
    for level in levels:
        ones.put(1 << level, level + 1)
    return scales.view(torch.int16).numpy().tobytes() + signs.bytes() + ones.bytes()


def read_unary(data: bytes, n: int) -> tuple[Tensor, int]:
    first, second = torch.tensor(struct.unpack_from("<hh", data), dtype=torch.int16).view(torch.bfloat16).float()
    begin = 4 + -(-n // 8)
    signs, ones = Bits(data[4:begin]), Bits(data[begin : begin + -(-2 * n // 8)])
    negative = torch.tensor([signs.take(1) == 1 for _ in range(n)])
    levels = []
    for _ in range(n):
        level = 0
        while not ones.take(1):
            level += 1
        levels.append(level)
    assert sum(levels) <= n
    magnitudes = (first + second * torch.tensor(levels, dtype=torch.float32)).clamp(max=LARGEST)
    return torch.where(negative, -magnitudes, magnitudes), begin + -(-(n + sum(levels)) // 8)


def write_values(values: Tensor, code: int, rounding: int | None, counter: int) -> bytes:
    if code == FLOAT32:
        return values.numpy().tobytes()
    if code in (FLOAT16, BFLOAT16):
        dtype = torch.float16 if code == FLOAT16 else torch.bfloat16
        most = torch.finfo(dtype).max
        return values.clamp(-most, most).to(dtype).view(torch.int16).numpy().tobytes()
    if code == UNARY:
        return write_unary(values)
    codes, first, second = quantise(values, code, rounding, counter)
    bits = Bits()
    for c in codes.tolist():
        bits.put(c, WIDTH[code])
    return struct.pack("<ff", float(first), float(second)) + bits.bytes()


def read_values(data: bytes, code: int, n: int) -> tuple[Tensor, int]:
    if code == FLOAT32:
        return torch.tensor(struct.unpack_from(f"<{n}f", data)), 4 * n
    if code in (FLOAT16, BFLOAT16):
        dtype = torch.float16 if code == FLOAT16 else torch.bfloat16
        halves = torch.tensor(struct.unpack_from(f"<{n}h", data), dtype=torch.int16)
        return halves.view(dtype).float(), 2 * n
    if code == UNARY:
        return read_unary(data, n)
    width = WIDTH[code]
    size = 8 + -(-n * width // 8)
    first, second = torch.tensor(struct.unpack_from("<ff", data))
    bits = Bits(data[8:size])
    codes = torch.tensor([bits.take(width) for _ in range(n)])
    negative, levels = codes >> (width - 1) == 1, codes & ((1 << (width - 1)) - 1)
    if code == SIGN:
        return torch.where(negative, -second, first), size
    magnitudes = first + second * levels.float()
    return torch.where(negative, -magnitudes, magnitudes), size


# Frames


def write_frame(parts: list[Part], flags: int = 0) -> bytes:
    body = b"".join(_write_part(part) for part in parts)
    head = struct.pack("<4sBBHI", b"TWFR", 1, flags, 0, len(parts))
    tail = struct.pack("<Q", 24 + len(body)) + body
    return head + struct.pack("<I", crc32c(head + tail)) + tail


def _write_part(part: Part) -> bytes:
    n = len(part.positions)
    width = count_width(part.numel)
    coding = STRATA if part.strata is not None else WINDOW if part.start is not None else GAPS
    kind = part.format | coding << 4
    out = varint(part.id) + bytes([kind]) + varint(part.numel) + n.to_bytes(width, "little")
    if part.strata is not None:
        out += part.strata.to_bytes(8, "little")
    if part.start is not None:
        assert part.positions == list(range(part.start, part.start + n))
        out += part.start.to_bytes(width, "little")
    previous = -1
    for begin in range(0, n, BLOCK):
        positions = part.positions[begin : begin + BLOCK]
        if coding == GAPS:
            out += write_gaps(positions, previous)
            previous = positions[-1]
        out += write_values(part.values[begin : begin + BLOCK], part.format, part.rounding, begin)
    return out


def read_frame(data: bytes) -> list[Part]:
    magic, version, flags, reserved, sections = struct.unpack_from("<4sBBHI", data)
    crc, length = struct.unpack_from("<IQ", data, 12)
    assert (magic, version, reserved, length) == (b"TWFR", 1, 0, len(data)) and flags < 2
    assert crc == crc32c(data[:12] + data[16:])
    at, parts = 24, []
    for _ in range(sections):
        part, at = _read_part(data, at)
        parts.append(part)
    assert at == len(data)
    return parts


def _read_part(data: bytes, at: int) -> tuple[Part, int]:
    ident, at = _read_varint(data, at)
    kind, at = data[at], at + 1
    numel, at = _read_varint(data, at)
    width = count_width(numel)
    count, at = int.from_bytes(data[at : at + width], "little"), at + width
    part = Part(ident, kind & 15, numel, [], torch.empty(0))
    coding = kind >> 4
    assert coding in (GAPS, STRATA, WINDOW)
    if coding == STRATA:
        part.strata, at = int.from_bytes(data[at : at + 8], "little"), at + 8
        part.positions = strata_positions(part.strata, count, numel)
    if coding == WINDOW:
        part.start, at = int.from_bytes(data[at : at + width], "little"), at + width
        assert part.start + count <= numel
        part.positions = list(range(part.start, part.start + count))
    blocks, previous = [torch.empty(0)], -1
    for begin in range(0, count, BLOCK):
        n = min(BLOCK, count - begin)
        if coding == GAPS:
            positions, size = read_gaps(data[at:], n, previous)
            part.positions += positions
            previous, at = positions[-1], at + size
        values, size = read_values(data[at:], part.format, n)
        blocks.append(values)
        at += size
    part.values = torch.cat(blocks)
    return part, at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    x = shift = 0
    while True:
        x |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return x, at
