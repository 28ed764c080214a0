"""Evaluates modules together on whole episodes with several agents, without exploration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from juggler.envrunner.evaluation import Goal
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.line_up import LineUps
from juggler.envrunner.multi_agent.module_slots import ModuleSlots, merged_actions
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn


def play_whole_episodes(
    envs: MultiAgentEnvs,
    modules: Sequence[ModuleSlots],
    episodes: int,
    seed: int,
    watch: Callable[[int, int], None] | None = None,
    *,
    most_steps: int = 0,
    goal: Goal | None = None,
    line_ups: LineUps | None = None,
) -> tuple[list[float], list[int]]:
    """Play episodes deterministically in freshly seeded environments.

    Each environment plays a fixed share of the episodes: taking the first that end would favour
    short ones.

    Args:
        envs: N environments. A sampler that uses them must be reset afterwards.
        modules: play all agents.
        episodes: at least 1.
        seed: of the environments.
        watch: called after each step with the number of finished episodes and of steps so far.
        most_steps: limit of an episode's environment steps; an episode that reaches it counts as it
            is, with the rewards that its agents were told by then, and the steps after it count as
            another. 0: no limit.
        goal: stop as soon as it is out of reach.
        line_ups: decides who plays each episode, from the same seed; None: each module plays all of
            its agents. Somebody else who uses it must reset it afterwards.

    Returns:
        Undiscounted returns, each the sum over all agents, and numbers of environment steps; by
        environment and then by time.

    Raises:
        EnvironmentFailed: an environment failed, or a return was not finite.
    """
    count = envs.num_envs
    owed = np.full(count, episodes // count)  # [N] episodes left to play
    owed[: episodes % count] += 1
    played: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    told, lengths = np.zeros(count), np.zeros(count, np.int64)  # [N] both, so far
    cut = np.zeros(count, np.bool_)  # [N] the running episode has been counted once
    step = 0
    turn = envs.reset(seed)
    if line_ups is not None:
        line_ups.reset(seed)
    while owed.any():
        if line_ups is not None and len(turn.began):
            line_up = line_ups.begin(turn.began)
            for slots in modules:
                slots.line_up(line_up)
        turn = envs.step(_act(envs, modules, turn))
        step += 1
        lengths += 1
        told += _rewards_told(envs, turn)
        ended = {
            int(row): told[row] if cut[row] else float(total)
            for row, total in zip(turn.over, turn.env_returns, strict=True)
        }
        if most_steps:
            reached = np.flatnonzero(lengths == most_steps).tolist()
            ended = {row: float(told[row]) for row in reached} | ended
        for row in sorted(ended):
            total = float(ended[row])
            if not math.isfinite(total):
                reason = f"the return of its episode is {total}: rewards must be finite numbers"
                raise EnvironmentFailed(f"environment {row}", "step", reason)
            if owed[row]:
                played[row].append((total, int(lengths[row])))
                owed[row] -= 1
            told[row], lengths[row] = 0, 0
            cut[row] = row not in turn.over
        if watch is not None:
            watch(episodes - int(owed.sum()), step)
        if goal is not None and ended:
            so_far = [total for row in played for total, _ in row]
            if so_far and goal.out_of_reach(so_far, episodes):
                break
    every = [episode for row in played for episode in row]
    return [episode[0] for episode in every], [episode[1] for episode in every]


def _act(envs: MultiAgentEnvs, modules: Sequence[ModuleSlots], turn: Turn) -> list[Any]:
    """The best actions of all agents that act next, by group."""
    parts: list[list[tuple[ModuleSlots, Any]]] = [[] for _ in turn.groups]
    for slots in modules:
        group = slots.role.group
        parts[group].append((slots, slots.act_deterministically(turn.groups[group])))
    groups = zip(turn.groups, envs.groups, parts, strict=True)
    return [merged_actions(turn, group.action_space, part) for turn, group, part in groups]


def _rewards_told(envs: MultiAgentEnvs, turn: Turn) -> Any:
    """The rewards [N] that the agents of each environment were told with a turn."""
    sums = np.zeros(envs.num_envs)
    for group in turn.groups:
        np.add.at(sums, group.acting // len(envs.agents), group.rewards)
        np.add.at(sums, group.ended // len(envs.agents), group.last_rewards)
    return sums
