"""mean_std_filter: what it makes of observations, and what it learns from them."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from juggler.runtime.connectors.connector import NonFiniteObservation
from juggler.runtime.connectors.encoding import MeanStdFilter
from juggler.runtime.connectors.mergeable_state import Moments, check, from_bytes, merge, to_bytes
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.structures import zeros
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import training_pb2

ACTED = spaces.Discrete(2)
VECTOR = spaces.Box(-np.inf, np.inf, (2,), np.float32)
TREE = spaces.Dict(
    {
        "vector": VECTOR,
        "image": spaces.Box(0, 255, (2, 2), np.uint8),
        "kind": spaces.Discrete(4),
        "bits": spaces.MultiBinary(3),
        "action_mask": spaces.Box(0, 1, (2,), np.float32),
        "deep": spaces.Tuple([spaces.Box(-5, 5, (), np.float64), spaces.Box(0, 9, (1,), np.int32)]),
    }
)


def learned(filter_: MeanStdFilter, samples: np.ndarray) -> None:
    """Give it the moments of samples [B, ...]."""
    filter_.set_state(Moments.of(samples).to_tree())


def watched(filter_: MeanStdFilter, samples: np.ndarray, live: np.ndarray) -> Moments:
    """What it takes from samples [N, T, ...]."""
    for t in range(samples.shape[1]):
        filter_.watch(samples[:, t])
    return Moments.from_tree(filter_.take_delta(live))


def test_numbers_get_mean_0_and_deviation_1() -> None:
    samples = np.random.default_rng(0).normal([5, -100], [0.1, 30], (1000, 2)).astype(np.float32)
    filter_ = MeanStdFilter(VECTOR, ACTED)
    learned(filter_, samples)
    result = filter_(samples)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(result.std(0), 1, atol=1e-5)


def test_nothing_changes_until_there_is_a_state() -> None:
    samples = np.array([[1.0, -2.0]], np.float32)
    filter_ = MeanStdFilter(VECTOR, ACTED)
    filter_.watch(samples)
    np.testing.assert_array_equal(filter_(samples), samples)
    filter_.set_state(Moments.of(samples).to_tree())  # one sample has no deviation
    np.testing.assert_array_equal(filter_(samples), samples)


def test_large_float64_numbers_keep_their_small_differences() -> None:
    filter_ = MeanStdFilter(spaces.Box(-np.inf, np.inf, (1,), np.float64), ACTED)
    samples = 1e12 + np.random.default_rng(0).standard_normal((1000, 1))
    learned(filter_, samples)
    result = filter_(samples)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result.std(0), 1, rtol=1e-3)


def test_the_environment_keeps_its_own_memory() -> None:
    samples = np.ones((3, 2), np.float32)
    filter_ = MeanStdFilter(VECTOR, ACTED)
    learned(filter_, np.array([[0.0, 0.0], [4.0, 4.0]]))
    filter_.watch(samples)
    filter_(samples)
    assert (samples == 1).all()
    samples[:] = 9  # the environment writes its next observation there
    delta = Moments.from_tree(filter_.take_delta(np.ones((3, 1), np.bool_)))
    assert (delta.mean == 1).all()


def test_leaves_that_are_no_numbers_are_left_alone() -> None:
    filter_ = MeanStdFilter(TREE, ACTED, clip=3.0)
    space = filter_.observation_space
    for key in ("image", "kind", "bits", "action_mask"):
        assert space[key] == TREE[key]
    assert space["vector"] == spaces.Box(-3, 3, (2,), np.float32)
    assert space["deep"][0] == spaces.Box(-3, 3, (), np.float32)
    assert space["deep"][1] == spaces.Box(-3, 3, (1,), np.float32)
    observations = zeros(TREE, (5,))
    observations["image"][:] = 200
    filter_.watch(observations)
    delta = filter_.take_delta(np.ones((5, 1), np.bool_))
    assert {path[:-1] for path, _ in flatten(delta)} == {("vector",), ("deep", "0"), ("deep", "1")}
    filter_.set_state(delta)
    result = filter_(observations)
    assert result["image"] is observations["image"]
    like = dict(flatten(zeros(space, (5,))))
    for path, array in flatten(result):
        assert (array.shape, array.dtype) == (like[path].shape, like[path].dtype)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 4),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    mean=st.sampled_from([0.0, 1e6]),
    seed=st.integers(0, 1 << 20),
)
def test_merged_deltas_of_live_steps_are_the_moments_of_all_of_them(
    rows, steps, mean, seed
) -> None:
    rng = np.random.default_rng(seed)
    filter_ = MeanStdFilter(VECTOR, ACTED)
    state, counted = {"f": Moments.none((2,)).to_tree()}, [np.zeros((0, 2))]
    for t in steps:
        samples = (mean + rng.standard_normal((rows, t, 2))).astype(np.float32)
        live = rng.random((rows, t)) < 0.7
        state = merge(state, {"f": watched(filter_, samples, live).to_tree()})
        counted.append(samples[live].astype(np.float64))
    everything = np.concatenate(counted)
    merged = Moments.from_tree(state["f"])
    assert merged.count == len(everything)
    if len(everything):
        np.testing.assert_allclose(merged.mean, everything.mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(merged.variance, everything.var(0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_found_though_results_are_clipped(number) -> None:
    filter_ = MeanStdFilter(VECTOR, ACTED)
    samples = np.zeros((3, 4, 2), np.float32)
    samples[2, 1, 0] = number
    live = np.ones((3, 4), np.bool_)
    with pytest.raises(NonFiniteObservation) as found:
        watched(filter_, samples, live)
    assert (found.value.row, found.value.step) == (2, 1)


def test_there_must_be_something_to_filter() -> None:
    with pytest.raises(ValueError, match="no Box of numbers, only uint8"):
        MeanStdFilter(TREE["image"], ACTED)


def test_a_state_of_other_observations_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of shape \(3,\), here \(2,\)"):
        MeanStdFilter(VECTOR, ACTED).set_state(Moments.none((3,)).to_tree())


@pytest.mark.parametrize("options", [{"clip": 0}, {"epsilon": -1.0}, {"clip": float("nan")}])
def test_options_out_of_range_are_refused(options) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        MeanStdFilter(VECTOR, ACTED, **options)


# States of connectors, made of moments: merging, checking, travelling.


def state_of(*samples: list[float], name: str = "filter") -> dict:
    return {name: {"a": Moments.of(np.array(samples)).to_tree()}}


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


def bad(**changed: np.ndarray) -> dict:
    return {"filter": {**Moments.none((2,)).to_tree(), **changed}}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (bad(mean=np.zeros(2, np.float32)), "must be float64, not float32"),
        (bad(mean=np.array([0, np.nan])), "'mean' of moments is not finite"),
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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        to_bytes(state_of([1.0]))[:-3],
        next(encode_frame(training_pb2.StateHeader(), state_of([1.0]), chunk_bytes=4)),
    ],
    ids=["nothing", "noise", "cut", "the first of several chunks"],
)
def test_bytes_that_are_no_state_are_refused(content) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - says what is wrong with the frame
        from_bytes(content)
