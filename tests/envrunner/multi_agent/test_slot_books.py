"""Steps without an end are booked later, with equal results."""

from __future__ import annotations

import numpy as np
import pytest

from juggler.envrunner.multi_agent.slot_books import BrokenRule, SlotBooks

ENVS, AGENTS = 3, ("a", "b")
SLOTS = ENVS * len(AGENTS)
NOBODY = np.zeros(0, np.intp)


@pytest.mark.parametrize("seed", range(20))
def test_quiet_steps_give_the_same_rewards_and_returns_as_all_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    quiet, always = SlotBooks(ENVS, AGENTS), SlotBooks(ENVS, AGENTS)
    there = np.ones(SLOTS, np.bool_)  # agents that have not ended

    def who_acts() -> np.ndarray:
        acts = there & (rng.random(SLOTS) < 0.6)
        idle = ~acts.reshape(ENVS, -1).any(1)
        acts.reshape(ENVS, -1)[idle] = there.reshape(ENVS, -1)[idle]
        return np.flatnonzero(acts)

    acting = who_acts()
    for books in (quiet, always):
        books.reset(acting)
    for _ in range(300):
        rewards = np.where(there, rng.integers(-8, 9, SLOTS) / 4, 0.0)
        if rng.random() < 0.7:
            told = always.step(rewards, NOBODY, NOBODY, NOBODY, acting)
            assert not told.first.any()
            np.testing.assert_array_equal(quiet.step_without_ends(rewards), told.rewards)
            continue
        ended = np.flatnonzero(there & (rng.random(SLOTS) < 0.3))
        there[ended] = False
        over = np.flatnonzero(~there.reshape(ENVS, -1).any(1))
        there.reshape(ENVS, -1)[over] = True
        acting = who_acts()
        one, other = (b.step(rewards, ended, over, over, acting) for b in (quiet, always))
        for mine, expected in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, expected)
        assert quiet.overdue(2, "toy", "") == always.overdue(2, "toy", "")


def test_a_reward_after_its_end_is_forbidden_in_a_quiet_step_too() -> None:
    books, acting = SlotBooks(ENVS, AGENTS), np.arange(SLOTS)
    books.reset(acting)
    books.step(np.ones(SLOTS), np.array([3]), NOBODY, NOBODY, np.delete(acting, 3))
    books.step_without_ends(np.where(acting == 3, 0.0, 1.0))
    with pytest.raises(BrokenRule, match="agent 'b' got a reward after its"):
        books.step_without_ends(np.ones(SLOTS))
