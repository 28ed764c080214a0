from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from support import vectors
from support.scripted_environments import NotFinite, Scripted
from support.scripted_modules import LinearPolicy, Summing
from support.vectors import KINDS, MODES, seeds_of

from juggler.envrunner.evaluation import Goal, evaluate, load_trees
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.acting.actor import Actor
from juggler.runtime.checkpoints.checkpoint import CONNECTORS
from juggler.runtime.checkpoints.frozen import WEIGHTS
from juggler.runtime.connectors.env_to_module import EnvToModule

# The first environment's episodes are short, and the last one's long.
SCRIPTS = [
    ((1, "terminated"), (2, "truncated")),
    ((6, "truncated"), (3, "both")),
    ((40, "terminated"),),
]


def vector_of(kind: str, mode: AutoresetMode) -> VectorEnv:
    return vectors.vector_of(kind, mode, SCRIPTS)


def policy_of(rows: int, kind=LinearPolicy) -> Actor:
    env = Scripted()
    module = kind(env.observation_space, env.action_space)
    return Actor(module, rows, 1, 0)


def reference(script, seed: int, episodes: int, kind=LinearPolicy) -> list[tuple[float, int]]:
    """One environment, played alone."""
    env, policy = Scripted(script), policy_of(1, kind)
    played = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=None if episode else seed)
        total, steps, over = 0.0, 0, False
        while not over:
            first = np.array([steps == 0]) if policy.remembers else None
            action = policy.act(observation[None], first=first, explore=False).sent[0]
            observation, reward, terminated, truncated, _ = env.step(action)
            total, steps, over = total + reward, steps + 1, terminated or truncated
        played.append((total, steps))
    return played


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [LinearPolicy, Summing])
def test_every_environment_plays_its_share_of_whole_episodes(kind, mode, module) -> None:
    env = vector_of(kind, mode)
    returns, lengths, _ = evaluate(env, policy_of(3, module), episodes=8, seed=2)
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


def test_an_episode_whose_return_is_beyond_float32_is_an_error() -> None:
    bad = NotFinite(1, "rewards", ((2, "terminated"),), reward=1e39)
    env = SyncVectorEnv([Scripted, lambda: bad], copy=False)
    with pytest.raises(EnvironmentFailed, match=r"environment 1 .* is 1e\+39: scale rewards"):
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


@pytest.mark.parametrize(
    ("returns", "best", "out"),
    [
        ([], 10.0, False),
        ([0.0], 10.0, False),  # 9 each of the other nine
        ([0.0, 0.0], 10.0, True),
        ([0.0, 30.0], 10.0, False),  # there are better ones than was known
        ([-1.0] * 9, 10.0, True),
        ([9.0] * 10, 10.0, False),
    ],
)
def test_a_goal_is_out_of_reach_when_the_best_episodes_would_not_get_there(
    returns: list[float], best: float, out: bool
) -> None:
    assert Goal(9.0, best).out_of_reach(returns, 10) is out


def test_an_evaluation_ends_when_its_goal_is_out_of_reach() -> None:
    env = vector_of("sync", AutoresetMode.SAME_STEP)
    whole = evaluate(env, policy_of(3), episodes=30, seed=0)[0]
    env = vector_of("sync", AutoresetMode.SAME_STEP)
    goal = Goal(sum(whole) / len(whole) - 0.1, max(whole))
    assert evaluate(env, policy_of(3), episodes=30, seed=0, goal=goal)[0] == whole
    env = vector_of("sync", AutoresetMode.SAME_STEP)
    hopeless = evaluate(env, policy_of(3), episodes=30, seed=0, goal=Goal(1e9, 1.0))[0]
    assert hopeless == whole[:1]


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_without_an_end_counts_as_it_is_after_the_most_steps(mode) -> None:
    env = vectors.vector_of("sync", mode, [((1000, "terminated"),), ((2, "terminated"),)])
    returns, lengths, _ = evaluate(env, policy_of(2), episodes=6, seed=0, most_steps=7)
    assert lengths == [7, 7, 7, 2, 2, 2]
    alone = vectors.vector_of("sync", mode, [((7, "terminated"),), ((2, "terminated"),)])
    assert returns[0] == evaluate(alone, policy_of(2), episodes=2, seed=0)[0][0]


def test_somebody_watches_every_step_of_an_evaluation() -> None:
    """Hence a long one is known not to hang."""
    seen: list[tuple[int, int]] = []
    evaluate(
        vector_of("sync", AutoresetMode.SAME_STEP),
        policy_of(3),
        episodes=3,
        seed=0,
        watch=lambda *now: seen.append(now),
    )
    assert [steps for _, steps in seen] == list(range(1, 41))


def test_a_checkpoint_that_lacks_weights_of_a_module_is_told() -> None:
    policy, connectors = policy_of(1), EnvToModule({}, {}, Scripted().observation_space)
    lacks: Any = {"default": {WEIGHTS: {}, CONNECTORS: {}}}
    with pytest.raises(ValueError, match="'default' is another module's: it has no ") as told:
        load_trees(lacks, {"default": (policy, connectors)})
    assert all(name in str(told.value) for name in policy.names)
