"""The mapping of agents to modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from juggler.envrunner.multi_agent.turns import AgentGroup, MultiAgentEnvs
from juggler.envrunner.setup import RANDOM, may_play


@dataclass(frozen=True, slots=True)
class Role:
    """The agents that a module plays.

    Attributes:
        module_id: the module.
        agents: names of the agents that it may play, in the order of `MultiAgentEnvs.agents`.
        group: index of their group in `MultiAgentEnvs.groups`.
        spaces: that group.
    """

    module_id: str
    agents: tuple[str, ...]
    group: int
    spaces: AgentGroup

    @property
    def is_whole_group(self) -> bool:
        """Whether the module plays every agent of its group."""
        return self.agents == self.spaces.agents


def cast(
    envs: MultiAgentEnvs, played_by: Mapping[str, str | Sequence[str]], modules: Collection[str]
) -> dict[str, Role]:
    """Return the role of each module but `random`.

    Args:
        envs: the environments.
        played_by: by agent, the id of its module, or of the modules that may play it.
        modules: the ids of all modules but `random`.

    Raises:
        ValueError: an agent has no module, a module has no agent, or agents of one module have
            different spaces.
    """
    if homeless := [agent for agent in envs.agents if agent not in played_by]:
        raise ValueError(
            f"no module plays {_listed(homeless)}: name one for each agent of the environment"
        )
    if absent := [agent for agent in played_by if agent not in envs.agents]:
        raise ValueError(
            f"the environment has no {_listed(absent)}: its agents are {', '.join(envs.agents)}"
        )
    named = {module_id for ids in played_by.values() for module_id in may_play(ids)}
    if unknown := sorted(named - {*modules, RANDOM}):
        raise ValueError(f"agents are played by {', '.join(unknown)}, and no module has that id")
    return {module_id: _role(envs, played_by, module_id) for module_id in modules}


def random_roles(
    envs: MultiAgentEnvs, played_by: Mapping[str, str | Sequence[str]]
) -> Iterator[Role]:
    """Yield the roles of the module `random`, one per group."""
    for number, group in enumerate(envs.groups):
        agents = tuple(agent for agent in group.agents if RANDOM in may_play(played_by[agent]))
        if agents:
            yield Role(RANDOM, agents, number, group)


def _role(
    envs: MultiAgentEnvs, played_by: Mapping[str, str | Sequence[str]], module_id: str
) -> Role:
    agents = tuple(agent for agent in envs.agents if module_id in may_play(played_by[agent]))
    if not agents:
        raise ValueError(f"the module {module_id!r} plays no agent: give it one, or remove it")
    within = [
        (number, group)
        for number, group in enumerate(envs.groups)
        if not set(agents).isdisjoint(group.agents)
    ]
    if len(within) > 1:
        differing = "; ".join(
            f"{', '.join(agent for agent in group.agents if agent in agents)}: observations "
            f"{group.observation_space}, actions {group.action_space}"
            for _, group in within
        )
        raise ValueError(
            f"the module {module_id!r} plays agents with different spaces ({differing}): give each "
            "kind of agent a module of its own, or pad the spaces: with pad_agents = true, or, in "
            "a run with a gateway, in the environment itself"
        )
    ((number, group),) = within
    return Role(module_id, agents, number, group)


def _listed(agents: Collection[str]) -> str:
    return ("agent " if len(agents) == 1 else "agents ") + ", ".join(agents)
