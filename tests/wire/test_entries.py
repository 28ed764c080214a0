"""Entries are counted as protobuf would find them, and no further than is allowed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juggler.runtime.wire.entries import count_entries
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1 import spaces_pb2, training_pb2


def test_values_of_repeated_fields_and_of_maps_are_entries_and_packed_ones_are_one() -> None:
    receipt = training_pb2.Receipt(
        batch_id=2**63,
        learner="learner-0",
        episode_returns=[1.0] * 1000,
        seconds={str(number): 1.0 for number in range(300)},
        connector_delta=b"x" * 100_000,
    )
    assert count_entries(receipt.SerializeToString(), 10_000) == 2 + 1 + 300 + 1
    hashed = training_pb2.GroupFormed(state_hash=1, update=2, peer_lost="x")
    assert count_entries(hashed.SerializeToString(), 3) == 3
    assert count_entries(spaces_pb2.Space().SerializeToString(), 0) == 0


def test_one_entry_too_many_is_refused_before_the_rest_is_looked_at() -> None:
    message = b"\x0a\x00" * 3_500_000
    began = time.process_time()
    with pytest.raises(WireError, match="a message of over 1000 entries"):
        count_entries(message, 1000)
    assert time.process_time() - began < 0.5


@given(st.binary(max_size=100))
def test_whatever_comes_is_counted_or_refused(message: bytes) -> None:
    try:
        count = count_entries(message, 20)
    except WireError:
        count = 0
    assert 0 <= count <= min(20, len(message))


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30))
def test_a_good_message_has_as_many_entries_as_it_was_given(ids: list[int]) -> None:
    arrivals = training_pb2.Arrivals(
        arrivals=[training_pb2.Arrival(batch_id=batch_id, live_steps=1) for batch_id in ids]
    )
    assert count_entries(arrivals.SerializeToString(), 30) == len(ids)
