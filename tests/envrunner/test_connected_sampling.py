"""Sampling with connectors between environments and policy, in every autoreset mode."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from support.scripted_environments import Scripted
from support.scripted_modules import LinearPolicy, Summing
from support.vectors import MODES, vector_of, vector_of_functions

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.evaluation import evaluate
from juggler.envrunner.finiteness import NonFiniteBatch
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.mergeable_state import Moments
from juggler.runtime.connectors.pipelines import (
    EnvToModule,
    build_runner_pipelines,
)
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule

STEPS = 5
SCRIPTS = [
    ((4, "truncated"), (4, "terminated"), (4, "both")),
    ((5, "truncated"), (3, "terminated"), (1, "both"), (1, "truncated"), (1, "terminated")),
    ((30, "truncated"),),
]
ROWS = len(SCRIPTS)


class Infinite(Scripted):
    """Shows an infinite number first, after two steps."""

    def __init__(self) -> None:
        super().__init__(((9, "both"),))

    def observation(self):
        observation = super().observation()
        if self.steps == 2:
            observation[0] = np.inf
        return observation


class Idle(RLModule):
    """Acts the same for every observation."""

    def _forward(self, batch):
        observations = batch["observations"]
        rows = len(observations if isinstance(observations, torch.Tensor) else observations["x"])
        if isinstance(self.action_space, spaces.Box):
            return {"actions": torch.full((rows, *self.action_space.shape), 0.5)}
        return {"actions": torch.ones(rows, dtype=torch.int64)}


def connected(
    env: VectorEnv[Any, Any, Any], module: Any = None, **pieces: Any
) -> tuple[Sampler, EnvToModule, Actor]:
    """A sampler with connectors, and a given or default module."""
    config = ConnectorsConfig(**pieces)
    spaces_ = env.single_observation_space, env.single_action_space
    env_to_module, module_to_env = build_runner_pipelines(config, *spaces_)
    torch.manual_seed(0)
    seen, acted = env_to_module.module_observation_space, module_to_env.action_space
    built = build_module(module, seen, acted, {})
    policy = Actor(built, env.num_envs, STEPS, 0, module_to_env, env_to_module)
    return Sampler(env, policy, STEPS, 7), env_to_module, policy


@pytest.mark.parametrize("kind", ["in turn", "native", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_every_column_of_observations_is_what_the_connectors_make(kind: str, mode) -> None:
    plain_env, env = vector_of(kind, mode, SCRIPTS), vector_of(kind, mode, SCRIPTS)
    plain, _, _ = connected(plain_env, Idle)
    filtered, connectors, _ = connected(env, Idle, env_to_module=["mean_std_filter"])
    for fragment in range(6):
        expected, found = plain.sample((0, 0)), filtered.sample((0, 0))
        for name in ("observations", "last_observations", "final_observations"):
            raw, made = getattr(expected.batch, name), getattr(found.batch, name)
            np.testing.assert_array_equal(made, connectors(raw))
            assert made.dtype == np.float32
        assert expected.connector_delta == {}
        delta = Moments.from_tree(found.connector_delta["mean_std_filter"])
        seen = Moments.of(expected.batch.observations[expected.batch.live])
        assert delta.count == expected.batch.live_steps
        np.testing.assert_allclose(delta.mean, seen.mean)
        np.testing.assert_allclose(delta.m2, seen.m2)
        if fragment == 2:
            connectors.set_state(found.connector_delta)
    assert not np.array_equal(expected.batch.observations, found.batch.observations)
    plain_env.close()
    env.close()


def test_batches_hold_what_the_policy_chose_and_environments_get_what_connectors_make() -> None:
    env = vector_of("in turn", AutoresetMode.SAME_STEP, SCRIPTS, box=True)
    got: list[np.ndarray] = []
    step = env.step
    env.step = lambda actions: (got.append(actions), step(actions))[1]
    sampler, _, policy = connected(env, Idle, module_to_env=["rescale_actions"])
    batch = sampler.sample((0, 0)).batch
    assert (batch.actions == 0.5).all()
    assert len(got) == STEPS
    assert all((actions == 0.25).all() for actions in got)  # the bounds are -0.5 and 0.5
    got.clear()
    evaluate(env, policy, ROWS, 0)
    assert all((actions == 0.25).all() for actions in got)
    env.close()


def test_an_evaluation_shows_the_policy_what_sampling_does_and_learns_nothing() -> None:
    env = vector_of("in turn", AutoresetMode.NEXT_STEP, SCRIPTS)
    pieces = ["mean_std_filter", {"use": "frame_stack", "k": 2}]
    sampler, connectors, policy = connected(env, env_to_module=pieces)
    connectors.set_state(sampler.sample((0, 0)).connector_delta)
    seen: list[np.ndarray] = []
    infer = policy._acting.infer
    firsts: list[np.ndarray] = []
    act = policy.act
    policy.act = lambda *given, first, **kept: (
        firsts.append(first.copy()),
        act(*given, first=first, **kept),
    )[1]
    policy._acting.infer = lambda observations, states: (
        seen.append((observations.copy(), firsts[-1])),
        infer(observations, states),
    )[1]
    evaluate(env, policy, 6, 3)
    env.close()
    assert connectors.take_delta(np.zeros((ROWS, 0), np.bool_))["mean_std_filter"]["count"] == 0
    last = np.zeros((ROWS, 3), np.float32)
    for stacks, first in seen:
        before, now = stacks[:, :3], stacks[:, 3:]
        np.testing.assert_array_equal(before, np.where(first[:, None], now, last))
        last = now
    assert max(stacks.max() for stacks, _ in seen) == 10  # as the filter clips; steps count to 30


def test_an_infinite_observation_is_found_though_the_filter_clips_it() -> None:
    env = vector_of_functions("in turn", AutoresetMode.SAME_STEP, [Scripted, Infinite])
    sampler, _, _ = connected(env, Idle, env_to_module=["mean_std_filter"])
    with pytest.raises(NonFiniteBatch) as found:
        sampler.sample((0, 0))
    error = found.value
    assert (error.environment, error.step, error.column) == (1, 2, "observations")
    assert error.live_steps == 2 * STEPS
    sampler.reset(0)
    env.close()


def test_a_reset_starts_with_contexts_and_watches_of_its_own() -> None:
    env = vector_of("in turn", AutoresetMode.SAME_STEP, SCRIPTS)
    pieces = ["mean_std_filter", {"use": "frame_stack", "k": 2}]
    sampler, _, _ = connected(env, Idle, env_to_module=pieces)
    first = sampler.sample((0, 0))
    step = env.step
    env.step = lambda actions: 1 / 0  # it fails in the middle of a fragment
    with pytest.raises(ZeroDivisionError):
        sampler.sample((0, 0))
    env.step = step
    sampler.reset(7)
    fragment = sampler.sample((0, 0))
    count = fragment.connector_delta["mean_std_filter"]["count"]
    assert count == ROWS * STEPS == fragment.batch.live_steps
    context = fragment.batch.states["connectors"]["frame_stack"]
    np.testing.assert_array_equal(context[:, 0], fragment.batch.observations[:, 0])
    assert first.batch.states["connectors"]["frame_stack"].shape == (ROWS, 1, 3)
    env.close()


# The state of a recurrent module, from step to step, fragment to fragment, episode to episode.


RECURRENT_SAMPLING_STEPS = 4


def sampler_of(env, seed: int = 5) -> tuple[Summing, Sampler]:
    module = Summing(env.single_observation_space, env.single_action_space)
    return module, Sampler(
        env,
        Actor(module, env.num_envs, RECURRENT_SAMPLING_STEPS, 0),
        RECURRENT_SAMPLING_STEPS,
        seed,
    )


def test_states_at_the_start_of_rows_outlive_a_module_that_writes_into_its_own() -> None:
    class InPlace(Summing):
        def _forward(self, batch):
            outputs = super()._forward(batch)
            state = batch["states"]["sum"]["of"]
            state.copy_(outputs["states"]["sum"]["of"])
            return {**outputs, "states": batch["states"]}

    def states(kind) -> list[np.ndarray]:
        env = vector_of("in turn", AutoresetMode.SAME_STEP, SCRIPTS)
        module = kind(env.single_observation_space, env.single_action_space)
        sampler = Sampler(
            env, Actor(module, 3, RECURRENT_SAMPLING_STEPS, 0), RECURRENT_SAMPLING_STEPS, 5
        )
        batches = [sampler.sample((0, 0)).batch for _ in range(4)]
        return [batch.states["module"]["sum"]["of"] for batch in batches]

    np.testing.assert_array_equal(states(InPlace), states(Summing))


def test_an_initial_state_that_is_learned_comes_with_the_weights() -> None:
    class Learned(LinearPolicy):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.initial = torch.nn.Parameter(torch.zeros(2))

        def get_initial_state(self):
            return {"h": self.initial}

        def _forward(self, batch):
            return {**super()._forward(batch), "states": batch["states"]}

    env = vector_of("in turn", AutoresetMode.SAME_STEP, [((2, "terminated"),), ((9, "truncated"),)])
    module = Learned(env.single_observation_space, env.single_action_space)
    policy = Actor(module, 2, RECURRENT_SAMPLING_STEPS, 0)
    sampler = Sampler(env, policy, RECURRENT_SAMPLING_STEPS, 5)
    assert not sampler.sample((0, 0)).batch.states["module"]["h"].any()
    weights = {"initial": np.array([3, 4], np.float32), "weight": module.weight.numpy()}
    policy.load(weights)
    # Both episodes that begin the next rows: one starts there, the other one began before.
    assert sampler.sample((0, 0)).batch.states["module"]["h"].tolist() == [[3, 4], [0, 0]]


# CartPole with hidden velocities is CartPole in everything but what is seen.


NAME = "juggler.envrunner.memory_cartpole:MemoryCartPole-v0"


@pytest.mark.parametrize("vectorize", ["native", "sync"])
def test_its_episodes_are_those_of_cartpole_without_the_velocities(vectorize: str) -> None:
    hidden, plain = (
        make_vector_env(EnvRunnerConfig(env=env, envs_per_runner=3, vectorize=vectorize))  # type: ignore[arg-type]
        for env in (NAME, "CartPole-v1")
    )
    seen, _ = hidden.reset(seed=3)
    everything, _ = plain.reset(seed=3)
    assert hidden.single_observation_space.shape == (2,)
    ends = 0
    for step in range(60):
        np.testing.assert_array_equal(seen, everything[:, ::2])
        assert hidden.observation_space.contains(seen)
        actions = np.full(3, step // 2 % 3 == 0, np.int64)  # [3]
        seen, *rest, _ = hidden.step(actions)
        everything, *others, _ = plain.step(actions)
        for mine, theirs in zip(rest, others, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        ends += int(rest[1].sum())
    assert ends > 0
    hidden.close()
    plain.close()


def test_an_episode_has_500_steps_at_most_as_in_cartpole() -> None:
    gymnasium.make(NAME).close()  # registers it
    spec = gymnasium.spec("MemoryCartPole-v0")
    assert spec.max_episode_steps == gymnasium.spec("CartPole-v1").max_episode_steps
