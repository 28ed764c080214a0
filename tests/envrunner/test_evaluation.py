from __future__ import annotations

import numpy as np
import pytest
import vectors
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from scripted_environments import NotFinite, Scripted
from scripted_modules import LinearPolicy, Summing
from vectors import KINDS, MODES, seeds_of

from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.envrunner.evaluation import evaluate
from juggler.envrunner.failures import EnvironmentFailed

# The first environment's episodes are short, and the last one's long.
SCRIPTS = [
    ((1, "terminated"), (2, "truncated")),
    ((6, "truncated"), (3, "both")),
    ((40, "terminated"),),
]


def vector_of(kind: str, mode: AutoresetMode) -> VectorEnv:
    return vectors.vector_of(kind, mode, SCRIPTS)


def policy_of(rows: int, kind=LinearPolicy) -> BehaviourPolicy:
    env = Scripted()
    module = kind(env.observation_space, env.action_space)
    return BehaviourPolicy(module, rows, 1, 0)


def reference(script, seed: int, episodes: int, kind=LinearPolicy) -> list[tuple[float, int]]:
    """One environment, played alone."""
    env, policy = Scripted(script), policy_of(1, kind)
    played = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=None if episode else seed)
        total, steps, over = 0.0, 0, False
        while not over:
            first = np.array([steps == 0]) if policy.remembers else None
            action = policy.act_deterministically(observation[None], first)[0]
            observation, reward, terminated, truncated, _ = env.step(action)
            total, steps, over = total + reward, steps + 1, terminated or truncated
        played.append((total, steps))
    return played


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [LinearPolicy, Summing])
def test_every_environment_plays_its_share_of_whole_episodes(kind, mode, module) -> None:
    env = vector_of(kind, mode)
    returns, lengths = evaluate(env, policy_of(3, module), episodes=8, seed=2)
    env.close()
    seeds = seeds_of(kind, 2, 3)
    expected = [
        episode
        for script, seed, share in zip(SCRIPTS, seeds, (3, 3, 2), strict=True)
        for episode in reference(script, seed, share, module)
    ]
    assert lengths == [1, 2, 1, 6, 3, 6, 40, 40]
    assert lengths == [length for _, length in expected]
    np.testing.assert_allclose(returns, [total for total, _ in expected])


def test_an_episode_whose_return_is_not_finite_is_an_error() -> None:
    script = ((2, "terminated"),)
    env = SyncVectorEnv([Scripted, lambda: NotFinite(1, "rewards", script)], copy=False)
    with pytest.raises(EnvironmentFailed, match=r"environment 1 .* is nan"):
        evaluate(env, policy_of(2), episodes=2, seed=0)


def test_fewer_episodes_than_environments_are_played_by_the_first_ones() -> None:
    env = vector_of("sync", AutoresetMode.SAME_STEP)
    assert evaluate(env, policy_of(3), episodes=2, seed=0)[1] == [1, 6]


def test_an_evaluation_does_not_depend_on_what_was_played_before() -> None:
    env = vector_of("native", AutoresetMode.NEXT_STEP)
    first = evaluate(env, policy_of(3), episodes=3, seed=4)
    for single in env.envs:
        single.episode = -1
    assert evaluate(env, policy_of(3), episodes=3, seed=4) == first
    for single in env.envs:
        single.episode = -1
    assert evaluate(env, policy_of(3), episodes=3, seed=5) != first
