"""Headers: nothing that was changed, moved or made up passes for a record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.cache.tiers.record import (
    HEADER,
    SEGMENT_HEADER,
    TRAILER,
    VERSION,
    Fault,
    Header,
    Kind,
    Queue,
    digest,
    extent,
    pack,
    pack_segment,
    pack_trailer,
    unpack,
    unpack_segment,
    unpack_trailer,
)  # fmt: skip

EXAMPLE = Header(Kind.BLOCK, 196608, 1_764_547_200_000_000_000, b"i" * 32, b"o" * 16, digest(b"payload"), b"k" * 34)


@given(
    st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(min_size=32, max_size=32),
    st.binary(min_size=16, max_size=16), st.binary(max_size=64), st.integers(0, 2**64 - 1), st.integers(0, 2**40),
)  # fmt: skip
def test_a_header_comes_back_as_it_was(kind, length, written, identity, owner, key, number, offset):
    header = Header(kind, length, written, identity, owner, digest(key), key)
    packed = pack(header, number, offset)
    assert len(packed) == HEADER == 192
    assert unpack(packed, number, offset) == header


@given(st.integers(0, HEADER * 8 - 1))
def test_no_bit_can_flip_unnoticed(bit):
    packed = bytearray(pack(EXAMPLE, 7, 64))
    packed[bit // 8] ^= 1 << bit % 8
    assert isinstance(unpack(packed, 7, 64), Fault)


@pytest.mark.parametrize(("number", "offset"), [(8, 64), (7, 128), (0, 0)])
def test_a_header_is_valid_in_its_own_place_only(number, offset):
    assert unpack(pack(EXAMPLE, 7, 64), number, offset) is Fault.HEADER


def test_what_is_wrong_is_named():
    packed = pack(EXAMPLE, 7, 64)
    other = packed[:8] + (VERSION + 1).to_bytes(2, "little") + packed[10:]
    assert unpack(packed[:-1], 7, 64) is Fault.TRUNCATED
    assert unpack(bytes(HEADER), 7, 64) is Fault.BLANK
    assert unpack(other, 7, 64) is Fault.VERSION


@given(st.integers(0, 10**9))
def test_records_begin_at_multiples_of_64(length):
    assert extent(length) % 64 == 0
    assert HEADER + length <= extent(length) < HEADER + length + 64


def test_the_frame_of_a_segment():
    packed = pack_segment(7, Queue.COPIES, 99)
    assert len(packed) == SEGMENT_HEADER == TRAILER == 64
    assert unpack_segment(packed) == (7, Queue.COPIES, 99)
    assert unpack_trailer(pack_trailer(7, 4096), 7) == 4096
    assert unpack_trailer(pack_trailer(7, 4096), 8) is None
    for bit in range(64 * 8):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        assert isinstance(unpack_segment(bytes(flipped)), Fault)
        flipped = bytearray(pack_trailer(7, 4096))
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack_trailer(bytes(flipped), 7) is None
