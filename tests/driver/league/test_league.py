"""The league as a whole, its players' opponents, payoffs and ratings."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.league_world import AGENTS, Asking, asking, begun, book_games, finished, line_up, ready

from juggler.driver.league.builders import AlphaStar, Rllib, without_monotonic_suffix
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.league_builder import LeagueBuilder
from juggler.driver.league.pfsp import WEIGHTINGS, pfsp
from juggler.driver.league.ratings import elo, nash_averaging, nash_equilibrium
from juggler.driver.league.results import Payoffs
from juggler.driver.league.roster import (
    AddPlayer,
    AssignLineUp,
    FreezePlayer,
    ResetPlayer,
    RetirePlayer,
)
from juggler.driver.league.self_play import SelfPlayWindow
from juggler.policies.wilson import wilson

# Matches.


def test_returns_within_the_margin_are_a_draw() -> None:
    league, _ = asking(draw_margin=0.5)
    for returns, rate in (((1.0, 0.5), 0.5), ((1.0, 0.4), 0.75)):
        assigned = line_up(league)
        while assigned.players["row"] != "main-0":
            assigned = line_up(league)
        league.finish_match(*finished(assigned, *returns))
        assert league.payoffs.win_rate("main-0", "main-1") == rate


def test_every_two_teams_have_an_outcome() -> None:
    agents = ("a1", "a2", "b1", "b2", "c")
    config = LeagueConfig(teams=[["a1", "a2"], ["b1", "b2"]], min_games=1)
    league = begun(config, LeagueBuilder(mains=6), agents)
    assigned = line_up(league)
    while len(set(assigned.players.values())) < 3:
        assigned = line_up(league)
    assert assigned.players["a1"] == assigned.players["a2"]
    assert assigned.players["b1"] == assigned.players["b2"]

    league.finish_match(*finished(assigned, 1, 2, 5, -4, 3))  # 3, 1 and 3 for the teams

    a, b, c = (assigned.players[agent] for agent in ("a1", "b1", "c"))
    rates = [league.payoffs.win_rate(*pair) for pair in ((a, b), (b, c), (a, c))]
    assert rates == [1.0, 0.0, 0.5]
    assert league.payoffs.kinds["main", "main"].draws == 1


def test_matches_that_nobody_can_play_are_cancelled_until_somebody_is_back() -> None:
    league = begun()
    assigned = line_up(league)
    league.unready("main-0")
    assert not league.is_open(assigned.match_id)
    assert league.request_match() == []
    league.ready("main-0")
    assert line_up(league).match_id == assigned.match_id + 1


# Changes.


@pytest.mark.parametrize("keys", [{"min_games": 1}, {"min_games": 1, "recycled": "oldest"}])
def test_the_number_of_copies_is_bounded(keys) -> None:
    league, builder = asking(LeagueBuilder(), max_historical=3, **keys)
    commands = []
    for version in range(5):
        if version == 3:  # the second is beaten most often, and the newest is new
            for other, wins in enumerate((3, 9, 6)):
                book_games(league, "main-0", f"main-0-v{other}", wins, 10 - wins)
        league.trained("main-0", 10)
        commands += builder.change(league, FreezePlayer("main-0"))
    retired = [command.player_id for command in commands if isinstance(command, RetirePlayer)]
    oldest = keys.get("recycled") == "oldest"
    assert retired == (["main-0-v0", "main-0-v1"] if oldest else ["main-0-v1", "main-0-v2"])
    assert league.roster.players["main-0-v1"].parent == "main-0"  # the lineage is kept
    assert all("main-0-v1" not in pair for pair in league.payoffs.pairs)


def test_an_exploiter_is_copied_before_it_is_reset() -> None:
    builder = AlphaStar(mains=1, league_exploiters=0, main_exploiters=1, min_phase_steps=100)
    league = begun(LeagueConfig(), builder)
    exploiter = "main_exploiter-0"
    book_games(league, exploiter, "main-0", wins=20, losses=2)
    league.trained(exploiter, 99)
    assert league.build() == []

    league.trained(exploiter, 1)

    assert league.build() == [FreezePlayer(exploiter, f"{exploiter}-v0"), ResetPlayer(exploiter)]
    league.ready(exploiter)
    assert league.results().win_rate(exploiter, "main-0") == 0.5
    assert league.build() == []


def test_a_main_is_copied_when_it_beats_all_or_late_and_is_never_reset() -> None:
    builder = AlphaStar(
        mains=1, league_exploiters=0, main_exploiters=0, min_phase_steps=10, max_phase_steps=30
    )
    league = begun(LeagueConfig(min_games=5), builder)
    league.trained("main-0", 10)
    assert league.build() == []
    book_games(league, "main-0", "main-0-v0", wins=4, losses=0)
    assert league.build() == []  # too few games
    book_games(league, "main-0", "main-0-v0", wins=1, losses=0)
    assert ready(league, league.build()) == [FreezePlayer("main-0", "main-0-v1")]
    league.trained("main-0", 29)
    assert league.build() == []
    league.trained("main-0", 1)
    assert league.build() == [FreezePlayer("main-0", "main-0-v2")]


def test_after_the_last_copies_exploiters_retire_and_mains_learn_on() -> None:
    builder = AlphaStar(mains=1, league_exploiters=1, main_exploiters=1, last_copy_steps=150)
    builder.min_phase_steps, builder.max_phase_steps = 10, 30
    builder.league_reset_probability = 0.0
    league = begun(LeagueConfig(), builder)
    exploiters = ["main_exploiter-0", "league_exploiter-0"]
    league.trained(exploiters[0], 119)
    league.trained("main-0", 30)
    commands = ready(league, league.build())
    assert {type(command) for command in commands} == {FreezePlayer, ResetPlayer}

    league.trained("main-0", 1)  # the last of the steps

    assert league.build() == [RetirePlayer(exploiter) for exploiter in exploiters]
    league.trained("main-0", 1_000)
    assert league.build() == []
    drawn = [line_up(league) for _ in range(100)]
    copies = {"main-0-v0", "main-0-v1", "main_exploiter-0-v0"}
    assert {player for each in drawn for player in each.players.values()} == {"main-0", *copies}


def test_a_league_exploiter_is_reset_as_often_as_its_probability() -> None:
    builder = AlphaStar(mains=1, main_exploiters=0, league_exploiters=1, min_phase_steps=0)
    builder.max_phase_steps = 1
    league = begun(LeagueConfig(), builder)
    resets = 0
    for _ in range(400):
        league.trained("league_exploiter-0", 1)
        commands = ready(league, league.build())
        resets += ResetPlayer("league_exploiter-0") in commands
    assert 70 <= resets <= 130  # 100 ± 3.5 standard deviations


def test_rllib_copies_whoever_wins_often_enough() -> None:
    config = LeagueConfig(decay=1.0)
    league = begun(config, Rllib(min_matches=20, keep_training_probability=1.0))
    player = "league_exploiter-1"
    league.trained(player, 5)
    book_games(league, player, "random-0", wins=9, losses=0)
    book_games(league, player, "random-1", wins=9, losses=1)
    assert league.build() == []
    book_games(league, player, "random-1", wins=0, losses=1)
    copy_id = f"{player}-0"
    assert league.build() == [
        AddPlayer(copy_id, "league_exploiter", source=player),
        FreezePlayer(player, f"{player}-v0"),
    ]


def test_rllib_copies_a_player_that_always_wins_once_in_min_matches_games() -> None:
    league = begun(LeagueConfig(), Rllib(min_matches=100))
    copies = []
    for _ in range(40):
        book_games(league, "main-0", "random-0", wins=10, losses=0)
        league.trained("main-0", 1)
        ready(league, league.build())
        copies.append(league.roster["main-0"].copies)
    assert copies == [0] * 9 + [1] * 10 + [2] * 10 + [3] * 10 + [4]


@pytest.mark.parametrize("change", [FreezePlayer("main-0"), ResetPlayer("main-0")])
def test_games_against_others_count_from_the_last_copy_or_reset_on(change) -> None:
    league, builder = asking(LeagueBuilder(mains=2))
    main, other = league.roster["main-0"], league.roster["main-1"]
    league.finish_match(*finished(line_up(league), 1, -1))
    assert (main.phase_games, other.phase_games) == (1, 1)
    league.trained("main-0", 1)
    builder.change(league, change)
    assert (main.phase_games, other.phase_games) == (0, 1)


def test_a_match_of_a_player_that_is_reset_counts_for_no_player() -> None:
    league, builder = asking(LeagueBuilder(mains=2))
    league.trained("main-0", 1)
    assigned = line_up(league)
    assert league.is_open(assigned.match_id)
    builder.change(league, ResetPlayer("main-0"))
    assert not league.is_open(assigned.match_id)
    league.finish_match(*finished(assigned, 1, -1))
    assert league.payoffs.games("main-0", "main-1") == 0


# Whom players of each role meet, and how often.


DRAWS = 3000
#: Of Pearson's chi-square by degrees of freedom, at a level of 1 in 10,000.
LIMITS = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5}


def chi_square(counts: Counter[str], shares: dict[str, float]) -> float:
    assert set(counts) == set(shares)
    total = sum(counts.values())
    squares = {name: (counts[name] - share * total) ** 2 for name, share in shares.items()}
    return sum(squares[name] / (share * total) for name, share in shares.items())


def drawn(league: League, home: str) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Branches of line-ups for one player, with the opponents in each."""
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
    league.trained(player, 10)
    builder.change(league, FreezePlayer(player))


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


