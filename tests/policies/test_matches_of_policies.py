"""Matches between policies that a script has loaded: what they draw, and by which seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from support import worlds

import juggler
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.record.checkpoints import write
from juggler.runtime.checkpoints.checkpoint import read

AGENTS = ("row", "column")


def hand() -> worlds.World:
    """Has the spaces of rock, paper, scissors."""
    return worlds.World(Box(0, 1, (1,), np.float32), Discrete(3))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a run of rock, paper, scissors."""
    saved = read(worlds.written(tmp_path / "alone", f"{__name__}:hand"))
    keys = {"env": "juggler:MatrixGame", "agents": dict.fromkeys(AGENTS, "default")}
    config = RunConfig.from_flat({**saved.config, **keys}).flat()
    modules = {"default": {"version": (1, 1), "extra": {}, "spaces": saved.spaces}}
    both = replace(saved, config=config, modules=modules, spaces={})
    return write(tmp_path / "both" / "checkpoints", both)


def loaded(checkpoint: Path) -> dict[str, str | juggler.Policy]:
    """A policy for each agent, from the same checkpoint."""
    return {agent: juggler.load_policy(checkpoint) for agent in AGENTS}


def results(
    checkpoint: Path, players: Mapping[str, str | juggler.Policy], seed: int = 0
) -> list[float]:
    """What "row" gets in each match; all three results are possible."""
    played = juggler.play_matches(checkpoint, players, 40, seed, explore=True)
    return [match.returns["row"] for match in played.matches]


def test_two_policies_of_one_checkpoint_draw_different_actions(checkpoint: Path) -> None:
    assert set(results(checkpoint, loaded(checkpoint))) == {-1.0, 0.0, 1.0}


def test_what_is_no_player_is_told_with_what_is_one(checkpoint: Path) -> None:
    players: dict[str, Any] = {"row": 3, "column": "random"}
    with pytest.raises(ConfigError, match="player"):
        juggler.play_matches(checkpoint, players, 1)


def test_the_seed_decides_how_given_policies_play_and_what_they_drew_before_does_not(
    checkpoint: Path,
) -> None:
    players = loaded(checkpoint)
    played = results(checkpoint, players, seed=3)
    assert results(checkpoint, players, seed=3) == played
    assert results(checkpoint, loaded(checkpoint), seed=3) == played
    assert results(checkpoint, loaded(checkpoint), seed=4) != played


def test_what_the_second_player_draws_is_not_what_the_first_one_does_with_the_next_seed(
    checkpoint: Path,
) -> None:
    first, second = [], []
    told = read(checkpoint)
    payoffs = {"payoffs": [[0, 1, 2], [3, 4, 5], [6, 7, 8]]}  # so that they tell both actions
    told = replace(told, config={**told.config, "env_kwargs": payoffs})
    where = write(checkpoint.parent / "told", told)
    for seed in range(4):
        drawn = [divmod(got, 3) for got in results(where, loaded(where), seed)]
        first.append(tuple(row for row, _ in drawn))
        second.append(tuple(column for _, column in drawn))
    assert len({*first, *second}) == 8


def test_policies_play_as_the_modules_do_that_they_were_loaded_from(checkpoint: Path) -> None:
    given = {"row": loaded(checkpoint)["row"], "column": "random"}
    named = {"row": "default", "column": "random"}
    assert results(checkpoint, given) == results(checkpoint, named)


def test_the_rule_of_a_runs_league_decides_who_wins(checkpoint: Path) -> None:
    saved = read(checkpoint)
    league = {"builder": "none", "draw_margin": 2.0}
    write(checkpoint.parent, replace(saved, config={**saved.config, "league": league}))
    players = {"row": "random", "column": "random"}
    played = juggler.play_matches(checkpoint, players, 20)
    assert {match.returns["row"] for match in played.matches} > {0.0}
    assert played.records["row"].draws == 20
