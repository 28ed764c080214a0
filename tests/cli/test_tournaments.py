"""`juggler league RUN --tournament`: who plays which agents, and who has won."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.commands import status_of

from juggler.cli import league
from juggler.driver import line_ups
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.league.roster import Player
from juggler.driver.line_ups import PlayedMatches, _Seats
from juggler.policies.matches import Match
from juggler.runtime.checkpoints.checkpoint import Checkpoint

PLAYERS = [Player(name, "main", learning=True, source="initial") for name in ("a", "b", "c")]
#: What an agent gets in each match, by who plays it.
GETS = {"a": 1.0, "b": 0.8, "c": 0.2}


def config(agents: str, **league_keys: Any) -> RunConfig:
    players = ["main-0", "main-1"]
    return RunConfig.from_flat(
        {
            "env": "juggler:MatrixGame",
            "agents": dict.fromkeys(agents, players),
            "league": {"builder": "none", "options": {"mains": 2}, **league_keys},
        }
    )


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Of a run whose matches need no environment."""

    def play(
        path: Path, seated: Mapping[str, str], episodes: int, *_: Any, watch: Any, **__: Any
    ) -> Any:
        for ended in range(episodes + 1):
            watch(ended, 7)
        returns = {agent: GETS[who] for agent, who in seated.items()}
        return PlayedMatches(path, dict(seated), [Match(returns, {})] * episodes, {}, [])

    monkeypatch.setattr(line_ups, "play_matches", play)
    path = tmp_path / "run/checkpoints/1"
    return Checkpoint((1, 1), {}, {}, {}, {}, {}, path=path)


def test_teams_play_each_other_and_a_draw_is_within_the_margin(checkpoint: Checkpoint) -> None:
    teams = config("wxyz", teams=[["w", "y"], ["x", "z"]], draw_margin=0.5)
    payoffs = league._tournament(PLAYERS, checkpoint, teams, 4)
    assert [payoffs.games(*pair) for pair in ("ab", "ac", "bc")] == [4, 4, 4]
    assert payoffs.counts("a", "b") == (0, 4, 0)  # 2.0 and 1.6
    assert payoffs.counts("a", "c") == (4, 0, 0)
    assert payoffs.counts("c", "b") == (0, 0, 4)


def test_a_line_now_and_then_says_how_many_matches_are_over(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("juggler.cli.playing.PROGRESS_SECONDS", 1e9)
    league._tournament(PLAYERS, checkpoint, config("xy"), 4)
    assert capsys.readouterr().err == "", "it was over before a line was due"
    monkeypatch.setattr("juggler.cli.playing.PROGRESS_SECONDS", 0.0)
    league._tournament(PLAYERS, checkpoint, config("xy"), 4)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "0 of 12 matches"
    assert said[-1] == "11 of 12 matches"


def test_more_than_two_sides_are_told(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="teams"):
        league._tournament(PLAYERS, checkpoint, config("xyz"), 4)


@pytest.mark.parametrize("matches", [-1, 0, 1])
def test_too_few_matches_are_refused(matches: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("league", "run", "--tournament", matches) == 2
    told = f"--tournament {matches}: every pair of players plays at least 2 matches"
    assert told in capsys.readouterr().err


def test_copies_are_among_those_who_can_be_named(checkpoint: Checkpoint) -> None:
    assert checkpoint.path is not None
    (checkpoint.path.parents[1] / "frozen" / "main-0-v1").mkdir(parents=True)
    seats = _Seats(checkpoint.path, ("main-0",), 0, False)
    told = "neither a module or a copy of this run .*: known are main-0, main-0-v1, random$"
    with pytest.raises(ConfigError, match=told):
        seats._policy("xyz")
