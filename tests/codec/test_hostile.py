"""Frames are validated before anything is written: a wrong frame raises a FrameError that names the fault."""

import struct

import pytest
import torch

import thinwire as tw
import thinwire.codec
from tests.codec import reference
from tests.codec.reference import varint
from tests.codec.reference_positions import Bits
from thinwire import _native
from thinwire.codec.values import Values

NUMELS = [600, 40, 0]


def small_frame(values: Values | None = None) -> bytes:
    g = torch.Generator().manual_seed(0)
    x = {"a": torch.randn(600, generator=g), "b": torch.randn(40, generator=g), "c": torch.empty(0)}
    codec = tw.Codec(tw.TopK(0.05, exact=True), values if values is not None else tw.Bits(4), min_numel=64)
    return bytes(codec.encode(x).tobytes())


def fixed(frame: bytes) -> bytes:
    """Return the same bytes with the correct length and checksum."""
    body = bytearray(frame)
    body[16:24] = struct.pack("<Q", len(body))
    view = torch.frombuffer(body[:12] + body[16:], dtype=torch.uint8)
    body[12:16] = struct.pack("<I", _native.crc32c(view.data_ptr(), len(view)))
    return bytes(body)


def framed(*sections: bytes, count: int | None = None) -> bytes:
    head = struct.pack("<4sBBHIIQ", b"TWFR", 1, 0, 0, len(sections) if count is None else count, 0, 0)
    return fixed(head + b"".join(sections))


def refused(data: bytes, numels: list[int] = NUMELS) -> str:
    """Return the message of the error; the outputs must not change."""
    outs = [torch.full((n if n < 10_000 else 0,), 7.0) for n in numels]
    with pytest.raises(tw.FrameError) as caught:
        tw.codec.FrameReader(tw.codec.Frame.from_bytes(data), numels).add_to(outs)
    assert all((out == 7.0).all() for out in outs)
    return str(caught.value)


def test_the_unchanged_frame_is_valid() -> None:
    assert fixed(small_frame()) == small_frame()
    assert [s.count for s in tw.codec.FrameReader(tw.codec.Frame.from_bytes(small_frame()), NUMELS).sections] == [
        30,
        40,
        0,
    ]


@pytest.mark.parametrize("values", [tw.Bits(4), tw.Unary()], ids=str)
def test_truncated_anywhere(values: Values) -> None:
    frame = small_frame(values)
    for length in range(len(frame)):
        refused(frame[:length])
        if length >= 24:
            refused(fixed(frame[:length]))