@pytest.mark.parametrize(("window", "known"), [(2, [2, 3]), (10, [0, 1, 2, 3])])
def test_a_window_holds_the_newest_copies(window: int, known: list[int]) -> None:
    league, builder = league_of(SelfPlayWindow(window=window, latest_probability=0.4))
    for _ in range(3):
        copy(league, builder, "main-0")
    branches, opponents = drawn(league, "main-0")
    assert_frequencies(branches, {"self-play": 0.4, "past": 0.6})
    shares = {f"main-0-v{version}": 1 / len(known) for version in known}
    assert_frequencies(within(opponents, "past"), shares)


# Matches of pairs of whom little is known.


def play(league: League, matches: int) -> list[AssignLineUp]:
    played = []
    for _ in range(matches):
        (line_up,) = league.request_match()
        assert isinstance(line_up, AssignLineUp)
        returns = dict.fromkeys(line_up.players, 0.0)
        league.finish_match(line_up.match_id, returns, 1)
        played.append(line_up)
    return played


def test_in_time_every_pair_has_played_enough() -> None:
    builder = AlphaStar(mains=2, main_exploiters=1, league_exploiters=1)
    league = begun(LeagueConfig(evaluation_probability=0.2, min_games=5), builder)
    played = play(league, 1500)
    players = league.results().players()
    assert any(not league.roster[player].learning for player in players)
    assert all(league.payoffs.games(*pair) >= 5 for pair in combinations(players, 2))
    late = [each for each in play(league, 500) if each.branch == "evaluation"]
    assert not late, "what is known needs no more games"
    assert 0 < sum(each.branch == "evaluation" for each in played) < 0.3 * len(played)


