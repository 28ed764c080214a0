"""Which module plays which agent of an environment, by the tables of a configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from juggler.driver.agents_config import AgentsConfig
from juggler.driver.driver_config import ConfigError
from juggler.driver.module_ids import RESERVED
from juggler.envrunner.agent_names import matches
from juggler.envrunner.setup import RANDOM, may_play
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.nearest import closest, listed

_LONGEST_PREFIX: Final = 60  # leaves room for a number behind it


def who_plays(tables: AgentsConfig, groups: Sequence[Sequence[str]]) -> dict[str, str | list[str]]:
    """The module that plays each agent, or the modules that may play it.

    Args:
        tables: of the run.
        groups: the agents of an environment; those of a group have equal spaces.

    Raises:
        ConfigError: an agent has no module, a pattern matches nobody, agents with different
            spaces are mapped to one module, or a module has a table and no agent.
    """
    if tables.agents:
        found = _matched(tables, groups)
    elif tables.mapping:
        found = _any_of_the_tables(tables, groups)
    else:
        found = _named_by_prefix(groups)
    first_of: dict[str, tuple[str, Sequence[str]]] = {}  # an agent, and its group
    for group in groups:
        for agent, module_id in ((a, m) for a in group for m in may_play(found[a])):
            if module_id == RANDOM:
                continue  # it plays in any spaces
            first, of_first = first_of.setdefault(module_id, (agent, group))
            if of_first is not group:
                raise ConfigError(
                    f"agents: {first!r} and {agent!r} have different spaces, and both are "
                    f"mapped to module {module_id!r}: map them to different modules"
                )
    tables.must_be_used([each for said in found.values() for each in may_play(said)])
    return found


def _any_of_the_tables(
    tables: AgentsConfig, groups: Sequence[Sequence[str]]
) -> dict[str, str | list[str]]:
    """What `mapping` chooses from where there is no table of agents."""
    if not tables.modules:
        raise ConfigError(
            f"mapping = {tables.mapping!r}: there is no module to choose from: give each a "
            "table, such as [modules.main], or list them in the table agents"
        )
    if len(groups) > 1:
        raise ConfigError(
            f"mapping = {tables.mapping!r}: agents {groups[0][0]!r} and {groups[1][0]!r} have "
            "different spaces, so not every module can play every agent: list in the table "
            "agents those that may play each"
        )
    return {agent: [*tables.modules, RANDOM] for agent in groups[0]}


def _matched(tables: AgentsConfig, groups: Sequence[Sequence[str]]) -> dict[str, str | list[str]]:
    agents = [agent for group in groups for agent in group]
    found: dict[str, str | list[str]] = {}
    deciding: set[str] = set()
    for agent in agents:
        matching = [pattern for pattern in tables.agents if matches(agent, pattern)]
        if not matching:
            add = f'add one for it, such as "*" = "{DEFAULT_MODULE}" as the last one'
            idle = [each for each in tables.agents if not any(matches(a, each) for a in agents)]
            near = closest(agent, idle)
            hint = f"did you mean it with {near!r}, which matches none?" if near else add
            raise ConfigError(f"agents: no pattern matches agent {agent!r}: {hint}")
        deciding.add(matching[0])
        found[agent] = tables.agents[matching[0]]
    for pattern in tables.agents:
        if pattern in deciding:
            continue
        if any(matches(agent, pattern) for agent in agents):
            raise ConfigError(
                f"agents: {pattern!r} decides nothing, since every agent that it matches is "
                "matched by a pattern before it: move it up, or leave it out"
            )
        raise ConfigError(
            f"agents: {pattern!r} matches no agent: the environment has {listed(agents)}"
        )
    return found


def _named_by_prefix(groups: Sequence[Sequence[str]]) -> dict[str, str | list[str]]:
    """A module for each group, named after what its agents' names begin with."""
    if len(groups) == 1:
        return dict.fromkeys(groups[0], DEFAULT_MODULE)
    found: dict[str, str | list[str]] = {}
    taken = set(RESERVED)
    for group in groups:
        prefix = _common_prefix(group)
        module_id, number = prefix, 1
        while module_id in taken:
            number += 1
            module_id = f"{prefix}_{number}"
        taken.add(module_id)
        found.update(dict.fromkeys(group, module_id))
    return found


def _common_prefix(names: Sequence[str]) -> str:
    """What names begin with, without the number that follows, as a module's id."""
    shared = takewhile(lambda at: len(set(at)) == 1, zip(*names, strict=False))
    prefix = "".join(letters[0] for letters in shared).rstrip("0123456789")
    prefix = re.sub(r"[^A-Za-z0-9_-]", "_", prefix)
    return prefix.strip("_-")[:_LONGEST_PREFIX] or "agents"
