"""Moments, and states of connectors made of them: merging, checking, travelling."""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from juggler.runtime.connectors.mergeable_state import check, from_bytes, merge, to_bytes
from juggler.runtime.connectors.moments import Moments

EPS = np.finfo(np.float64).eps


def exact(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sum of squared deviations, without any rounding before the end."""
    means, m2s = [], []
    for column in samples.astype(np.float64).T:
        numbers = [Fraction(float(x)) for x in column]
        mean = sum(numbers) / len(numbers)
        means.append(float(mean))
        m2s.append(float(sum((x - mean) ** 2 for x in numbers)))
    return np.array(means), np.array(m2s)


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    mean=st.sampled_from([0.0, 1.0, -1e3, 1e8]),
    deviation=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 1 << 20),
    from_right=st.booleans(),
)
def test_merged_moments_are_those_of_everything(sizes, mean, deviation, seed, from_right) -> None:
    rng = np.random.default_rng(seed)
    parts = [mean + deviation * rng.standard_normal((size, 2)) for size in sizes]
    moments = [Moments.of(part) for part in parts]
    merged = (
        functools.reduce(lambda right, left: left.merged(right), reversed(moments))
        if from_right
        else functools.reduce(Moments.merged, moments)
    )
    everything = np.concatenate(parts)
    assert merged.count == len(everything)
    if not len(everything):
        return
    means, m2s = exact(everything)
    np.testing.assert_allclose(merged.mean, means, rtol=1e-14, atol=1e-14 * max(deviation, 1))
    # Each mean is rounded to an ulp of itself, and that is as far as a deviation may be off.
    ulp = 4 * EPS * max(abs(mean), deviation)
    tolerance = len(everything) * (1e-12 * deviation**2 + 2 * ulp * deviation + ulp**2)
    np.testing.assert_allclose(merged.m2, m2s, rtol=1e-12, atol=tolerance)


def test_small_deviations_from_a_large_mean_survive_a_thousand_merges() -> None:
    rng = np.random.default_rng(0)
    parts = [1e9 + 1e-3 * rng.standard_normal((64, 1)) for _ in range(1000)]
    merged = functools.reduce(Moments.merged, map(Moments.of, parts))
    everything = np.concatenate(parts)
    np.testing.assert_allclose(merged.variance, everything.var(0), rtol=1e-3)
    # What sums of squares make of it is not even positive, or far from it.
    naive = (everything**2).mean(0) - everything.mean(0) ** 2
    assert abs(naive - everything.var(0)) > 10 * everything.var(0)


def test_float32_samples_are_summed_in_float64() -> None:
    samples = np.full((1 << 20, 1), 0.1, np.float32)
    assert Moments.of(samples).mean == np.float32(0.1)
    assert Moments.of(samples).m2 == 0


def test_no_samples_change_nothing() -> None:
    some = Moments.of(np.array([[1.0], [3.0]]))
    none = Moments.of(np.zeros((0, 1)))
    assert none.count == 0
    for merged in (some.merged(none), none.merged(some)):
        assert (merged.count, merged.mean, merged.m2) == (2, 2, 2)
    assert Moments.none((1,)).variance == 0


# -- states -------------------------------------------------------------------------------------


def state_of(*samples: list[float], name: str = "filter") -> dict:
    return {name: {"a": Moments.of(np.array(samples)).to_tree()}}


def test_states_merge_moment_by_moment() -> None:
    merged = merge(state_of([0.0], [2.0]), state_of([4.0], [6.0]))
    moments = Moments.from_tree(merged["filter"]["a"])
    assert (moments.count, moments.mean, moments.m2) == (4, 3, 20)


@pytest.mark.parametrize("other", [state_of([1.0], name="another"), {}, state_of([1.0, 2.0])])
def test_states_of_other_connectors_do_not_merge(other) -> None:
    with pytest.raises(ValueError, match=r"differ at|cannot be merged"):
        merge(state_of([0.0]), other)


def test_a_state_travels_as_bytes() -> None:
    state = {**state_of([0.5], [1.5]), "other": Moments.none((2, 3)).to_tree()}
    found = from_bytes(to_bytes(state))
    assert found.keys() == state.keys()
    moments = Moments.from_tree(found["filter"]["a"])
    assert (moments.count, moments.mean, moments.m2) == (2, 1, 0.5)
    assert Moments.from_tree(found["other"]).mean.shape == (2, 3)


def test_a_state_without_connectors_travels_too() -> None:
    assert from_bytes(to_bytes({})) == {}


def test_a_state_that_fills_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 4 MiB"):
        to_bytes({"filter": Moments.none((600, 600)).to_tree()})


def bad(**changed: np.ndarray) -> dict:
    return {"filter": {**Moments.none((2,)).to_tree(), **changed}}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (bad(mean=np.zeros(2, np.float32)), "must be float64, not float32"),
        (bad(mean=np.array([0, np.nan])), "'mean' of moments holds what is not finite"),
        (bad(mean=np.zeros(3)), "do not belong together"),
        (bad(count=np.zeros(2)), "do not belong together"),
        (bad(count=np.array(-1.0)), "negative count"),
        (bad(m2=np.array([1.0, -1.0])), "negative count or sum"),
        ({"filter": {"mean": np.zeros(2)}}, "'filter/mean' in a state of connectors"),
        (np.zeros(2), "a branch of their names"),
        (Moments.none(()).to_tree(), "a branch of their names"),
    ],
)
def test_what_is_no_state_is_told_so(state, said) -> None:
    with pytest.raises(ValueError, match=said):
        check(state)


@pytest.mark.parametrize("content", [b"", b"\xff", to_bytes(state_of([1.0]))[:-3]])
def test_bytes_that_are_no_state_are_refused(content) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - says what is wrong with the frame
        from_bytes(content)