def test_they_may_be_turned_off_and_one_player_alone_has_none() -> None:
    league = begun(LeagueConfig(evaluation_probability=0.0), AlphaStar())
    assert not any(each.branch == "evaluation" for each in play(league, 300))
    alone = begun(LeagueConfig(evaluation_probability=0.5), LeagueBuilder(mains=1))
    assert not any(each.branch == "evaluation" for each in play(alone, 50))
    assert set(AGENTS) == set(play(alone, 1)[0].players)


# Elo, Nash averaging, and the payoffs that they are made of.


#: Small whole numbers, so that many games have several equilibria.
ENTRIES = st.integers(-2, 2)


@st.composite
def games(draw: st.DrawFn, most: int = 5) -> np.ndarray:
    count = draw(st.integers(1, most))
    matrix = np.zeros((count, count))
    for row, column in itertools.combinations(range(count), 2):
        matrix[row, column] = draw(ENTRIES)
    return (matrix - matrix.T) / 2


def vertices(matrix: np.ndarray) -> list[np.ndarray]:
    """Corners of the equilibrium set, by trying all tight inequalities."""
    count = len(matrix)
    rows = np.vstack([matrix, -np.eye(count)])  # all of them times p are at most 0
    found = []
    for tight in itertools.combinations(range(2 * count), count - 1):
        equations = np.vstack([rows[list(tight)], np.ones(count)])
        if abs(np.linalg.det(equations)) < 1e-9:
            continue
        corner = np.linalg.solve(equations, np.append(np.zeros(count - 1), 1.0))
        if (rows @ corner <= 1e-9).all():
            found.append(corner)
    return found


@settings(max_examples=150)
@given(matrix=games())
def test_the_equilibrium_is_the_one_with_the_highest_entropy(matrix) -> None:
    point = nash_equilibrium(matrix)
    assert (matrix @ point).max() <= 1e-9
    assert point.min() >= 0
    assert point.sum() == pytest.approx(1, abs=1e-12)
    # Entropy is concave, so nothing is higher if it rises towards no corner.
    for corner in vertices(matrix):
        held = corner[point > 1e-9]
        assert held.sum() == pytest.approx(1, abs=1e-6)  # nothing outside the support
        slope = -(corner - point)[point > 1e-9] @ np.log(point[point > 1e-9])
        assert slope <= 1e-4


