"""Connectors of observations, actions and rewards: one_hot, flatten, clip, rescale, normalize."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.random_episodes import as_tensors, fragments
from test_contexts import in_runner

from juggler.runtime.acting.actor import Contexts
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.connector import NonFiniteObservation
from juggler.runtime.connectors.encoding import (
    ClipActions,
    Flatten,
    MeanStdFilter,
    OneHot,
    RescaleActions,
)
from juggler.runtime.connectors.learning import (
    ClipRewards,
    NextObservations,
    NormalizeRewards,
    PerEpisode,
    ReturnsToGo,
    ScaleRewards,
)
from juggler.runtime.connectors.mergeable_state import Moments, check, from_bytes, merge, to_bytes
from juggler.runtime.connectors.pipelines import (
    build_env_to_module,
    build_learner_pipeline,
    build_module_to_env,
)
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.structures import OutsideSpace, zeros
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import training_pb2

ACTED = spaces.Discrete(2)
TREE = spaces.Dict(
    {
        "a": spaces.Discrete(3, start=2),
        "b": spaces.Box(0, 255, (2, 1), np.uint8),
        "c": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)]),
    }
)


def observations() -> dict:
    return {
        "a": np.array([2, 4]),
        "b": np.array([[[7], [8]], [[9], [10]]], np.uint8),
        "c": {"0": np.array([[1, 0], [0, 2]]), "1": np.array([[1, 1], [0, 1]], np.int8)},
    }


def test_choices_become_ones_among_zeros() -> None:
    one_hot = OneHot(TREE, ACTED)
    result = one_hot(observations())
    assert result["a"].tolist() == [[1, 0, 0], [0, 0, 1]]
    assert result["c"]["0"].tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
    assert result["b"].dtype == np.uint8
    assert one_hot.observation_space["a"] == spaces.Box(0, 1, (3,), np.float32)
    assert one_hot.observation_space["c"][0] == spaces.Box(0, 1, (5,), np.float32)
    assert one_hot.observation_space["c"][1] == TREE["c"][1]


def test_choices_of_an_action_mask_are_not_for_encoding() -> None:
    space = spaces.Dict({"a": spaces.Discrete(2), "action_mask": spaces.MultiDiscrete([2, 2])})
    one_hot = OneHot(space, ACTED)
    assert one_hot.observation_space["action_mask"] == space["action_mask"]
    with pytest.raises(ValueError, match="MultiDiscrete"):
        OneHot(spaces.Dict({"action_mask": spaces.MultiDiscrete([2, 2])}), ACTED)


def test_everything_becomes_one_vector_in_the_order_of_the_space() -> None:
    flatten = Flatten(TREE, ACTED)
    expected = [[1, 0, 0, 7, 8, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 9, 10, 1, 0, 0, 0, 1, 0, 1]]
    result = flatten(observations())
    assert result.tolist() == expected
    assert result.dtype == np.float32
    space = flatten.observation_space
    assert space.shape == (12,)
    assert space.low.tolist() == [0] * 12
    assert space.high.tolist() == [1, 1, 1, 255, 255, 1, 1, 1, 1, 1, 1, 1]


def test_an_action_mask_stays_beside_the_vector() -> None:
    mask = spaces.Box(0, 1, (3,), np.int8)
    flatten = Flatten(spaces.Dict({"x": spaces.Discrete(2), "action_mask": mask}), ACTED)
    result = flatten({"x": np.array([1]), "action_mask": np.array([[1, 0, 1]], np.int8)})
    assert result["observation"].tolist() == [[0, 1]]
    assert result["action_mask"].tolist() == [[1, 0, 1]]
    assert flatten.observation_space["action_mask"] == mask
    assert flatten.observation_space["observation"].shape == (2,)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(4), 7),
        (spaces.Discrete(4), -1),
        (spaces.Discrete(4, start=10), 9),
        (spaces.MultiDiscrete([3, 3]), [3, 0]),
        (spaces.MultiDiscrete([3, 3]), [0, -1]),
        (spaces.MultiBinary(2), [2, 0]),
    ],
)
@pytest.mark.parametrize("kind", [OneHot, Flatten])
def test_a_value_outside_its_space_is_not_taken_as_another_one(kind, space, value) -> None:
    if kind is OneHot and isinstance(space, spaces.MultiBinary):
        return
    connector, inside = kind(space, spaces.Discrete(2)), space.sample()
    with pytest.raises(OutsideSpace, match=r"which is not in its space \w+\(") as caught:
        connector(np.array([inside, value]))
    assert caught.value.row == 1


def test_an_action_mask_alone_cannot_be_flattened() -> None:
    with pytest.raises(ValueError, match="nothing to do"):
        Flatten(spaces.Dict({"action_mask": spaces.MultiBinary(2)}), spaces.Discrete(2))


# next_observations, returns_to_go, and connectors for one episode at a time.


OBSERVED = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(1000)})

played = given(
    mode=st.sampled_from([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]),
    rows=st.integers(1, 3),
    steps=st.integers(1, 6),
    ends=st.sampled_from([0.0, 0.2, 0.6]),
    seed=st.integers(0, 1 << 20),
)


@settings(max_examples=50)
@played
def test_a_step_leads_to_its_next_observation(mode, rows, steps, ends, seed) -> None:
    story = fragments(OBSERVED, ACTED, rows=rows, steps=steps, mode=mode, ends=ends, seed=seed)
    one, after = islice(story, 2)
    result = NextObservations(OBSERVED, ACTED)(as_tensors(one.columns))["next_observations"]
    for row in range(rows):
        # What was known one step later; of the last step, at the start of the next fragment.
        later = [*one.pasts[row][1:], after.pasts[row][0]]
        for t in range(steps):
            if not one.columns["live"][row, t] or one.columns["terminated"][row, t]:
                continue
            if one.columns["truncated"][row, t]:
                k = [*zip(one.columns["final_rows"], one.columns["final_steps"], strict=True)]
                expected = one.final_pasts[k.index((row, t))].observations[-1]
            else:
                expected = later[t].observations[-1]
            np.testing.assert_array_equal(result["a"][row, t], expected["a"])
            assert result["b"][row, t] == expected["b"]


@settings(max_examples=50)
@played
def test_returns_to_go_are_sums_to_the_end_of_episode_or_row(mode, rows, steps, ends, seed) -> None:
    story = fragments(OBSERVED, ACTED, rows=rows, steps=steps, mode=mode, ends=ends, seed=seed)
    columns = as_tensors(next(story).columns)
    result = ReturnsToGo(OBSERVED, ACTED, gamma=0.9)(columns)["returns_to_go"]
    done = columns["terminated"] | columns["truncated"]
    for row in range(rows):
        total = 0.0
        for t in reversed(range(steps)):
            if done[row, t] or not columns["live"][row, t]:
                total = 0.0
            if columns["live"][row, t]:
                total = float(columns["rewards"][row, t]) + 0.9 * total
            assert result[row, t].item() == pytest.approx(total, abs=1e-5)


# -- one episode at a time ----------------------------------------------------------------------


def columns() -> dict:
    """Row 0: episodes of 2 and 1 steps. Row 1: continued."""
    live = torch.tensor([[True, True, False, True], [True] * 4])
    return {
        "observations": {"a": torch.arange(8.0).view(2, 4, 1)},
        "actions": torch.zeros(2, 4, dtype=torch.int64),
        "rewards": torch.tensor([[1.0, 2.0, 0.0, 4.0], [1.0, 1.0, 1.0, 1.0]]),
        "terminated": torch.tensor([[False, True, False, False], [False] * 4]),
        "truncated": torch.zeros(2, 4, dtype=torch.bool),
        "live": live,
        "last_observations": {"a": torch.zeros(2, 1)},
        "states": {},
        "segment_rows": torch.tensor([0, 0, 1]),
        "segment_starts": torch.tensor([0, 3, 0]),
        "segment_lengths": torch.tensor([2, 1, 4]),
        "segment_offsets": torch.tensor([0, 0, 5]),
    }


class RewardAtTheEnd(PerEpisode):
    def episode(self, steps, offset):
        self.seen = [*getattr(self, "seen", []), (steps, offset)]
        rewards = torch.zeros_like(steps["rewards"])
        rewards[-1] = steps["rewards"].sum()
        ages = offset + torch.arange(len(rewards))
        return {"rewards": rewards, "ages": ages}


def test_episodes_are_changed_one_at_a_time() -> None:
    before = columns()
    connector = RewardAtTheEnd(OBSERVED, ACTED)
    result = connector(before)
    assert result["rewards"].tolist() == [[0, 3, 0, 4], [0, 0, 0, 4]]
    assert result["ages"].tolist() == [[0, 1, 0, 0], [5, 6, 7, 8]]
    assert result["ages"].dtype == torch.int64
    assert before["rewards"].tolist() == [[1, 2, 0, 4], [1, 1, 1, 1]]
    assert "ages" not in before
    steps, offset = connector.seen[2]
    assert offset == 5
    assert steps.keys() == {"observations", "actions", "rewards", "terminated", "truncated"}
    assert steps["observations"]["a"].flatten().tolist() == [4, 5, 6, 7]


class OneStepTooFew(PerEpisode):
    def episode(self, steps, offset):
        return {"rewards": steps["rewards"][1:]}


def test_an_episode_must_keep_its_length() -> None:
    with pytest.raises(ValueError, match="returned 'rewards'"):
        OneStepTooFew(OBSERVED, ACTED)(columns())


# clip_actions and rescale_actions, and the pipeline that they stand in.


ANYTHING = spaces.Box(-1, 1, (3,), np.float32)
BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))


def pipeline(action_space, *pieces):
    config = ConnectorsConfig(module_to_env=list(pieces))
    return build_module_to_env(config, ANYTHING, action_space)


def test_actions_beyond_the_bounds_become_the_bounds() -> None:
    actions = np.array([[-3, 5], [1, 11]], np.float32)
    assert ClipActions(ANYTHING, BOX)(actions).tolist() == [[-2, 5], [1, 10]]
    assert actions.tolist() == [[-3, 5], [1, 11]]


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(3), spaces.MultiBinary(2), spaces.Box(-np.inf, np.inf, (2,), np.float32)],
)
def test_where_nothing_is_bounded_the_default_pipeline_is_empty(space) -> None:
    assert ClipActions(ANYTHING, space).idle
    actions = np.array([1])
    assert pipeline(space)(actions) is actions
    assert pipeline(space).action_space == space


@given(
    arrays.arrays(np.float64, (3,), elements=st.floats(-1e6, 1e6)),
    arrays.arrays(np.float64, (3,), elements=st.floats(0.001, 1e6)),
    arrays.arrays(np.float32, (2, 3), elements=st.floats(-3, 3, width=32)),
    st.sampled_from([np.float32, np.float64]),
)
def test_rescaled_actions_lie_where_the_policy_put_them_between_the_bounds(
    low, width, actions, dtype
) -> None:
    low, high = low.astype(dtype), (low + width).astype(dtype)
    space = spaces.Box(low, high, dtype=dtype)
    rescale = RescaleActions(ANYTHING, space)
    assert rescale.action_space == spaces.Box(-1, 1, (3,), dtype)
    sent = rescale(actions)
    exact = low.astype(np.float64), high.astype(np.float64), actions.astype(np.float64)
    expected = exact[0] + (np.clip(exact[2], -1, 1) + 1) / 2 * (exact[1] - exact[0])
    tolerance = 1e-5 if dtype is np.float32 else 1e-9
    np.testing.assert_allclose(sent, expected, rtol=tolerance, atol=tolerance * 1e6)
    for action in sent:
        assert space.contains(action)


def test_numbers_without_two_finite_bounds_are_not_rescaled() -> None:
    low, high = np.array([-np.inf, 0, 2]), np.array([1, np.inf, 4])
    space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
    rescale = RescaleActions(ANYTHING, space)
    assert rescale.action_space.low.tolist() == [-np.inf, 0, -1]
    assert rescale.action_space.high.tolist() == [1, np.inf, 1]
    assert rescale(np.array([[-7, 7, 0.5], [3, -3, 0]])).tolist() == [[-7, 7, 3.5], [1, 0, 3]]


def test_the_policy_acts_in_what_the_first_piece_takes() -> None:
    for pieces in (["rescale_actions"], [{"use": "rescale_actions", "first": True}]):
        built = pipeline(BOX, *pieces)
        assert built.action_space == spaces.Box(-1, 1, (2,), np.float32)
        assert built(np.array([[9, 0], [-9, 1]], np.float32)).tolist() == [[2, 5], [-2, 10]]


def test_trees_of_actions_are_clipped_and_rescaled_leaf_by_leaf() -> None:
    space = spaces.Dict({"push": BOX, "turn": spaces.Tuple([spaces.Discrete(3), BOX])})
    built = pipeline(space, "rescale_actions")
    assert built.action_space["push"] == built.action_space["turn"][1]
    turn = np.array([2])
    sent = built({"push": np.array([[3.0, 0]]), "turn": {"0": turn, "1": np.array([[0, -4.0]])}})
    assert sent["push"].tolist() == [[2, 5]]
    assert sent["turn"][0] is turn  # as Gymnasium specifies
    assert sent["turn"][1].tolist() == [[0, 0]]


@pytest.mark.parametrize("clip", [True, False])
def test_the_environment_gets_actions_in_its_own_dtypes(clip: bool) -> None:
    space = spaces.Dict(
        {
            "many": spaces.MultiDiscrete([3, 2], np.uint8),
            "free": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "half": spaces.Box(-1, 1, (), np.float16),
            "bits": spaces.MultiBinary(2),
        }
    )
    config = ConnectorsConfig(module_to_env=[] if clip else [{"remove": "clip_actions"}])
    pipeline = build_module_to_env(config, spaces.Discrete(2), space)
    chosen = {
        "many": np.array([[2, 1]]),
        "free": np.array([[0.5, 1]], np.float32),
        "half": np.array([0.25], np.float32),
        "bits": np.array([[1, 0]], np.int8),
    }
    given = pipeline(chosen)
    assert space.contains({key: array[0] for key, array in given.items()})
    assert not build_module_to_env(config, spaces.Discrete(2), space["many"]).idle
    assert chosen["many"].dtype == np.int64


# clip_rewards, scale_rewards and normalize_rewards.


SPACES = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)


def test_rewards_are_clipped_and_scaled_in_columns_of_their_own() -> None:
    columns = {"rewards": torch.tensor([[3.0, -0.5, -2.0]]), "live": torch.ones(1, 3).bool()}
    assert ClipRewards(*SPACES)(columns)["rewards"].tolist() == [[1, -0.5, -1]]
    assert ClipRewards(*SPACES, limit=2)(columns)["rewards"].tolist() == [[2, -0.5, -2]]
    assert ScaleRewards(*SPACES, factor=0.5)(columns)["rewards"].tolist() == [[1.5, -0.25, -1]]
    assert columns["rewards"].tolist() == [[3, -0.5, -2]]


@settings(max_examples=60)
@given(
    mode=st.sampled_from([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]),
    rows=st.integers(1, 3),
    steps=st.integers(1, 6),
    ends=st.sampled_from([0.0, 0.1, 0.5]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 1 << 20),
)
def test_rewards_are_divided_by_the_deviation_of_all_discounted_returns_so_far(
    mode, rows, steps, ends, gamma, seed
) -> None:
    config = ConnectorsConfig(learner=[{"use": "normalize_rewards", "gamma": gamma}])
    contexts = Contexts(build_env_to_module(config, *SPACES).contexts)
    learner = build_learner_pipeline(config, *SPACES)
    returns = []
    played = fragments(*SPACES, rows=rows, steps=steps, mode=mode, ends=ends, seed=seed)
    for fragment in islice(played, 4):
        seen, states = in_runner(contexts, fragment)
        np.testing.assert_array_equal(seen, fragment.columns["observations"])
        for row, pasts in enumerate(fragment.pasts):
            for t, past in enumerate(pasts):
                if fragment.columns["live"][row, t]:
                    rewards = [*past.rewards, fragment.columns["rewards"][row, t]]
                    powers = gamma ** np.arange(len(rewards))[::-1]
                    returns.append(float(powers @ np.array(rewards)))
        columns = as_tensors({**fragment.columns, "states": {"connectors": states}})
        result = learner(columns)["rewards"].numpy()
        scale = 1 / np.sqrt(np.var(returns) + 1e-8)
        expected = np.clip(fragment.columns["rewards"] * scale, -10, 10)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-5)
    arrays = {key: value.numpy() for key, value in learner.get_state()["normalize_rewards"].items()}
    moments, all_of_them = Moments.from_tree(arrays), Moments.of(np.array(returns))
    np.testing.assert_allclose(moments.mean, all_of_them.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moments.m2, all_of_them.m2, rtol=1e-4, atol=1e-5)
    assert moments.count == len(returns)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClipRewards(*SPACES, limit=0),
        lambda: ScaleRewards(*SPACES, factor=float("inf")),
        lambda: NormalizeRewards(*SPACES, gamma=1.5),
        lambda: NormalizeRewards(*SPACES, epsilon=0),
    ],
)
def test_options_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


# mean_std_filter: what it makes of observations, and what it learns from them.


VECTOR = spaces.Box(-np.inf, np.inf, (2,), np.float32)
MIXED = spaces.Dict(
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
    filter_ = MeanStdFilter(MIXED, ACTED, clip=3.0)
    space = filter_.observation_space
    for key in ("image", "kind", "bits", "action_mask"):
        assert space[key] == MIXED[key]
    assert space["vector"] == spaces.Box(-3, 3, (2,), np.float32)
    assert space["deep"][0] == spaces.Box(-3, 3, (), np.float32)
    assert space["deep"][1] == spaces.Box(-3, 3, (1,), np.float32)
    observations = zeros(MIXED, (5,))
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
        MeanStdFilter(MIXED["image"], ACTED)


def test_a_state_of_other_observations_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of shape \(3,\), here \(2,\)"):
        MeanStdFilter(VECTOR, ACTED).set_state(Moments.none((3,)).to_tree())


@pytest.mark.parametrize("options", [{"clip": 0}, {"epsilon": -1.0}, {"clip": float("nan")}])
def test_options_of_a_filter_out_of_range_are_refused(options) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        MeanStdFilter(VECTOR, ACTED, **options)


# States of connectors, made of moments: merging, checking, travelling.


def state_of(*samples: list[float], name: str = "filter") -> dict:
    return {name: {"a": Moments.of(np.array(samples)).to_tree()}}


def test_states_without_moments_merge_to_states_without_moments() -> None:
    assert merge({}, {}) == {}
    assert merge({"one": {}}, {"one": {}}) == {"one": {}}


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
        ({"filter": {"mean": np.zeros(2)}}, "at 'filter': moments are the arrays"),
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
