"""Whole episodes, played as well as the policy can."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from juggler.envrunner.autoreset import autoreset_mode
from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.envrunner.environments import reset_environments
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.legal_actions import LegalActions
from juggler.runtime.connectors.env_to_module import Contexts, EnvToModule
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import to_tree, tree_map


def evaluate(
    env: VectorEnv[Any, Any, Any],
    policy: BehaviourPolicy,
    episodes: int,
    seed: int,
    connectors: EnvToModule | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> tuple[list[float], list[int]]:
    """Play episodes deterministically, from freshly seeded environments.

    Every environment plays its share of the episodes, settled beforehand: taking those that end
    first would favour short ones.

    Args:
        env: with any autoreset mode. A sampler that uses it must be reset afterwards.
        policy: as many rows as `env` has.
        episodes: at least 1.
        seed: of the environments.
        connectors: between the environments and the policy; they learn nothing here.
        watch: called behind each step with the episodes that have ended, and the steps so far.

    Returns:
        Undiscounted returns and lengths, by environment and then by time.

    Raises:
        EnvironmentFailed: an environment did, or its rewards were not finite.
    """
    count, space = env.num_envs, env.single_observation_space
    connectors = connectors or EnvToModule({}, {}, space)
    contexts = Contexts(connectors.contexts)
    owed = np.full(count, episodes // count)  # [N] episodes still to be played
    owed[: episodes % count] += 1
    mode = autoreset_mode(env)
    legal = LegalActions.of(connectors.observation_space, env.single_action_space, "an evaluation")
    played: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    returns, lengths = np.zeros(count), np.zeros(count, np.int64)  # [N] both, so far
    live = np.ones(count, np.bool_)  # [N] false where the next step only resets
    first = np.ones(count, np.bool_)  # [N] where the next step is an episode's first
    step = 0
    observations = reset_environments(env, seed)  # [N, ...]
    while owed.any():
        tree: Any = connectors(to_tree(space, observations))  # [N, ...]
        if legal is not None:
            legal.require(tree[ACTION_MASK], step, over=~live)
        if connectors.contexts:
            # The environments' own memory, until their step; context is worked out behind that.
            tree = tree_map(np.copy, tree)  # [N, ...]
        seen = contexts.see(tree, first)  # [N, ...]
        actions = policy.act_deterministically(seen, first)
        observations, rewards, terminated, truncated, _ = env.step(actions)
        contexts.acted(policy.chosen, rewards)
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
            first, live = ~live, ~done
        else:
            first = done
            if mode is AutoresetMode.DISABLED and done.any():
                observations, _ = env.reset(options={"reset_mask": done})
        step += 1
        if watch is not None:
            watch(episodes - int(owed.sum()), step)
    ended = [episode for row in played for episode in row]
    return [episode[0] for episode in ended], [episode[1] for episode in ended]
