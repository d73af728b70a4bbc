"""Packed messages of the mpi transport: they are unpacked exactly, and malformed bytes are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.transport.base import MOST_PARTS
from thinwire.transport.mpi import NAME_BYTES, goodbye, pack, unpack

names = st.binary(min_size=NAME_BYTES, max_size=NAME_BYTES)
messages = st.lists(st.binary(max_size=50), min_size=1, max_size=MOST_PARTS)


@given(names, messages)
def test_unpack_inverts_pack(name: bytes, parts: list[bytes]) -> None:
    back_name, back = unpack(pack(name, parts))
    assert (back_name, [bytes(part) for part in back]) == (name, parts)
    assert unpack(goodbye(name)) == (name, [])


@given(names, messages, st.data())
def test_a_wrong_length_is_refused(name: bytes, parts: list[bytes], data: st.DataObject) -> None:
    whole = pack(name, parts)
    with pytest.raises(ValueError):
        unpack(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ValueError):
        unpack(whole + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_are_a_message(garbage: bytes) -> None:
    try:
        name, parts = unpack(garbage)
    except ValueError:
        return
    assert garbage == (pack(name, parts) if parts else goodbye(name))
