"""next_observations, returns_to_go, and connectors for one episode at a time."""

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

from juggler.runtime.connectors.per_episode import PerEpisode
from juggler.runtime.connectors.steps import NextObservations, ReturnsToGo

OBSERVED = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(1000)})
ACTED = spaces.Discrete(2)

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


def test_a_discount_above_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gamma = 1\.1"):
        ReturnsToGo(OBSERVED, ACTED, gamma=1.1)


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


def test_columns_of_earlier_connectors_are_steps_too() -> None:
    connector = RewardAtTheEnd(OBSERVED, ACTED)
    connector(ReturnsToGo(OBSERVED, ACTED, gamma=1.0)(columns()))
    assert connector.seen[0][0]["returns_to_go"].tolist() == [3, 2]


class OneStepTooFew(PerEpisode):
    def episode(self, steps, offset):
        return {"rewards": steps["rewards"][1:]}


def test_an_episode_must_keep_its_length() -> None:
    with pytest.raises(ValueError, match="returned 'rewards'"):
        OneStepTooFew(OBSERVED, ACTED)(columns())


class LooksOn(PerEpisode):
    def episode(self, steps, offset):
        return {}


def test_an_episode_may_be_left_as_it_is() -> None:
    before = columns()
    after = LooksOn(OBSERVED, ACTED)(before)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
