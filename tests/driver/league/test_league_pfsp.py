"""The probabilities of opponents in prioritized fictitious self-play."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juggler.driver.league.alphastar import without_monotonic_suffix
from juggler.driver.league.pfsp import WEIGHTINGS, pfsp

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


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("weighting", NAMES)
def test_opponents_that_are_all_alike_are_equally_likely(weighting, rate) -> None:
    assert pfsp(dict.fromkeys("abc", rate), weighting) == pytest.approx(dict.fromkeys("abc", 1 / 3))


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
    with pytest.raises(ValueError, match="did you mean 'squared'"):
        pfsp(RATES, "square")


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weighting_of_ones_own_must_give_weights(weight) -> None:
    with pytest.raises(ValueError, match="the weight of a is"):
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
