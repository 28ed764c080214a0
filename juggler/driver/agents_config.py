"""Which module plays which agent, and what each module has of its own: two tables of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from juggler.driver.driver_config import ConfigError
from juggler.envrunner.agent_names import matches
from juggler.runtime.checkpoints.checkpoint import CONNECTORS, PIPELINES
from juggler.runtime.episodes.version import DEFAULT_MODULE

#: A key of a module's table that no other part of a configuration has.
WAITED_FOR: Final = "waited_for"

_MODULE_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: The player of matches that draws every action at random.
RANDOM: Final = "random"

_RESERVED: Final = {
    CONNECTORS: "checkpoints use this name for something else",
    PIPELINES: "checkpoints use this name for something else",
    RANDOM: "it is the player of matches that draws every action at random",
}
_LONGEST_PREFIX: Final = 60  # leaves room for a number behind it


@dataclass(kw_only=True)
class AgentsConfig:
    """Which module plays which agent, and what each module has of its own.

    ```toml
    env = "my_package.games:tag"
    algorithm = "ppo"
    lr = 1e-4

    [agents]
    "adversary_*" = "hunters"
    "*" = "runner"

    [modules.hunters]
    algorithm = "impala"
    model = {hidden_sizes = [128]}
    ```

    Every module is trained by a learner group of its own, with its own algorithm, optimizer and
    connectors. It has the keys of the run, except for those in its table. Where its table names
    another algorithm, it has the defaults of that one, and takes from the run what differs from the
    defaults there: above, `hunters` has the run's `lr`, and IMPALA's `batch_size`.

    A module's id consists of letters, digits, "_" and "-", at most 64 of them, and cannot be
    "connectors", "learner_pipelines" or "random". In a run's `config.toml`, `agents` has every
    agent by name.
    """

    agents: dict[str, str] = field(default_factory=dict)
    """By pattern of agents' names, with `*`, `?` and `[...]`, the id of the module that plays these
    agents; the first pattern that matches counts. Empty: agents with equal spaces share a module.
    If all have equal spaces its id is default; else each id is what the names of its agents begin
    with, such as adversary for adversary_0 and adversary_1."""

    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By module id, a table of keys in place of the run's: algorithm and the keys of that
    algorithm, module, model, distribution, check_specs and connectors. It may also have waited_for.
    true, the default: sampling waits until this module has room for its share. false: steps that it
    has no room for are not recorded, so that it never slows the others down."""

    def __post_init__(self) -> None:
        # As in a file: a table in TOML cannot hold None.
        if isinstance(self.modules, Mapping):
            self.modules = {
                module_id: (
                    {key: "none" if value is None else value for key, value in table.items()}
                    if isinstance(table, Mapping)
                    else table
                )
                for module_id, table in self.modules.items()
            }

    def validate(self) -> None:
        """
        Raises:
            ConfigError: a module's id or its table is wrong; names it.
        """
        for pattern, module_id in self.agents.items():
            check_module_id(module_id, f"agents: {pattern!r}")
        for module_id, table in self.modules.items():
            check_module_id(module_id, "modules")
            if not isinstance(table, Mapping):
                raise ConfigError(f"modules.{module_id} = {table!r}: expected a table of keys")
            if not isinstance(table.get(WAITED_FOR, True), bool):
                raise ConfigError(
                    f"modules.{module_id}: {WAITED_FOR} = {table[WAITED_FOR]!r}: expected true or "
                    "false"
                )
        if self.agents:
            self._must_be_used(tuple(self.agents.values()))

    @property
    def module_ids(self) -> tuple[str, ...]:
        """The modules that agents are mapped to, in the order of the table; "default" alone where
        the table is empty."""
        return tuple(dict.fromkeys(self.agents.values())) or (DEFAULT_MODULE,)

    @property
    def has_patterns(self) -> bool:
        """Whether agents, or the modules that play them, have yet to be found in an environment."""
        if not self.agents:
            return bool(self.modules.keys() - {DEFAULT_MODULE})
        return any(set(pattern) & set("*?[") for pattern in self.agents)

    def mapping(self, groups: Sequence[Sequence[str]]) -> dict[str, str]:
        """The module that plays each agent.

        Args:
            groups: the agents of an environment; those of a group have equal spaces.

        Raises:
            ConfigError: an agent has no module, a pattern matches nobody, agents with different
                spaces are mapped to one module, or a module has a table and no agent.
        """
        found = self._matched(groups) if self.agents else _named_by_prefix(groups)
        group_of: dict[str, Sequence[str]] = {}
        for group in groups:
            for agent in group:
                first = group_of.setdefault(found[agent], group)
                if first is not group:
                    raise ConfigError(
                        f"agents: {first[0]!r} and {agent!r} have different spaces, and both are "
                        f"mapped to module {found[agent]!r}: map them to different modules"
                    )
        self._must_be_used(tuple(found.values()))
        return found

    def _matched(self, groups: Sequence[Sequence[str]]) -> dict[str, str]:
        agents = [agent for group in groups for agent in group]
        found: dict[str, str] = {}
        deciding: set[str] = set()
        for agent in agents:
            matching = [pattern for pattern in self.agents if matches(agent, pattern)]
            if not matching:
                raise ConfigError(
                    f"agents: no pattern matches agent {agent!r}: add one for it, such as "
                    f'"*" = "{DEFAULT_MODULE}" as the last one'
                )
            deciding.add(matching[0])
            found[agent] = self.agents[matching[0]]
        for pattern in self.agents:
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

    def _must_be_used(self, module_ids: Sequence[str]) -> None:
        for module_id in self.modules:
            if module_id not in module_ids:
                raise ConfigError(
                    f"modules.{module_id}: no agent is mapped to module {module_id!r}; there are "
                    f"{listed(dict.fromkeys(module_ids))}"
                )


def check_module_id(module_id: object, where: str) -> None:
    """
    Raises:
        ConfigError: no module can have this id.
    """
    if not isinstance(module_id, str) or not _MODULE_ID.fullmatch(module_id):
        raise ConfigError(
            f"{where}: {module_id!r} cannot be a module's id: use 1 to 64 letters, digits, _ and -"
        )
    if module_id in _RESERVED:
        raise ConfigError(
            f"{where}: {module_id!r} cannot be a module's id, because {_RESERVED[module_id]}: "
            "choose another"
        )


def listed(names: Mapping[str, Any] | Sequence[str], most: int = 20) -> str:
    """Names for a message, of which there may be many."""
    shown = [repr(name) for name in list(names)[:most]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _named_by_prefix(groups: Sequence[Sequence[str]]) -> dict[str, str]:
    """A module for each group, named after what its agents' names begin with."""
    if len(groups) == 1:
        return dict.fromkeys(groups[0], DEFAULT_MODULE)
    found: dict[str, str] = {}
    taken = set(_RESERVED)
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