@pytest.mark.parametrize("values", [tw.Bits(4), tw.Unary()], ids=str)
def test_every_bit_flipped(values: Values) -> None:
    frame = small_frame(values)
    for bit in range(8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        refused(bytes(bad))


@pytest.mark.parametrize("values", [tw.Bits(4), tw.Unary()], ids=str)
def test_every_bit_flipped_with_a_valid_checksum(values: Values) -> None:
    """With a valid checksum a frame is either refused or well-formed, with positions inside of the tensors."""
    frame = small_frame(values)
    for bit in range(8 * 24, 8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            reader = tw.codec.FrameReader(tw.codec.Frame.from_bytes(fixed(bytes(bad))), NUMELS)
        except tw.FrameError:
            continue
        for section in reader.sections:
            positions, found = reader.entries(section)
            assert found.isfinite().all()
            assert (positions.diff() > 0).all() and (positions >= 0).all() and (positions < section.numel).all()


def section(
    *, id: int = 0, kind: int = 0, numel: bytes = varint(600), count: bytes = b"\x01\x00", rest: bytes = b""
) -> bytes:
    return varint(id) + bytes([kind]) + numel + count + rest


ONE = struct.pack("<f", 1.0)
RUN = b"\xff" + ONE  # one entry at position 0
UNARY = b"\x80\x3f\x80\x3f"  # both scales 1
INF, NAN = struct.pack("<f", float("inf")), struct.pack("<f", float("nan"))

HOSTILE: dict[str, tuple[bytes, str]] = {
    "count beyond the tensor": (framed(section(count=b"\x59\x02")), "claims 601 entries of 600"),
    "count beyond the bytes": (framed(section(count=b"\x58\x02", rest=b"\xff")), "more entries than its bytes"),
    "huge number of sections": (framed(section(rest=RUN), count=2**32 - 1), "ends within a section's id"),
    "unknown section": (framed(section(id=3, rest=RUN)), "section 3 is unknown: the receiver has 3 tensors"),
    "repeated section": (framed(section(rest=RUN), section(rest=RUN)), "section 0 is repeated or out of order"),
    "sections out of order": (
        framed(section(id=1, numel=b"\x28", count=b"\x00"), section(rest=RUN)),
        "section 0 is repeated or out of order",
    ),
    "unknown value format": (framed(section(kind=8, rest=RUN)), "value format 8 is unknown"),
    "unknown index coding": (framed(section(kind=0x30, rest=RUN)), "index coding 3 is unknown"),
    "unknown coding of a block": (framed(section(rest=b"\xf7" + ONE)), "index coding 247 of a block is unknown"),
    "wrong size": (framed(section(numel=varint(601), rest=RUN)), "has 601 elements, the receiver's tensor has 600"),
    "number beyond 64 bits": (framed(section(numel=b"\xff" * 9 + b"\x02")), "longer than 64 bits"),
    "number without an end": (framed(section(numel=b"\xff" * 12)), "longer than 64 bits"),
    "number padded with zeros": (framed(section(numel=b"\xd8\x84\x00", rest=RUN)), "not in its shortest form"),
    "bytes after the last section": (framed(section(rest=RUN + b"\x00")), "bytes are left after the last section"),
    "run beyond the end": (
        framed(section(id=1, numel=b"\x28", count=b"\x02", rest=b"\x63" + b"\x00" * 9 + RUN)),
        "outside",
    ),
    "position beyond the end": (framed(section(rest=b"\x27" + b"\xff\xff" + ONE)), "outside of its tensor"),
    "positions without an end": (framed(section(rest=b"\x00" * 90)), "outside of its tensor"),
    "positions cut short": (framed(section(rest=b"\x00" * 3)), "ends within the positions"),
    "padding of positions": (framed(section(rest=b"\x00\x81" + ONE)), "padding after a block's positions"),
    "values cut short": (framed(section(rest=b"\xff\x00")), "ends within a block's values"),
    "infinite value": (framed(section(rest=b"\xff" + INF)), "a value is not finite"),
    "infinite half": (framed(section(kind=1, rest=b"\xff\x00\x7c")), "a value is not finite"),
    "infinite brain half": (framed(section(kind=2, rest=b"\xff\x80\xff")), "a value is not finite"),
    "scale that is not a number": (framed(section(kind=3, rest=b"\xff" + NAN + ONE + b"\x00")), "a scale is negative"),
    "negative scale": (framed(section(kind=3, rest=b"\xff" + ONE + b"\x00\x00\x80\xbf\x00")), "a scale is negative"),
    "scales that overflow": (
        framed(section(kind=3, rest=b"\xff" + struct.pack("<ff", 2.0**121, 2.0**121) + b"\x7f")),
        "a scale is negative, too large",
    ),
    "padding of values": (
        framed(section(kind=4, rest=b"\xff" + ONE + ONE + b"\x10")),
        "padding after a block's values",
    ),
    "unary scales cut short": (framed(section(kind=7, rest=b"\xff\x80\x3f\x00")), "ends within a block's values"),
    "unary signs cut short": (framed(section(kind=7, rest=b"\xff" + UNARY)), "ends within a block's values"),
    "unary levels cut short": (framed(section(kind=7, rest=b"\xff" + UNARY + b"\x00")), "ends within a block's"),
    "negative unary scale": (framed(section(kind=7, rest=b"\xff\x80\xbf\x00\x00\x00\x01")), "a scale is negative"),
    "unary scale that overflows": (framed(section(kind=7, rest=b"\xff\x80\x3f\x81\x7b\x00\x01")), "too large"),
    "unary scale that is not a number": (framed(section(kind=7, rest=b"\xff\xc0\x7f\x00\x00\x00\x01")), "not a number"),
    "padding of unary signs": (
        framed(section(kind=7, rest=b"\xff" + UNARY + b"\x02\x01")),
        "padding after a block's values",
    ),
    "padding of unary levels": (
        framed(section(kind=7, rest=b"\xff" + UNARY + b"\x00\x05")),
        "padding after a block's values",
    ),
    "unary level beyond its bound": (
        framed(section(kind=7, rest=b"\xff" + UNARY + b"\x00\x04")),
        "levels of a block's",
    ),
    "unary levels without an end": (
        framed(section(kind=7, count=b"\x05\x00", rest=b"\xff" + UNARY + bytes(20))),
        "the levels of a block's values are too large",
    ),
    "strata without a seed": (framed(section(kind=0x10, rest=b"1234")), "ends within a section's seed"),
    "window without a start": (framed(section(kind=0x20, rest=b"1")), "ends within a section's start"),
    "window beyond the end": (
        framed(section(kind=0x20, rest=b"\x58\x02" + ONE)),
        "a window lies outside of its tensor",
    ),
    "window that begins outside": (framed(section(kind=0x20, rest=b"\xff\xff" + ONE)), "a window lies outside"),
    "empty window outside": (
        framed(section(kind=0x20, count=b"\x00\x00", rest=b"\x59\x02")),
        "a window lies outside of its tensor",
    ),
    "window of too many": (framed(section(kind=0x26, count=b"\x58\x02", rest=b"\x00\x00")), "more entries than its"),
    "window larger than the tensor": (
        framed(section(kind=0x26, count=b"\x59\x02", rest=b"\x00\x00")),
        "claims 601 entries of 600",
    ),
    "window with values cut short": (framed(section(kind=0x20, rest=b"\x00\x00" + ONE[:3])), "a block's values"),
    "strata of too many": (framed(section(kind=0x16, count=b"\x58\x02", rest=b"12345678")), "more entries than"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames(name: str) -> None:
    data, words = HOSTILE[name]
    assert words in refused(data)


@pytest.mark.parametrize(
    ("at", "bytes_", "words"),
    [
        (0, b"PK", "magic"),
        (4, b"\x02", "has version 2, this thinwire reads version 1"),
        (5, b"\x02", "reserved bit"),
        (5, b"\x01", "marked as not finite has sections"),
        (6, b"\x01", "reserved bit"),
        (7, b"\x80", "reserved bit"),
    ],
)
def test_wrong_headers(at: int, bytes_: bytes, words: str) -> None:
    frame = bytearray(small_frame())
    frame[at : at + len(bytes_)] = bytes_
    assert words in refused(fixed(bytes(frame)))


def test_lengths() -> None:
    frame = small_frame()
    assert "1 bytes follow the end" in refused(frame + b"\x00")
    assert "truncated" in refused(frame[:16] + struct.pack("<Q", 2**63) + frame[24:])
    assert "shorter than the header" in refused(frame[:16] + struct.pack("<Q", 23) + frame[24:])
    assert "checksum" in refused(frame[:-1] + bytes([frame[-1] ^ 1]))
    assert "shorter than its header" in refused(b"")
    padded = tw.codec.FrameReader(tw.codec.Frame.from_bytes(frame + bytes(100)), NUMELS, trailing=True)
    assert padded.length == len(frame)


def test_a_position_outside_is_the_error_wherever_the_frame_ends_after_it() -> None:
    """The first fault in the order of the bytes is reported, however many gaps the reader decodes at a time."""
    bits = Bits()
    for i in range(200):  # 17 low bits after quotients of eight and, where a frame may end within them, of zero
        zeros = 0 if i % 3 == 2 else 8
        bits.put(1 << zeros, zeros + 3)
        bits.put(1, 17)
    for length in range(30, 300):
        rest = bytes([3 + 4 * 17]) + bits.bytes()[:length]
        assert "outside of its tensor" in refused(framed(section(count=b"\xc8\x00", rest=rest)))


def test_counts_of_huge_tensors_take_no_memory() -> None:
    numel = 2**50
    claim = section(numel=varint(numel), count=(2**49).to_bytes(7, "little"), rest=RUN * 100)
    assert "more entries than its bytes" in refused(framed(claim), [numel])


def test_the_largest_scales_stay_finite() -> None:
    data = framed(section(kind=3, rest=b"\xff" + struct.pack("<ff", 2.0**120, 2.0**120) + b"\x7f"))
    out = torch.zeros(600)
    tw.codec.FrameReader(tw.codec.Frame.from_bytes(data), NUMELS).add_to([out])
    assert out[0] == 2.0**127


def test_the_largest_scales_of_unary_values_stay_finite() -> None:
    scales = b"\x80\x7b\x80\x7b"  # both 2^120
    data = framed(section(kind=7, count=b"\x05\x00", rest=b"\xff" + scales + b"\x10" + b"\xe0\x03"))
    out = torch.zeros(600)
    tw.codec.FrameReader(tw.codec.Frame.from_bytes(data), NUMELS).add_to([out])
    assert out[:5].tolist() == [2.0**120] * 4 + [-(2.0**120)] and not out[5:].any()


def test_foreign_tensors_are_refused() -> None:
    for data in (torch.zeros(30), torch.zeros(3, 10, dtype=torch.uint8)):
        with pytest.raises(tw.FrameError, match="one-dimensional uint8"):
            tw.codec.FrameReader(data, NUMELS)


def test_outputs_of_another_kind_are_refused_before_anything_is_added() -> None:
    reader = tw.codec.FrameReader(tw.codec.Frame.from_bytes(small_frame()), NUMELS)
    good = torch.zeros(600)
    for bad in (torch.zeros(40, dtype=torch.float64), torch.zeros(80)[::2], torch.zeros(41)):
        with pytest.raises(ValueError, match="tensor 1"):
            reader.add_to([good, bad, torch.empty(0)])
        assert not good.any()


def test_a_section_of_another_frame_is_refused() -> None:
    one, two = (tw.codec.FrameReader(tw.codec.Frame.from_bytes(small_frame()), NUMELS) for _ in range(2))
    with pytest.raises(ValueError, match="another frame"):
        one.entries(two.sections[0])


def test_the_reference_agrees_on_what_is_well_formed() -> None:
    parts = reference.read_frame(small_frame())
    assert reference.write_frame([]) == framed()
    assert [len(p.positions) for p in parts] == [30, 40, 0]
