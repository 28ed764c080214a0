"""Whole episodes, played as well as the policy can."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.envrunner.environments import autoreset_mode, reset_environments
from juggler.envrunner.failures import EnvironmentFailed


def evaluate(
    env: VectorEnv[Any, Any, Any], policy: BehaviourPolicy, episodes: int, seed: int
) -> tuple[list[float], list[int]]:
    """Play episodes deterministically, from freshly seeded environments.

    Every environment plays its share of the episodes, settled beforehand: taking those that end
    first would favour short ones.

    Args:
        env: with any autoreset mode. A sampler that uses it must be reset afterwards.
        policy: as many rows as `env` has.
        episodes: at least 1.
        seed: of the environments.

    Returns:
        Undiscounted returns and lengths, by environment and then by time.

    Raises:
        EnvironmentFailed: an environment did, or its rewards were not finite.
    """
    count = env.num_envs
    owed = np.full(count, episodes // count)  # [N] episodes still to be played
    owed[: episodes % count] += 1
    mode = autoreset_mode(env)
    played: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    returns, lengths = np.zeros(count), np.zeros(count, np.int64)  # [N] both, so far
    live = np.ones(count, np.bool_)  # [N] false where the next step only resets
    observations = reset_environments(env, seed)  # [N, ...]
    while owed.any():
        actions = policy.act_deterministically(observations)  # [N, ...]
        observations, rewards, terminated, truncated, _ = env.step(actions)
        done = (terminated | truncated) & live  # [N]
        returns[live] += rewards[live]
        lengths += live
        for row in np.flatnonzero(done & (owed > 0)):
            total = float(returns[row])
            if not math.isfinite(total):
                reason = f"the return of its episode is {total}: rewards must be finite numbers"
                raise EnvironmentFailed(f"environment {row}", "step", reason)
            played[row].append((total, int(lengths[row])))
            owed[row] -= 1
        returns[done], lengths[done] = 0, 0
        if mode is AutoresetMode.NEXT_STEP:
            live = ~done
        elif mode is AutoresetMode.DISABLED and done.any():
            observations, _ = env.reset(options={"reset_mask": done})
    ended = [episode for row in played for episode in row]
    return [episode[0] for episode in ended], [episode[1] for episode in ended]
