"""What tests of several files here need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.batches import MakeBatch, World


@pytest.fixture
def world(make_batch: MakeBatch) -> Iterator[World]:
    made = World(make_batch)
    yield made
    taken = [held.batch_id for held in made.arrivals]
    assert len(taken) == len(set(taken)), "a batch was reported twice"
