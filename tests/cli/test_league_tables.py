"""What `juggler league` prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from juggler.cli import league
from juggler.cli.arguments import parse
from juggler.cli.league import roster_lines, win_rate_lines
from juggler.driver import play_checkpoint
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.driver_config import AgentsConfig
from juggler.driver.league.results import Payoffs
from juggler.driver.league.roster import Player
from juggler.driver.play_checkpoint import PlayedMatches, _Seats
from juggler.policies.matches import PlayedMatch
from juggler.runtime.checkpoints.checkpoint import Checkpoint


def player(name: str, parent: str = "") -> Player:
    role = "historical" if parent else "main"
    return Player(name, role, not parent, "initial", parent, "main", ready=True)


def test_all_that_learn_and_the_newest_copies_have_a_column() -> None:
    players = [player("a"), player("b"), *(player(f"a-v{n}", "a") for n in range(15))]
    payoffs = Payoffs(0.5, 4)
    for _ in range(4):
        payoffs.book("a", "b", 1)
    payoffs.book("a", "a-v14", 0)
    head, of_a, of_b, unsure, few, left_out = win_rate_lines(players, payoffs)
    assert head.split()[2:] == ["#1", "#2", *(f"#{n}" for n in range(6, 18))]
    assert of_a.split() == ["1", "a", "-", "100%±34", *["-"] * 11, "~50%±45"]
    assert of_b.split()[:4] == ["2", "b", "0%±34", "-"]
    assert len(head) == len(of_a) == len(of_b)
    assert unsure == "#: the player of that number; ±: half the width of the 95 % interval"
    assert few == "~: of fewer than 4 games"
    assert left_out.startswith("3 older frozen players")


def test_a_table_of_win_rates_that_is_too_wide_goes_on_below_itself() -> None:
    players = [player("a"), player("b"), *(player(f"a-v{n}", "a") for n in range(12))]
    payoffs = Payoffs(0.5, 4)
    payoffs.book("a", "a-v11", 1)
    whole = win_rate_lines(players, payoffs)[:3]
    *lines, _, _ = win_rate_lines(players, payoffs, columns=40)
    assert max(map(len, lines)) <= 40
    assert lines[3] == lines[7] == ""
    width = len("wins of")
    again = [
        "".join([lines[row], lines[row + 4][width:]]) + lines[row + 8][width:] for row in range(3)
    ]
    assert again == whole


def test_columns_go_by_the_numbers_of_the_roster_so_that_long_names_make_none_wider() -> None:
    players = [player("main"), *(player(f"league_exploiter-0-v{n}", "main") for n in range(17))]
    payoffs = Payoffs(1.0, 1)
    for other in players[1:]:
        payoffs.book("main", other.player_id, 1)
    head, *roster = roster_lines(players, payoffs)
    assert head.split()[:2] == ["#", "player"]
    assert [line.split()[0] for line in roster] == [str(n) for n in range(1, 19)]
    table, *_ = win_rate_lines(players, payoffs, players)
    assert len(table) < 150
    numbers = [int(column.removeprefix("#")) for column in table.split()[2:]]
    assert [players[n - 1].player_id for n in numbers[-2:]] == [
        "league_exploiter-0-v15",
        "league_exploiter-0-v16",
    ]


def test_the_roster_says_how_many_games_a_rating_is_of() -> None:
    payoffs = Payoffs(0.5, 4)
    payoffs.book("a", "b", 1)
    head, of_a, _ = roster_lines([player("a"), player("b")], payoffs)
    assert head.split()[1:5] == ["player", "role", "steps", "games"]
    assert of_a.split()[4] == "1"


@pytest.mark.parametrize(
    "arguments", [["--league", "rllib"], ["--league=rllib"], ["--league", '{"builder": "rllib"}']]
)
def test_a_builder_may_be_given_by_its_name(arguments: list[str]) -> None:
    config = parse(AgentsConfig, [*arguments, "--mapping", "none"], "train")
    assert config.league == {"builder": "rllib"}


# `juggler league RUN --tournament`: which player plays which agents, and which has won.


PLAYERS = [Player(name, "main", learning=True, source="initial") for name in ("a", "b", "c")]
#: What an agent gets in each match, by the player that plays it.
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
        return PlayedMatches(path, dict(seated), [PlayedMatch(returns, {})] * episodes, {}, [])

    monkeypatch.setattr(play_checkpoint, "play_matches", play)
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
    monkeypatch.setattr("juggler.cli.evaluate.PROGRESS_SECONDS", 1e9)
    league._tournament(PLAYERS, checkpoint, config("xy"), 4)
    assert capsys.readouterr().err == "", "it was over before a line was due"
    monkeypatch.setattr("juggler.cli.evaluate.PROGRESS_SECONDS", 0.0)
    league._tournament(PLAYERS, checkpoint, config("xy"), 4)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "0 of 12 matches"
    assert said[-1] == "11 of 12 matches"


def test_more_than_two_sides_are_told(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="teams"):
        league._tournament(PLAYERS, checkpoint, config("xyz"), 4)


def test_copies_are_among_those_who_can_be_named(checkpoint: Checkpoint) -> None:
    assert checkpoint.path is not None
    (checkpoint.path.parents[1] / "frozen" / "main-0-v1").mkdir(parents=True)
    seats = _Seats(checkpoint.path, ("main-0",), 0)
    told = "neither a module or a copy of this run .*: known are main-0, main-0-v1, random$"
    with pytest.raises(ConfigError, match=told):
        seats._policy("xyz")
