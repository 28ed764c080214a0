"""n-step transitions against those written out, step by step in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from juggler.learner.core.sequences import all_observations
from juggler.learner.core.transitions import rows_of_transitions, transitions
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]


class Slow(NamedTuple):
    reward: float
    discount: float
    after: np.ndarray  # the observation after the transition


def slow_transition(batch: EpisodeBatch, n: int, t: int, steps: int, gamma: float) -> Slow:
    reward, discount = 0.0, 1.0
    for at in range(t, t + steps):
        reward += discount * float(batch.rewards[n, at])
        discount *= gamma
        ends = bool(batch.terminated[n, at] or batch.truncated[n, at])
        last = at + 1 == batch.steps
        if ends or last or at + 1 == t + steps or not batch.live[n, at + 1]:
            break
    if batch.terminated[n, at]:
        return Slow(reward, 0.0, np.zeros(0))
    if batch.truncated[n, at]:
        (k,) = np.flatnonzero((batch.final_rows == n) & (batch.final_steps == at))
        return Slow(reward, discount, batch.final_observations[k])
    return Slow(
        reward, discount, batch.last_observations[n] if last else batch.observations[n, at + 1]
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 20])
def test_transitions_end_with_their_episode_and_their_row(
    make_batch: MakeBatch, steps: int
) -> None:
    ends = {"terminated": 0, "truncated": 0}
    for seed in range(5):
        batch = make_batch(4, 9, seed=seed)
        columns = collate([batch])
        found = transitions(columns, steps, 0.9)
        seen = all_observations(columns)
        rows = rows_of_transitions(columns, steps, 0.9)
        ends["terminated"] += int(batch.terminated.sum())
        ends["truncated"] += int(batch.truncated.sum())
        live = list(zip(*np.nonzero(batch.live), strict=True))
        assert len(rows["rewards"]) == len(live) > 0
        for place, (n, t) in enumerate(live):
            slow = slow_transition(batch, n, t, steps, 0.9)
            assert float(found.rewards[n, t]) == pytest.approx(slow.reward, rel=1e-5, abs=1e-6)
            assert float(found.discounts[n, t]) == pytest.approx(slow.discount, rel=1e-6)
            assert float(rows["rewards"][place, 0]) == float(found.rewards[n, t])
            assert float(rows["discounts"][place, 0]) == float(found.discounts[n, t])
            np.testing.assert_array_equal(rows["observations"][place, 0], batch.observations[n, t])
            np.testing.assert_array_equal(rows["actions"][place, 0], batch.actions[n, t])
            if slow.discount:
                np.testing.assert_array_equal(seen[found.after[n, t]], slow.after)
                np.testing.assert_array_equal(rows["last_observations"][place], slow.after)
    assert all(ends.values()), "both ends are in the batches"


def test_rewards_of_the_next_episode_are_in_no_transition(make_batch: MakeBatch) -> None:
    batch = make_batch(4, 9, seed=0)
    columns = collate([batch])
    dead = ~columns["live"]
    columns["rewards"] = torch.where(dead, torch.nan, columns["rewards"])
    assert rows_of_transitions(columns, 5, 0.9)["rewards"].isfinite().all()
