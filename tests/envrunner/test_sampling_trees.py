"""Observations and actions in Dicts and Tuples are sampled alike."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from support.scripted_environments import (
    AsTrees,
    NativeAsTrees,
    NativeScripted,
    Scripted,
    as_tree,
    scripted_trees,
)
from support.scripted_modules import LinearPolicy
from support.vectors import KINDS, MODES, vector_of, vector_of_functions

from juggler.envrunner.evaluation import evaluate
from juggler.envrunner.finiteness import NonFiniteBatch
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.modules.distributions.for_space import distribution_for
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import to_tree
from juggler.runtime.wire.trees import flatten

STEPS = 4
SCRIPTS = [
    ((4, "truncated"), (4, "terminated"), (4, "both")),
    ((5, "truncated"), (3, "terminated"), (1, "both"), (1, "truncated"), (1, "terminated")),
    ((30, "truncated"),),
]


class SameFirst(LinearPolicy):
    """Acts on trees as LinearPolicy acts on their plain observations."""

    def __init__(self, plain: VectorEnv[Any, Any, Any], env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(plain.single_observation_space, plain.single_action_space)
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.plain_action_space = plain.single_action_space

    def _forward(self, batch):
        rows = len(batch["observations"]["count"])
        inputs = super()._forward(batch)["action_dist_inputs"]
        first = distribution_for(self.plain_action_space)(inputs).mode()  # [B, ...]
        bits, many = torch.ones(rows, 2, dtype=torch.int8), torch.tensor([[1, 2]] * rows)
        return {"actions": {"act": {"0": first}, "others": {"bits": bits, "many": many}}}


class Deterministic(LinearPolicy):
    def _forward(self, batch):
        inputs = super()._forward(batch)["action_dist_inputs"]
        return {"actions": self.action_distribution()(inputs).mode()}


def tree_vector_of(kind: str, mode: AutoresetMode, box: bool) -> VectorEnv[Any, Any, Any]:
    if kind == "native":
        return NativeAsTrees(NativeScripted(SCRIPTS, mode, box))
    made = [functools.partial(scripted_trees, script, box) for script in SCRIPTS]
    return vector_of_functions(kind, mode, made)


def policy_of(module: RLModule, rows: int = 3) -> Actor:
    return Actor(module, rows, STEPS, 0)


@pytest.mark.parametrize(
    ("kind", "mode", "box"),
    [
        (kind, mode, bool((i + j) % 2))
        for i, kind in enumerate(KINDS)
        for j, mode in enumerate(MODES)
    ],
)
def test_trees_hold_what_plain_observations_and_actions_hold(
    kind: str, mode: AutoresetMode, box: bool
) -> None:
    plain, env = vector_of(kind, mode, SCRIPTS, box), tree_vector_of(kind, mode, box)
    chosen = Deterministic(plain.single_observation_space, plain.single_action_space)
    expected_from = Sampler(plain, policy_of(chosen), STEPS, 5)
    found_from = Sampler(env, policy_of(SameFirst(plain, env)), STEPS, 5)
    for _ in range(8):
        expected, found = expected_from.sample((0, 0)), found_from.sample((0, 0))
        for column in ("observations", "last_observations", "final_observations"):
            _assert_trees(getattr(found.batch, column), getattr(expected.batch, column), env)
        np.testing.assert_array_equal(found.batch.actions["act"]["0"], expected.batch.actions)
        assert found.batch.actions["others"]["bits"].shape == (3, STEPS, 2)
        assert found.batch.actions["others"]["many"][2, 3].tolist() == [1, 2]
        for column in ("rewards", "terminated", "truncated", "live", "final_rows", "final_steps"):
            np.testing.assert_array_equal(
                getattr(found.batch, column), getattr(expected.batch, column)
            )
        assert found.episode_returns == expected.episode_returns
    found_episodes = evaluate(env, policy_of(SameFirst(plain, env)), 5, seed=1)
    assert found_episodes == evaluate(plain, policy_of(chosen), 5, seed=1)
    plain.close()
    env.close()


def _assert_trees(found: Any, plain: Any, env: VectorEnv[Any, Any, Any]) -> None:
    expected = to_tree(env.single_observation_space, as_tree(plain))
    assert [path for path, _ in flatten(found)] == [path for path, _ in flatten(expected)]
    for (_, ours), (_, theirs) in zip(flatten(found), flatten(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_a_number_that_is_not_finite_is_named_with_its_place_in_the_tree() -> None:
    class Broken(AsTrees):
        def step(self, action):
            observation, *rest = super().step(action)
            if self.unwrapped.steps == 2:
                observation["floats"][1]["state"][:] = np.nan
            return observation, *rest

    script = ((9, "terminated"),)
    functions = [lambda: AsTrees(Scripted(script)), lambda: Broken(Scripted(script))]
    env = vector_of_functions("in turn", AutoresetMode.SAME_STEP, functions)
    module = LinearPolicy(env.single_observation_space, env.single_action_space)
    sampler = Sampler(env, policy_of(module, rows=2), STEPS, 5)
    with pytest.raises(
        NonFiniteBatch, match=r"^observations/floats/1/state of environment 1 at step 2"
    ):
        sampler.sample((0, 0))
