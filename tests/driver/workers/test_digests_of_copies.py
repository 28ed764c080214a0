"""A checkpoint knows what the copies of its league play with, so that none is taken for another."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.league_run_world import Asked, Changing

from juggler.driver.checkpoint.books import must_be_sound
from juggler.driver.checkpoint.frozen_modules import kept_modules
from juggler.driver.league.events import FreezePlayer, RetirePlayer
from juggler.driver.league_players import copies_of
from juggler.runtime.checkpoints.checkpoint import Checkpoint

COPIES = ("main-0-v0", "main-0-v1", "main-0-v2")


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    """A checkpoint of a league with three copies, one that has left, and one on its way."""
    Asked.wanted.clear()
    world = Changing(tmp_path)
    for scale, copy_id in enumerate([*COPIES, "main-0-v3"]):
        world.want(FreezePlayer("main-0"))
        world.send_weights(world.copies_asked_for()[-1], scale=scale)
        world.take_parts()
        assert world.plays(copy_id)
    world.want(RetirePlayer("main-0-v3"))
    world.want(FreezePlayer("main-0"))
    world.answered.add(world.copies_asked_for()[-1])  # not yet
    checkpoint = world.checkpoint()
    must_be_sound(checkpoint)
    return checkpoint


def test_copies_that_are_exchanged_for_each_other_are_told(
    saved: Checkpoint, tmp_path: Path
) -> None:
    one, other = (tmp_path / "frozen" / each for each in COPIES[:2])
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    told: list[str] = []

    found = kept_modules(tmp_path, copies_of(saved.counters), told.append)

    assert [*found] == [COPIES[2]]
    assert told[:2] == [
        f"league: there is no copy {each.name} any more, and nobody plays it: {each} has other "
        "weights than were copied"
        for each in (one, other)
    ]
    assert len(told) == 3, "the last was not made yet"


def test_copies_of_a_checkpoint_without_digests_are_taken_as_they_are(
    saved: Checkpoint, tmp_path: Path
) -> None:
    counters = {key: value for key, value in saved.counters.items() if key != "copies"}
    assert copies_of(counters) == dict.fromkeys([*COPIES, "main-0-v4"], "")
    found = kept_modules(tmp_path, copies_of(counters), lambda _: None)
    assert [*found] == [*COPIES]
    assert {copy_id: each.digest for copy_id, each in found.items()} == saved.counters["copies"]
