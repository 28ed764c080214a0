"""Numbers are written and read as protobuf does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1.episodes_pb2 import Acknowledgement
from juggler.runtime.wire.varints import read_varint, write_varint

numbers = st.integers(0, 2**64 - 1) | st.integers(0, 63).map(lambda bits: 2**bits)


@given(numbers, st.binary(max_size=3), st.binary(max_size=3))
def test_a_number_has_protobufs_bytes_and_is_read_from_between_others(
    number: int, before: bytes, behind: bytes
) -> None:
    written = write_varint(number)
    key = b"\x08"
    assert Acknowledgement.FromString(key + written).batch_id == number
    if number:  # protobuf leaves out 0
        assert Acknowledgement(batch_id=number).SerializeToString() == key + written
    end = len(before) + len(written)
    assert read_varint(before + written + behind, len(before)) == (number, end)
    with pytest.raises(WireError, match=f"no number at byte {len(before)}"):
        read_varint(before + written[:-1], len(before))


def test_a_number_of_too_many_bytes_is_none() -> None:
    assert read_varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
    assert read_varint(b"\xff" * 9 + b"\x7f", 0) == (2**64 - 1, 10), "bits beyond are left out"
    with pytest.raises(WireError, match="no number at byte 0"):
        read_varint(b"\xff" * 10 + b"\x01", 0)