def booked(rates: dict[tuple[str, str], float], games: int = 100) -> Payoffs:
    payoffs = Payoffs(1.0, 1)
    for (player, other), rate in rates.items():
        for number in range(games):
            payoffs.book(player, other, 1 if number < rate * games else -1)
    return payoffs


CYCLE = {("a", "b"): 0.8, ("b", "c"): 0.7, ("c", "a"): 0.9, ("a", "d"): 0.9, ("b", "d"): 0.6}


def test_a_clone_moves_ratings_by_elo_and_not_by_nash() -> None:
    clone = {("a2", "b"): 0.8, ("c", "a2"): 0.9, ("a2", "d"): 0.9, ("a", "a2"): 0.5}
    players, more = ["a", "b", "c", "d"], ["a", "b", "c", "d", "a2"]
    before = nash_averaging(booked(CYCLE), players)
    after = nash_averaging(booked({**CYCLE, **clone}), more)

    assert after["a"] + after["a2"] == pytest.approx(before["a"])
    assert {key: after[key] for key in "bcd"} == pytest.approx({key: before[key] for key in "bcd"})
    assert before["d"] == pytest.approx(0)

    elo_before, elo_after = elo(booked(CYCLE), players), elo(booked({**CYCLE, **clone}), more)
    moved = (elo_after["b"] - elo_after["c"]) - (elo_before["b"] - elo_before["c"])
    assert abs(moved) > 10


def test_elo_stays_finite_for_those_who_always_win_or_never_play() -> None:
    found = elo(booked({("a", "b"): 1.0}, games=1000), ["a", "b", "c"])
    assert all(math.isfinite(rating) for rating in found.values())
    assert found["a"] > 400 > found["c"] > -400 > found["b"]
    assert sum(found.values()) == pytest.approx(0, abs=1e-6)
    assert elo(Payoffs(1.0, 1), []) == {}


def test_equilibria_are_found_where_many_players_hardly_differ() -> None:
    """Games of nearly equal players have many equilibria and singular matrices."""
    for seed in range(600):
        generator = np.random.default_rng(seed)
        players, kinds = generator.integers((2, 1), (90, 8))
        of_kinds = generator.choice([-1, -0.5, 0, 0.5, 1], size=(kinds, kinds))
        kind = generator.integers(kinds, size=players)  # [P]
        noise = generator.normal(size=(players, players)) * 10.0 ** -generator.integers(0, 14)
        some = generator.random((players, players)) < 0.1
        upper = np.triu(of_kinds[kind][:, kind] + some * noise, 1)
        matrix = upper - upper.T  # [P, P]
        weights = nash_equilibrium(matrix)
        assert weights.min() >= 0, seed
        assert weights.sum() == pytest.approx(1, abs=1e-8), seed
        assert (matrix @ weights).max() < 1e-8, seed


# Payoffs: decay, symmetry, intervals, against oracles that keep every game.


GAMES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc"), st.integers(-1, 1)))


@given(games=GAMES, decay=st.sampled_from([0.5, 0.99, 1.0]), min_games=st.integers(1, 4))
def test_win_rates_are_those_of_all_games_by_their_age(games, decay, min_games) -> None:
    payoffs = Payoffs(decay, min_games)
    for player, other, result in games:
        payoffs.book(player, other, result)

    for player in "abc":
        for other in "abc":
            points = weight = count = 0.0
            for first, second, result in games:
                if player != other and {first, second} == {player, other}:
                    result = result if first == player else -result
                    points = points * decay + (result + 1) / 2
                    weight = weight * decay + 1
                    count += 1
            expected = points / weight if count >= min_games else 0.5
            assert payoffs.win_rate(player, other) == pytest.approx(expected, abs=1e-12)
            assert payoffs.win_rate(player, other) + payoffs.win_rate(other, player) == 1.0
            assert payoffs.games(player, other) == count
            low, high = payoffs.interval(player, other)
            assert payoffs.interval(other, player) == pytest.approx((1 - high, 1 - low))


def test_games_are_counted_beyond_what_decayed_numbers_can_reach() -> None:
    payoffs = Payoffs(0.99, 150)
    for _ in range(149):
        payoffs.book("a", "b", 1)
    assert payoffs.win_rate("a", "b") == 0.5
    assert sum(payoffs.counts("a", "b")) < 100

    payoffs.book("b", "a", -1)
    assert payoffs.win_rate("a", "b") == 1.0
    assert payoffs.win_rate("b", "a") == 0.0


