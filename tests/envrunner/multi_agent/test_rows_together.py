"""Rows that fill together hold what rows at their own pace would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from support.scripted_environments import NativeAsTrees, NativeScripted
from support.scripted_modules import LinearPolicy, Summing

from juggler.envrunner.evaluation import GymnasiumTurns
from juggler.envrunner.multi_agent.line_up import Role
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.multi_agent_stage import MultiAgentSampler
from juggler.envrunner.multi_agent.turns import Turn
from juggler.envrunner.rounds import TrainedResult
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.trees import flatten

STEPS = 4
SCRIPTS = [
    ((4, "truncated"), (4, "terminated"), (4, "both")),
    ((5, "truncated"), (3, "terminated"), (1, "both"), (1, "truncated"), (1, "terminated")),
    ((30, "truncated"),),
]


class Fixed(RLModule):
    """Gives actions without the inputs of a distribution."""

    def _forward(self, batch):
        return {"actions": torch.ones(len(batch["observations"]), dtype=torch.int64)}


class Apart(GymnasiumTurns):
    """Gives other arrays for the same slots."""

    def step(self, actions: Any) -> Turn:
        turn = super().step(actions)
        (group,) = turn.groups
        group.acting = group.acting.copy()
        return turn


def sampler_of(
    kind: type[GymnasiumTurns], make_module: Any, in_round: int, row_age: int, trees: bool
) -> MultiAgentSampler:
    env: Any = NativeScripted(SCRIPTS, AutoresetMode.SAME_STEP)
    envs = kind(NativeAsTrees(env) if trees else env)
    (group,) = envs.groups
    module = make_module(group.observation_space, group.action_space, {})
    role = Role("m", envs.agents, 0, group)
    policy = Actor(module, 1, 0, 0)
    slots = ModuleSlots(role, envs.num_envs, envs.agents, policy, STEPS, row_age)
    return MultiAgentSampler(envs, {"m": slots}, in_round, 5)


def columns_of(result: Any) -> tuple[dict[str, Any], list[int]]:
    """Return columns in an order of rows, and episodes by segment."""
    assert isinstance(result, TrainedResult)
    if result.batch is None:
        return {}, []
    columns = {"/".join(path): array for path, array in flatten(result.batch.to_tree())}
    rows = np.lexsort(columns["rewards"].T)  # [N]
    place = np.argsort(rows)  # [N] of each row
    for of, by in (("final", "steps"), ("segment", "starts")):
        columns[f"{of}_rows"] = place[columns[f"{of}_rows"]]
        order = np.lexsort((columns[f"{of}_{by}"], columns[f"{of}_rows"]))
        for name in columns:
            if name.startswith(of):
                columns[name] = columns[name][order]
    ids = columns.pop("segment_episodes").tolist()
    # What follows an end is never read: the last observation, or the next episode's first one.
    runs_on = ~(columns["terminated"] | columns["truncated"])[rows, -1]  # [N]
    for name in columns:
        if not name.startswith(("final", "segment")):
            columns[name] = columns[name][rows]
        if name.startswith("last_observations"):
            columns[name] = columns[name][runs_on]
    return columns, ids


@pytest.mark.parametrize("row_age", [0, 2])
@pytest.mark.parametrize("in_round", [3, STEPS, 2 * STEPS])
@pytest.mark.parametrize(
    ("make_module", "trees"),
    [(LinearPolicy, False), (LinearPolicy, True), (Summing, False), (Fixed, False)],
)
def test_rows_together_are_those_at_their_own_pace(make_module, trees, in_round, row_age) -> None:
    kinds = GymnasiumTurns, Apart
    made = [sampler_of(kind, make_module, in_round, row_age, trees) for kind in kinds]
    ended, batches, stale, identities = 0, 0, 0, {}
    for update in range(24):
        collected = ["m"] if update % 5 else []
        both = [
            sampler.sample(collected, {"m": Version(0, update // 2)}).modules for sampler in made
        ]
        if not collected:
            continue
        ours, theirs = (modules["m"] for modules in both)
        (mine, my_ids), (expected, ids) = columns_of(ours), columns_of(theirs)
        assert mine.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(mine[name], array, rtol=1e-6, err_msg=name)
            assert mine[name].dtype == array.dtype
        np.testing.assert_allclose(sorted(ours.episode_returns), sorted(theirs.episode_returns))
        assert sorted(ours.episode_lengths) == sorted(theirs.episode_lengths)
        assert (ours.stale_steps, ours.version) == (theirs.stale_steps, theirs.version)
        # Each episode has one id in each sampler.
        for one, other in zip(my_ids, ids, strict=True):
            assert identities.setdefault(one, other) == other
        batches += bool(mine)
        ended, stale = ended + len(ours.episode_returns), stale + ours.stale_steps
    assert batches > 5
    assert ended > 20
    # More rows than batches take are dropped in the end.
    assert bool(stale) == (in_round > STEPS)
    assert len(set(identities.values())) == len(identities)
