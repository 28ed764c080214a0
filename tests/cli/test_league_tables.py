"""What `juggler league` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from juggler.cli.arguments import parse
from juggler.cli.league import kind_lines, roster_lines, run, win_rate_lines
from juggler.driver.agents_config import AgentsConfig
from juggler.driver.league.payoffs import KindCount, Payoffs
from juggler.driver.league.roster import Player


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


def test_a_league_in_which_nobody_can_play_yet_has_a_roster_without_players() -> None:
    (head,) = roster_lines([], Payoffs(0.5, 4))
    assert head.split()[:3] == ["#", "player", "role"]


def test_the_roster_says_how_many_games_a_rating_is_of() -> None:
    payoffs = Payoffs(0.5, 4)
    payoffs.book("a", "b", 1)
    head, of_a, _ = roster_lines([player("a"), player("b")], payoffs)
    assert head.split()[1:5] == ["player", "role", "steps", "games"]
    assert of_a.split()[4] == "1"


def test_within_a_role_there_are_no_sides() -> None:
    kinds = [KindCount("main", "main", 3, 1, 4), KindCount("historical", "main", 1, 0, 3)]
    assert kind_lines(Payoffs(1.0, 1, kinds=kinds))[1:] == [
        "  main among themselves: 12% drawn, 8 games",
        "  historical against main: 25% won, 0% drawn, 75% lost, 4 games",
    ]


@pytest.mark.parametrize(
    "arguments",
    [["--league", "rllib"], ["--league=rllib"], ["--league", '{"builder": "rllib"}']],
)
def test_a_builder_may_be_given_by_its_name(arguments: list[str]) -> None:
    config = parse(AgentsConfig, [*arguments, "--mapping", "none"], "train")
    assert config.league == {"builder": "rllib"}


def test_a_run_without_a_checkpoint_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / "checkpoints").mkdir()
    assert run([str(tmp_path)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "this run has made no checkpoint yet, which would have its league" in told
