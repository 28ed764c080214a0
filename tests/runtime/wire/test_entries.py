"""Entries are counted as protobuf would find them, and no further than is allowed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juggler.runtime.wire.entries import check_entries
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1 import training_pb2

SECONDS = {str(number): 1.0 for number in range(300)}
#: Of all wire types, in order of their numbers: 2 numbers, 2 packed, a map, a hash, some bytes.
SEVERAL = training_pb2.Receipt(
    batch_id=2**63,
    episode_returns=[1.0] * 1000,
    episode_lengths=[2**31] * 1000,
    seconds=SECONDS,
    connector_delta=b"x" * 100_000,
    stale_steps=1,
)


@pytest.mark.parametrize(
    ("message", "entries"),
    [
        (SEVERAL, 2 + 2 + 300 + 1),
        (training_pb2.GroupFormed(state_hash=1, update=2, peer_lost="x" * 100), 3),
        (training_pb2.Arrivals(arrivals=[training_pb2.Arrival(batch_id=2**40)] * 500), 500),
    ],
)
def test_values_of_repeated_fields_and_of_maps_are_entries_and_packed_ones_are_one(
    message: training_pb2.Receipt, entries: int
) -> None:
    check_entries(message.SerializeToString(), entries)
    with pytest.raises(WireError, match=f"a message of over {entries - 1} entries"):
        check_entries(message.SerializeToString(), entries - 1)


def test_one_entry_too_many_is_refused_before_the_rest_is_looked_at() -> None:
    message = b"\x0a\x00" * 3_500_000
    began = time.process_time()
    with pytest.raises(WireError, match="entries"):
        check_entries(message, 1000)
    assert time.process_time() - began < 0.5


def test_entries_cannot_hide_behind_a_group() -> None:
    group = b"\x7b\x7c"  # begins and ends
    with pytest.raises(WireError, match="a message with groups"):
        check_entries(group + b"\x0a\x00" * 3000, 1000)


@given(st.binary(max_size=200), st.integers(0, 20))
def test_whatever_comes_is_let_pass_or_refused(message: bytes, most: int) -> None:
    try:
        check_entries(message, most)
    except WireError:
        assert len(message) > 2 * most


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30), st.integers(0, 30))
def test_a_good_message_has_as_many_entries_as_it_was_given(ids: list[int], most: int) -> None:
    arrivals = training_pb2.Arrivals(
        arrivals=[training_pb2.Arrival(batch_id=batch_id, live_steps=1) for batch_id in ids]
    )
    try:
        check_entries(arrivals.SerializeToString(), most)
    except WireError:
        assert len(ids) > most
    else:
        assert len(ids) <= most
