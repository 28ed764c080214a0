"""Turns of a Gymnasium vector are what a slow loop over single environments records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vectors import KINDS, MODES, play, seeds_of, vector_of

from juggler.envrunner.environments.gymnasium_turns import GymnasiumTurns
from juggler.envrunner.multi_agent.turns import Turn

SCRIPTS = [
    ((4, "truncated"), (4, "terminated"), (4, "both")),
    ((5, "truncated"), (3, "terminated"), (1, "both"), (1, "truncated"), (1, "terminated")),
    ((30, "truncated"),),
]


class Heard:
    """What the turns of one slot said: observation, action, reward, end, last observation."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.steps: list[list[Any]] = []
        self.totals: list[tuple[float, int]] = []

    def hear(self, turn: Turn, action: Any) -> None:
        """Take a turn, after which the slot does this."""
        (group,) = turn.groups
        if self.row in (ended := group.ended.tolist()):
            at = ended.index(self.row)
            end = "terminated" if group.terminated[at] else "truncated"
            last = np.array(group.last_observations[at])
            self.steps[-1][2:] = [group.last_rewards[at], end, last]
            (over,) = np.flatnonzero(turn.over == self.row)
            self.totals.append((turn.env_returns[over], turn.env_lengths[over]))
            assert turn.agent_returns[over, 0] == turn.env_returns[over]
        elif not group.first[self.row] and self.steps and not self.steps[-1][3]:
            self.steps[-1][2] = group.rewards[self.row]
        at = group.acting.tolist().index(self.row)
        if group.first[at] or self.row in turn.began:
            assert group.first[at]
            assert group.rewards[at] == 0
            assert self.row in turn.began
        if group.idle is None or not group.idle[at]:
            self.steps.append([np.array(group.observations[at]), action, None, "", None])


def check(kind: str, mode: AutoresetMode, scripts: Any, turns: int, box: bool = False) -> None:
    envs = GymnasiumTurns(vector_of(kind, mode, scripts, box))
    try:
        rng = np.random.default_rng(0)
        heard = [Heard(row) for row in range(len(scripts))]
        turn = envs.reset(5)
        for _ in range(turns):
            shape = (len(scripts), 2) if box else (len(scripts),)
            actions = (
                rng.uniform(-0.5, 0.5, shape).astype(np.float32)
                if box
                else rng.integers(3, size=shape)
            )
            for each in heard:
                each.hear(turn, actions[each.row])
            turn = envs.step([actions])
        for each in heard:
            each.hear(turn, None)
    finally:
        envs.close()
    for each, seed in zip(heard, seeds_of(kind, 5, len(scripts)), strict=True):
        done = [step for step in each.steps if step[2] is not None]
        record = play(scripts[each.row], seed, [step[1] for step in done], box)
        totals, total, length = [], 0.0, 0
        for (seen, _, reward, end, last), expected in zip(done, record, strict=True):
            np.testing.assert_array_equal(seen, expected.observation)
            assert reward == pytest.approx(expected.reward)
            said = "terminated" if expected.terminated else "truncated" * expected.truncated
            assert end == said
            total, length = total + expected.reward, length + 1
            if end:
                if end == "truncated":
                    np.testing.assert_array_equal(last, expected.next_observation)
                totals.append((total, length))
                total, length = 0.0, 0
        assert each.totals == [(pytest.approx(total), length) for total, length in totals]
        assert len(each.steps) - len(done) <= 1, "only the last step may be open"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_vector_makes_turns(kind: str, mode: AutoresetMode) -> None:
    check(kind, mode, SCRIPTS, 50)


ENDS = st.sampled_from(["terminated", "truncated", "both"])


@settings(max_examples=60)
@given(
    mode=st.sampled_from(MODES),
    scripts=st.lists(
        st.lists(st.tuples(st.integers(1, 7), ENDS), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    box=st.booleans(),
)
def test_any_script_makes_turns(mode, scripts, box) -> None:
    check("native", mode, scripts, 20, box)


def test_a_reset_forgets_what_was_running() -> None:
    envs = GymnasiumTurns(vector_of("native", AutoresetMode.NEXT_STEP, [((2, "terminated"),)]))
    envs.reset(1)
    for _ in range(2):
        turn = envs.step([np.zeros(1, int)])
    assert turn.groups[0].idle.all()
    turn = envs.reset(1)
    assert turn.groups[0].idle is None
    assert turn.groups[0].first.all()
    assert envs.returns()[0].tolist() == [0.0]
