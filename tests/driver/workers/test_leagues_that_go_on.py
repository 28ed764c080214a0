"""What a league that goes on from a checkpoint makes of what was under way there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.league_run_world import Asked, Changing, resumed

from juggler.driver.checkpoint.frozen_modules import kept_modules
from juggler.driver.league.events import FreezePlayer
from juggler.driver.league_players import copies_of


@pytest.fixture
def world(tmp_path: Path) -> Changing:
    Asked.wanted.clear()
    return Changing(tmp_path)


def test_a_copy_that_not_every_envrunner_had_at_the_checkpoint_plays_when_the_run_goes_on(
    world: Changing, tmp_path: Path
) -> None:
    world.want(FreezePlayer("main-0"))
    world.send_weights(world.copies_asked_for()[-1])
    assert not world.plays("main-0-v0"), "it is on its way to the EnvRunner"
    saved = world.checkpoint()

    lost: list[str] = []
    frozen = kept_modules(tmp_path, copies_of(saved.counters), lost.append)
    again = resumed(tmp_path / "again", saved, frozen=frozen)
    assert not lost
    assert again.plays("main-0-v0")
