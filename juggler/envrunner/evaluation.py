"""Evaluates a policy on whole episodes, without exploration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from juggler.envrunner.agent_returns import AgentReturns
from juggler.envrunner.datasets.episode_recorder import EpisodeRecorder
from juggler.envrunner.environments.autoreset import autoreset_mode
from juggler.envrunner.environments.legal_actions import LegalActions
from juggler.envrunner.environments.observed_choices import ObservedChoices
from juggler.envrunner.environments.vector import reset_environments
from juggler.envrunner.finiteness import check_return
from juggler.runtime.acting.actor import Actor
from juggler.runtime.checkpoints.checkpoint import CONNECTORS
from juggler.runtime.checkpoints.frozen import WEIGHTS
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.mergeable_state import check
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import to_tree
from juggler.runtime.wire.trees import Tree


@dataclass(frozen=True, slots=True)
class Goal:
    """The mean return that an evaluation is to reach.

    Attributes:
        mean: the goal.
        best: the best return of an episode in training.
    """

    mean: float
    best: float

    def out_of_reach(self, returns: Sequence[float], episodes: int) -> bool:
        """Tell whether the mean stays below the goal even if every episode left is the best."""
        best = max((self.best, *returns))
        return sum(returns) + (episodes - len(returns)) * best < self.mean * episodes


class PlayedEpisodes(NamedTuple):
    """Whole episodes that were played.

    Attributes:
        returns: undiscounted returns, by environment and then by time; with several agents, the
            sums over them.
        lengths: numbers of environment steps, in the same order.
        agent_returns: what each of several agents got; {}: there is one.
    """

    returns: list[float]
    lengths: list[int]
    agent_returns: AgentReturns


def load_trees(
    trees: Mapping[str, Tree],
    into: Mapping[str, tuple[Actor, EnvToModule]],
    *,
    may_lack: bool = False,
) -> None:
    """Load a checkpoint of this run into policies and their connectors.

    Args:
        trees: as `playing_trees` gives them.
        into: by module id.
        may_lack: modules that the checkpoint does not have stay as they are.

    Raises:
        ValueError: it lacks a module, or has something else than what a module plays with.
    """
    for module_id, (policy, connectors) in into.items():
        tree: Any = trees.get(module_id)
        if tree is None and may_lack:
            continue
        if tree is None:
            raise ValueError(f"the checkpoint to play has no weights of module {module_id!r}")
        load_tree(module_id, tree, policy, connectors)


def load_tree(module_id: str, tree: Any, policy: Actor, connectors: EnvToModule) -> None:
    """Load what a checkpoint has of a module into its policy and its connectors.

    Raises:
        ValueError: it lacks weights that the module has, or they do not fit.
    """
    weights = tree[WEIGHTS]
    if missing := [name for name in policy.names if name not in weights]:
        raise ValueError(
            f"the checkpoint of module {module_id!r} is another module's: it has no "
            f"{', '.join(missing)}"
        )
    policy.load({name: weights[name] for name in policy.names})
    if learned := check(tree[CONNECTORS]):
        connectors.set_state(learned)


def evaluate(
    env: VectorEnv[Any, Any, Any],
    policy: Actor,
    episodes: int,
    seed: int,
    watch: Callable[[int, int], None] | None = None,
    *,
    most_steps: int = 0,
    goal: Goal | None = None,
    recorder: EpisodeRecorder | None = None,
) -> PlayedEpisodes:
    """Play episodes deterministically in freshly seeded environments.

    Each environment plays a fixed share of the episodes: taking the first that end would favour
    short ones.

    Args:
        env: with any autoreset mode. A sampler that uses it must be reset afterwards.
        policy: has as many rows as `env`; its connectors learn nothing here.
        episodes: at least 1.
        seed: of the environments.
        watch: called after each step with the number of finished episodes and of steps so far.
        most_steps: limit of an episode's steps; an episode that reaches it counts as it is, and the
            steps after it count as another. 0: no limit.
        goal: stop as soon as it is out of reach.
        recorder: hears of every step of the episodes.

    Raises:
        EnvironmentFailed: an environment failed, or a return was not finite in float32.
    """
    count, space = env.num_envs, env.single_observation_space
    connectors = policy.connectors or EnvToModule({}, {}, space)
    owed = np.full(count, episodes // count)  # [N] episodes left to play
    owed[: episodes % count] += 1
    mode = autoreset_mode(env)
    legal = LegalActions.of(connectors.observation_space, env.single_action_space, "an evaluation")
    choices = ObservedChoices(connectors.observation_space, "an evaluation")
    played: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    returns, lengths = np.zeros(count), np.zeros(count, np.int64)  # [N] both, so far
    live = np.ones(count, np.bool_)  # [N] false where the next step only resets
    first = np.ones(count, np.bool_)  # [N] where the next step is an episode's first
    step = 0
    observations = reset_environments(env, seed)  # [N, ...]
    while owed.any():
        place = lambda row, *_, step=step: (row, step)  # noqa: E731
        tree: Any = choices.through(connectors, to_tree(space, observations), place)  # [N, ...]
        choices.require(tree, place)
        if legal is not None:
            legal.require(tree[ACTION_MASK], step, over=~live)
        actions = policy.act(tree, first=first, explore=False, keep=False).sent
        if recorder is not None:
            recorder.sees(observations)
        observations, rewards, terminated, truncated, infos = env.step(actions)
        if recorder is not None:
            recorded = live & (owed > 0)  # [N]
            after = terminated, truncated, observations, infos
            recorder.step(actions, rewards, *after, recorded)
        policy.rewarded(rewards)
        done = (terminated | truncated) & live  # [N]
        returns[live] += rewards[live]
        lengths += live
        counted = done | (lengths == most_steps) if most_steps else done  # [N]
        for row in np.flatnonzero(counted & (owed > 0)):
            total = float(returns[row])
            check_return(int(row), total)
            played[row].append((total, int(lengths[row])))
            owed[row] -= 1
        returns[counted], lengths[counted] = 0, 0
        if mode is AutoresetMode.NEXT_STEP:
            first, live = ~live, ~done
        else:
            first = done
            if mode is AutoresetMode.DISABLED and done.any():
                observations, _ = env.reset(options={"reset_mask": done})
        step += 1
        if watch is not None:
            watch(episodes - int(owed.sum()), step)
        if goal is not None and counted.any():
            so_far = [total for row in played for total, _ in row]
            if so_far and goal.out_of_reach(so_far, episodes):
                break
    ended = [episode for row in played for episode in row]
    return PlayedEpisodes([each[0] for each in ended], [each[1] for each in ended], {})
