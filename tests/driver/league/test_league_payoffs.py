"""Payoffs: decay, symmetry, intervals, against oracles that keep every game."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juggler.driver.league.payoffs import Payoffs
from juggler.policies.wilson import wilson

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


def test_a_draw_counts_as_half_a_win() -> None:
    payoffs = Payoffs(1.0, 1)
    for result in (0, 0, 1, -1, 1, 1):
        payoffs.book("a", "b", result)
    assert payoffs.win_rate("a", "b") == pytest.approx(4 / 6)


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


def test_without_games_a_rate_may_be_anything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-5)  # statsmodels
