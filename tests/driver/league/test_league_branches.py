"""Whom players of each role meet, and how often."""

from __future__ import annotations

from collections import Counter

import pytest
from support.league_world import Asking, begun, book_games, line_up

from juggler.driver.league.alphastar import AlphaStar
from juggler.driver.league.builder import LeagueBuilder
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.events import FreezePlayer, StepsTrained
from juggler.driver.league.league import League
from juggler.driver.league.rllib import Rllib
from juggler.driver.league.self_play import Fictitious, SelfPlay, SelfPlayWindow

DRAWS = 3000
#: Of Pearson's chi-square by degrees of freedom, at a level of 1 in 10,000.
LIMITS = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5}


def chi_square(counts: Counter[str], shares: dict[str, float]) -> float:
    assert set(counts) == set(shares)
    total = sum(counts.values())
    squares = {name: (counts[name] - share * total) ** 2 for name, share in shares.items()}
    return sum(squares[name] / (share * total) for name, share in shares.items())


def drawn(league: League, home: str) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Of line-ups for one player: the branches, and the opponents in each branch."""
    branches: Counter[str] = Counter()
    opponents: Counter[tuple[str, str]] = Counter()
    for _ in range(DRAWS):
        assigned = line_up(league)
        if assigned.home == home:
            (other,) = Counter(assigned.players.values()) - Counter([home])
            branches[assigned.branch] += 1
            opponents[assigned.branch, other] += 1
    return branches, opponents


def assert_frequencies(counts: Counter[str], shares: dict[str, float]) -> None:
    assert chi_square(counts, shares) < LIMITS[len(shares) - 1], (counts, shares)


def within(opponents: Counter[tuple[str, str]], branch: str) -> Counter[str]:
    return Counter({other: n for (where, other), n in opponents.items() if where == branch})


def league_of(inner: LeagueBuilder) -> tuple[League, Asking]:
    builder = Asking(inner=inner)
    return begun(LeagueConfig(min_games=1, decay=1.0, evaluation_probability=0.0), builder), builder


def copy(league: League, builder: Asking, player: str) -> None:
    league.book(StepsTrained(player, 10))
    builder.change(league, FreezePlayer(player))


def test_a_main_that_nobody_exploits_verifies_nothing() -> None:
    league, _ = league_of(AlphaStar(mains=1, main_exploiters=0, league_exploiters=0))
    branches, _ = drawn(league, "main-0")
    assert_frequencies(branches, {"pfsp": 0.5, "self-play": 0.5})


def test_a_main_meets_exploiters_that_beat_it() -> None:
    league, builder = league_of(AlphaStar(mains=1, main_exploiters=1, league_exploiters=0))
    copy(league, builder, "main_exploiter-0")
    copy(league, builder, "main_exploiter-0")
    book_games(league, "main-0", "main_exploiter-0-v0", wins=2, losses=8)  # weight 0.64
    book_games(league, "main-0", "main_exploiter-0-v1", wins=6, losses=4)  # weight 0.16

    branches, opponents = drawn(league, "main-0")

    assert_frequencies(branches, {"pfsp": 0.5, "verification": 0.15, "self-play": 0.35})
    shares = {"main_exploiter-0-v0": 0.8, "main_exploiter-0-v1": 0.2}
    assert_frequencies(within(opponents, "verification"), shares)
    shares = {"main-0-v0": 0.25, "main_exploiter-0-v0": 0.64, "main_exploiter-0-v1": 0.16}
    shares = {name: share / 1.05 for name, share in shares.items()}
    assert_frequencies(within(opponents, "pfsp"), shares)


def test_a_main_meets_copies_that_it_has_forgotten_to_beat() -> None:
    keys = {"pfsp_probability": 0.2, "verification_probability": 0.4, "forgotten_below": 0.6}
    league, builder = league_of(
        AlphaStar(mains=1, main_exploiters=0, league_exploiters=0, **keys)  # type: ignore[arg-type]
    )
    copy(league, builder, "main-0")
    copy(league, builder, "main-0")
    for version, wins in enumerate((5, 8, 7)):
        book_games(league, "main-0", f"main-0-v{version}", wins=wins, losses=10 - wins)

    branches, opponents = drawn(league, "main-0")

    assert_frequencies(branches, {"pfsp": 0.2, "verification": 0.4, "self-play": 0.4})
    shares = {"main-0-v0": 0.25 / 0.29, "main-0-v1": 0.04 / 0.29}  # not the monotonic suffix
    assert_frequencies(within(opponents, "verification"), shares)


def test_a_main_meets_copies_of_a_main_that_is_too_strong() -> None:
    league, _ = league_of(AlphaStar(mains=2, main_exploiters=0, league_exploiters=0))
    book_games(league, "main-0", "main-1", wins=3, losses=7)

    branches, opponents = drawn(league, "main-0")

    assert_frequencies(branches, {"pfsp": 0.5, "curriculum": 0.25, "self-play": 0.25})
    assert set(within(opponents, "curriculum")) == {"main-1-v0"}
    assert set(within(opponents, "self-play")) == {"main-0"}
    stronger, opponents = drawn(league, "main-1")
    assert_frequencies(stronger, {"pfsp": 0.5, "self-play": 0.5})
    assert_frequencies(within(opponents, "self-play"), {"main-0": 0.5, "main-1": 0.5})


def test_a_main_exploiter_meets_mains_or_copies_of_those_that_are_too_strong() -> None:
    league, builder = league_of(AlphaStar(mains=2, main_exploiters=1, league_exploiters=0))
    copy(league, builder, "main-1")
    book_games(league, "main_exploiter-0", "main-1", wins=1, losses=9)
    book_games(league, "main_exploiter-0", "main-1-v0", wins=5, losses=5)  # weight 0.25
    book_games(league, "main_exploiter-0", "main-1-v1", wins=1, losses=9)  # weight 0.09

    branches, opponents = drawn(league, "main_exploiter-0")

    assert_frequencies(branches, {"exploit": 0.5, "curriculum": 0.5})
    assert set(within(opponents, "exploit")) == {"main-0"}
    shares = {"main-1-v0": 0.25 / 0.34, "main-1-v1": 0.09 / 0.34}
    assert_frequencies(within(opponents, "curriculum"), shares)


def test_a_league_exploiter_meets_everybody_that_is_frozen() -> None:
    league, _ = league_of(AlphaStar(mains=2, main_exploiters=1, league_exploiters=1))
    book_games(league, "league_exploiter-0", "main-0-v0", wins=9, losses=1)  # weight 0.1

    branches, opponents = drawn(league, "league_exploiter-0")

    assert set(branches) == {"league"}
    assert_frequencies(within(opponents, "league"), {"main-0-v0": 1 / 6, "main-1-v0": 5 / 6})


def test_every_player_that_learns_has_as_many_matches() -> None:
    league, _ = league_of(AlphaStar(mains=1, main_exploiters=2, league_exploiters=1))
    homes = Counter(line_up(league).home for _ in range(DRAWS))
    assert_frequencies(homes, dict.fromkeys([p.player_id for p in league.roster.learners()], 0.25))


def test_home_plays_either_side_as_often() -> None:
    league, _ = league_of(Fictitious())
    rows = Counter(line_up(league).players["row"] for _ in range(DRAWS))
    assert_frequencies(rows, {"main-0": 0.5, "main-0-v0": 0.5})


def test_one_draw_decides_what_an_rllib_match_is_for() -> None:
    league, builder = league_of(
        Rllib(random_players=1, main_exploiters=1, league_exploiters=1, min_matches=1)
    )
    copy(league, builder, "main-0")
    branches: Counter[str] = Counter()
    for _ in range(DRAWS):
        assigned = line_up(league)
        branches[assigned.branch] += 1
        other = Counter(assigned.players.values()) - Counter([assigned.home])
        allowed = {
            "league_exploiter": {"random-0", "main-0-v0"},
            "main_exploiter": {"main-0", "main-0-v0"},
            "self-play": {"main-0"},
        }
        assert set(other) <= allowed[assigned.branch]
    shares = {"league_exploiter": 0.33, "main_exploiter": 0.33, "self-play": 0.34}
    assert_frequencies(branches, shares)


def test_self_play_has_no_other_opponents() -> None:
    league = begun(builder=SelfPlay())
    assert {tuple(line_up(league).players.values()) for _ in range(20)} == {("main-0", "main-0")}


@pytest.mark.parametrize(("window", "known"), [(2, [2, 3]), (10, [0, 1, 2, 3])])
def test_a_window_holds_the_newest_copies(window: int, known: list[int]) -> None:
    league, builder = league_of(SelfPlayWindow(window=window, latest_probability=0.4))
    for _ in range(3):
        copy(league, builder, "main-0")
    branches, opponents = drawn(league, "main-0")
    assert_frequencies(branches, {"self-play": 0.4, "past": 0.6})
    shares = {f"main-0-v{version}": 1 / len(known) for version in known}
    assert_frequencies(within(opponents, "past"), shares)
