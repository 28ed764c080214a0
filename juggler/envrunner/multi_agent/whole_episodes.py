"""Evaluates modules together on whole episodes with several agents, without exploration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from juggler.envrunner.agent_returns import AgentReturns, add_returns
from juggler.envrunner.evaluation import Goal, PlayedEpisodes
from juggler.envrunner.finiteness import check_return
from juggler.envrunner.multi_agent.line_up import LineUps, Players
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
) -> PlayedEpisodes:
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
            is, with all rewards by then, and the steps after it count as another. 0: no limit.
        goal: stop as soon as it is out of reach.
        line_ups: decides who plays each episode, from the same seed; None: each module plays all of
            its agents. Somebody else who uses it must reset it afterwards.

    Raises:
        EnvironmentFailed: an environment failed, or a return was not finite in float32.
    """
    count = envs.num_envs
    owed = np.full(count, episodes // count)  # [N] episodes left to play
    owed[: episodes % count] += 1
    played: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    agent_returns: AgentReturns = {}
    played_by = {agent: each.role.module_id for each in modules for agent in each.role.agents}
    players = Players(count, envs.agents, played_by)
    counted = np.zeros(count)  # [N] of the running episode's return
    counted_of = np.zeros((count, len(envs.agents)))  # [N, A] likewise, of each agent's
    acted = np.zeros((count, len(envs.agents)), np.bool_)  # [N, A] in what is not counted yet
    lengths = np.zeros(count, np.int64)  # [N] so far
    running = np.zeros(count, np.bool_)  # [N]
    step = 0
    turn = envs.reset(seed)
    if line_ups is not None:
        line_ups.reset(seed)
    while owed.any():
        if line_ups is not None and len(turn.began):
            line_up = line_ups.begin(turn.began)
            players.line_up(line_up)
            for slots in modules:
                slots.line_up(line_up)
        for group in turn.groups:
            acted.flat[group.acting] = True
        running[turn.began] = True
        turn = envs.step(_act(envs, modules, turn))
        step += 1
        stepped = slice(None) if turn.stepped is None else turn.stepped
        lengths[stepped] += running[stepped]
        running[turn.over] = False
        for group in turn.groups:  # what ends now may have acted in what is counted
            acted.flat[group.ended] = True
        over = turn.over.tolist()
        ended = dict(zip(over, zip(turn.env_returns, turn.agent_returns, strict=True), strict=True))
        if most_steps and len(reached := np.flatnonzero(lengths == most_steps)):
            returns, of_each = envs.returns()  # [N], [N, A]
            ended = {row: (returns[row], of_each[row]) for row in reached.tolist()} | ended
        for row in sorted(ended):
            so_far, so_far_of = ended[row]
            total = float(so_far - counted[row])
            of_agents = np.where(acted[row], so_far_of - counted_of[row], np.nan)  # [A]
            for each in (total, *of_agents[~np.isnan(of_agents)].tolist()):
                check_return(row, each)
            if owed[row]:
                played[row].append((total, int(lengths[row])))
                here = players.of(np.array([row]))  # [1, A]
                add_returns(agent_returns, envs.agents, here, of_agents[None])
                owed[row] -= 1
            goes_on = row not in over
            counted[row] = so_far if goes_on else 0
            counted_of[row] = np.where(acted[row], so_far_of, counted_of[row]) if goes_on else 0
            acted[row], lengths[row] = False, 0
        if watch is not None:
            watch(episodes - int(owed.sum()), step)
        if goal is not None and ended:
            totals = [total for row in played for total, _ in row]
            if totals and goal.out_of_reach(totals, episodes):
                break
    every = [episode for row in played for episode in row]
    return PlayedEpisodes([each[0] for each in every], [each[1] for each in every], agent_returns)


def _act(envs: MultiAgentEnvs, modules: Sequence[ModuleSlots], turn: Turn) -> list[Any]:
    """The best actions of all agents that act next, by group."""
    parts: list[list[tuple[ModuleSlots, Any]]] = [[] for _ in turn.groups]
    for slots in modules:
        group = slots.role.group
        parts[group].append((slots, slots.act_deterministically(turn.groups[group])))
    groups = zip(turn.groups, envs.groups, parts, strict=True)
    return [merged_actions(turn, group.action_space, part) for turn, group, part in groups]
