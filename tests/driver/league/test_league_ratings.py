"""Elo and Nash averaging."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.ratings import elo, nash_averaging, nash_equilibrium

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
    """The corners of the set of equilibria, by trying all choices of tight inequalities."""
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


def test_large_leagues_have_exact_equilibria() -> None:
    random = np.random.default_rng(0)
    matrix = np.triu(random.uniform(-1, 1, (60, 60)), 1)
    matrix -= matrix.T
    assert (matrix @ nash_equilibrium(matrix)).max() <= 1e-9


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
    weights, before = nash_averaging(booked(CYCLE), players)
    cloned_weights, after = nash_averaging(booked({**CYCLE, **clone}), more)

    assert [after[player] for player in players] == pytest.approx(list(before.values()), abs=1e-9)
    assert after["a2"] == pytest.approx(before["a"], abs=1e-9)
    assert cloned_weights["a"] + cloned_weights["a2"] == pytest.approx(weights["a"])
    assert before["d"] < -0.1

    elo_before, elo_after = elo(booked(CYCLE), players), elo(booked({**CYCLE, **clone}), more)
    moved = (elo_after["b"] - elo_after["c"]) - (elo_before["b"] - elo_before["c"])
    assert abs(moved) > 10


def test_elo_differences_tell_the_win_rates_of_a_transitive_game() -> None:
    strengths = {"a": 0.0, "b": 150.0, "c": 400.0}
    rates = {
        (player, other): 1 / (1 + 10 ** ((strengths[other] - strengths[player]) / 400))
        for player, other in itertools.combinations(strengths, 2)
    }
    found = elo(booked(rates, games=10_000), list(strengths))
    mean = sum(strengths.values()) / 3
    for player, strength in strengths.items():
        assert found[player] == pytest.approx(strength - mean, abs=2)


def test_elo_stays_finite_for_those_who_always_win_or_never_play() -> None:
    found = elo(booked({("a", "b"): 1.0}, games=1000), ["a", "b", "c"])
    assert all(math.isfinite(rating) for rating in found.values())
    assert found["a"] > 400 > found["c"] > -400 > found["b"]
    assert sum(found.values()) == pytest.approx(0, abs=1e-6)
    assert elo(Payoffs(1.0, 1), []) == {}


def test_equilibria_are_found_where_many_players_hardly_differ() -> None:
    """Games of few kinds of players, nearly or fully alike, have many equilibria, and weights that
    are all but 0: matrices become singular there."""
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
