"""Elo, Nash averaging, and the payoffs that they are made of."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from juggler.driver.league.builders import without_monotonic_suffix
from juggler.driver.league.pfsp import WEIGHTINGS, pfsp
from juggler.driver.league.ratings import elo, nash_averaging, nash_equilibrium
from juggler.driver.league.results import Payoffs
from juggler.policies.wilson import wilson

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


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], [1 / 3, 1 / 3, 1 / 3]),
        ([[0, 1, 1], [-1, 0, 1], [-1, -1, 0]], [1, 0, 0]),
        ([[0, 0], [0, 0]], [0.5, 0.5]),
        ([[0, -2, 1], [2, 0, -1], [-1, 1, 0]], [0.25, 0.25, 0.5]),
    ],
)
def test_known_games_have_their_known_equilibria(matrix, expected) -> None:
    assert nash_equilibrium(np.array(matrix, float)) == pytest.approx(expected, abs=1e-9)


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


def test_an_unknown_weighting_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'squared'"):
        pfsp(RATES, "square")


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
