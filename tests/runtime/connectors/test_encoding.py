"""one_hot, flatten, and columns made of steps."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_episodes import as_tensors, fragments

from juggler.runtime.connectors.encoding import Flatten, OneHot
from juggler.runtime.connectors.learning import NextObservations, PerEpisode, ReturnsToGo
from juggler.runtime.wire.structures import OutsideSpace

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
    """Row 0: an episode of 2 steps, a reset, one of 1 step. Row 1: one from its 6th step on."""
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
