"""Evaluations with several agents: whole episodes, every module deterministic."""

from __future__ import annotations

import torch
from support.scripted_agents import (
    THREE,
    Remembering,
    ScriptedAgents,
    at_random,
    in_turn,
    sampler_of,
)

from juggler.envrunner.evaluation import play_whole_episodes
from juggler.envrunner.multi_agent.module_slots import ModuleSlots

AGENTS = ("red", "green")
EACH = {agent: agent for agent in AGENTS}


def modules_of(envs: ScriptedAgents, module: type = Remembering) -> list[ModuleSlots]:
    return list(sampler_of(envs, EACH, steps=4, module=module)._modules.values())


def random_envs(num_envs: int = 3) -> ScriptedAgents:
    return ScriptedAgents(num_envs, dict.fromkeys(AGENTS, THREE), at_random(AGENTS, 1))


def test_returns_are_sums_over_all_agents_of_each_environments_share() -> None:
    envs = ScriptedAgents(2, dict.fromkeys(AGENTS, THREE), in_turn(AGENTS, 4))
    returns, lengths, agent_returns = play_whole_episodes(envs, modules_of(envs), 5, seed=0)
    # Environment 0 plays three episodes of 4 steps, environment 1 two of 5.
    assert lengths == [4, 4, 4, 5, 5]
    assert returns == [3.0, 3.0, 3.0, 5.0, 5.0]
    # Green makes the last of 4 moves, red that of 5; its 0.25 before its first move count as well.
    red, green = agent_returns["red", "red"], agent_returns["green", "green"]
    assert red == [0.5, 0.5, 0.5, 3.5, 3.5], "in the order of the episodes"
    assert green == [2.5, 2.5, 2.5, 1.5, 1.5]


def test_every_agent_does_what_is_best_with_all_that_it_has_seen() -> None:
    envs = random_envs()
    play_whole_episodes(envs, modules_of(envs), 12, seed=0)
    checked = 0
    for episodes in envs.log.values():
        for episode in episodes:
            total = torch.full((3,), 0.5)
            for seen, action in zip(episode.observations, episode.actions, strict=False):
                total = 0.5 * total + torch.from_numpy(seen)
                assert action == int(torch.sin(total).argmax())
                checked += 1
    assert checked > 50


def test_an_episode_counts_as_it_is_at_most_steps() -> None:
    envs = ScriptedAgents(1, dict.fromkeys(AGENTS, THREE), in_turn(AGENTS, 7))
    modules = modules_of(envs)
    returns, lengths, of_agents = play_whole_episodes(envs, modules, 5, seed=0, most_steps=3)
    assert lengths == [3, 3, 1, 3, 3]
    whole, *_ = play_whole_episodes(envs, modules, 1, seed=0)
    # What green got before its first action counts, too.
    assert sum(returns[:3]) == whole[0]
    assert returns[3:] == returns[:2]
    each = [of_agents[agent, agent] for agent in AGENTS]
    assert [sum(pair) for pair in zip(*each, strict=True)] == returns