def test_a_player_that_is_forgotten_leaves_the_others() -> None:
    payoffs = Payoffs(1.0, 1)
    payoffs.book("a", "b", 1)
    payoffs.book("b", "c", 1)
    payoffs.book_match("a", 3.0, 5)

    payoffs.forget("a")

    assert payoffs.games("a", "b") == 0
    assert payoffs.games("b", "c") == 1
    assert payoffs.means == {}


def test_results_between_kinds_are_counted_from_both_sides() -> None:
    payoffs = Payoffs(0.99, 1)
    payoffs.book_kinds("main", "historical", 1)
    payoffs.book_kinds("historical", "main", 1)
    payoffs.book_kinds("main", "historical", 0)
    payoffs.book_kinds("main", "main", 1)

    count = payoffs.kinds["historical", "main"]
    assert (count.wins, count.draws, count.losses) == (1, 1, 1)
    assert payoffs.kinds["main", "main"].wins == 1


@given(returns=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_means_of_a_player_weigh_new_matches_more(returns) -> None:
    payoffs = Payoffs(0.9, 1)
    for length, each in enumerate(returns):
        payoffs.book_match("a", each, length)
    weights = [0.9**age for age in reversed(range(len(returns)))]
    total = math.fsum(weights)
    mean = math.fsum(w * r for w, r in zip(weights, returns, strict=True)) / total
    length = math.fsum(w * n for n, w in enumerate(weights)) / total
    assert payoffs.means["a"].return_mean == pytest.approx(mean, abs=1e-9)
    assert payoffs.means["a"].length_mean == pytest.approx(length, abs=1e-9)
    assert payoffs.means["a"].matches == len(returns)


@given(games=st.integers(1, 500), share=st.floats(0, 1))
def test_a_wilson_interval_ends_where_the_score_test_is_z(games, share) -> None:
    rate, z = share, 1.959964
    for bound in wilson(share * games, games):
        # The interval's ends solve (rate - p)² = z² p (1 - p) / n.
        if 0 < bound < 1:
            assert (rate - bound) ** 2 == pytest.approx(
                z * z * bound * (1 - bound) / games, rel=1e-6, abs=1e-12
            )
    low, high = wilson(share * games, games)
    assert 0 <= low <= rate + 1e-12
    assert rate - 1e-12 <= high <= 1


# The probabilities of opponents in prioritized fictitious self-play.


NAMES = sorted(WEIGHTINGS)
RATES = {"a": 0.0, "b": 0.25, "c": 0.75, "d": 1.0}


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [
        ("squared", [1, 0.5625, 0.0625, 0]),
        ("variance", [0, 0.1875, 0.1875, 0]),
        ("linear", [1, 0.75, 0.25, 0]),
        ("linear_capped", [0.5, 0.5, 0.25, 0]),
        ("uniform", [1, 1, 1, 1]),
        (lambda rate: 3 - rate, [3, 2.75, 2.25, 2]),
    ],
)
def test_each_weighting_has_the_weights_of_its_formula(weighting, weights) -> None:
    expected = [weight / sum(weights) for weight in weights]
    assert list(pfsp(RATES, weighting).values()) == pytest.approx(expected)


@given(
    rates=st.dictionaries(st.text("xyz", max_size=3), st.floats(0, 1), max_size=9),
    weighting=st.sampled_from(NAMES),
)
def test_probabilities_are_finite_and_add_up_to_1(rates, weighting) -> None:
    chances = pfsp(rates, weighting)
    assert chances.keys() == rates.keys()
    assert all(0 <= chance <= 1 for chance in chances.values())
    assert not rates or math.fsum(chances.values()) == pytest.approx(1)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weighting_of_ones_own_must_give_weights(weight) -> None:
    with pytest.raises(ValueError, match="weight of a"):
        pfsp(RATES, lambda _: weight)


@pytest.mark.parametrize(
    ("rates", "kept"),
    [
        ([], ""),
        ([0.5], ""),
        ([0.9, 0.8, 0.8, 0.6], ""),  # each newer copy is at least as hard to beat
        ([0.4, 0.9, 0.8], "ab"),  # the oldest beats it more often than a newer one
        ([0.9, 0.2, 0.5, 0.5, 0.1], "abc"),
    ],
)
def test_only_what_is_forgotten_is_left_without_the_monotonic_suffix(rates, kept) -> None:
    assert without_monotonic_suffix(dict(zip("abcdef", rates, strict=False))) == list(kept)
