"""Which module plays which agent, and what each module has of its own: two tables of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from juggler.driver.driver_config import ConfigError
from juggler.driver.module_ids import check_module_id, instead
from juggler.envrunner.setup import RANDOM, may_play
from juggler.runtime.checkpoints.frozen import DIGEST, FROM, TRAIN, is_frozen
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.nearest import listed

#: Keys of a module's table that no other part of a configuration has.
WAITED_FOR: Final = "waited_for"
NUM_LEARNERS: Final = "num_learners"
OWN_KEYS: Final = (WAITED_FOR, NUM_LEARNERS, TRAIN, FROM, DIGEST)
#: The keys of a module that is not trained.
_FROZEN_KEYS: Final = (TRAIN, FROM, DIGEST)


@dataclass(kw_only=True)
class AgentsConfig:
    """Which modules play which agents, and what each module has of its own.

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

    A module whose table has `train = false` plays and is not trained: with the weights, the network
    and the connectors of the module that `from` names. The module "random" draws every action at
    random, and has no table.

    A module's id consists of letters, digits, "_" and "-", at most 64 of them, and cannot be
    "connectors", "learner_pipelines" or "random". In a run's `config.toml`, `agents` has every
    agent by name.
    """

    agents: dict[str, str | list[str]] = field(default_factory=dict)
    """By pattern of agents' names, with `*`, `?` and `[...]`, the id of the module that plays these
    agents, or a list of ids, one of which is drawn for each agent and episode; the first pattern
    that matches counts. Empty: agents with equal spaces share a module.
    If all have equal spaces its id is default; else each id is what the names of its agents begin
    with, such as adversary for adversary_0 and adversary_1."""

    mapping: str = ""
    """A function, as "package.module:function", that says for each episode which module plays which
    agent. It gets the names of the agents and a NumPy generator, and returns the id of a module for
    each agent, among those that `agents` lists for it. Without the table `agents`, it chooses among
    the modules that have tables, and random."""

    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By module id, a table of keys in place of the run's: algorithm and the keys of that
    algorithm, module, model, distribution, critic_sees, check_specs and connectors. It may also
    have from, the run or checkpoint with whose weights it begins, with `:MODULE` behind it if that
    has several; train = false, where it keeps them; digest, the SHA-256 that these must have, which
    a run writes; num_learners, how many of the run's learner processes train this module, and no
    other; and waited_for. true, the default: sampling waits until this module has room for its
    share. false: steps that it has no room for are not recorded, so that it never slows the others
    down."""

    league: dict[str, Any] = field(default_factory=dict)
    """A league, whose players are the modules of the run: policies that are trained at the same
    time and play against each other and against their past. Its keys, such as builder and
    max_historical, are listed in docs/configuration.md; the name of a builder alone stands for a
    table with it. All agents of the environment have equal spaces."""

    shared: dict[str, list[str]] = field(default_factory=dict)
    """By pattern of names of parameters, such as encoder.*, the ids of modules that share what it
    matches: every update of one of them changes these parameters for all. Such modules are trained
    by the same learner process."""

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
        for pattern, said in self.agents.items():
            if not may_play(said):
                raise ConfigError(f"agents: {pattern!r} = []: name at least one module")
            for module_id in may_play(said):
                if module_id != RANDOM:
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
            _check_learners(module_id, table)
            if NUM_LEARNERS in table and self.league:
                raise ConfigError(
                    f"modules.{module_id}: {NUM_LEARNERS} with league: players come and go, and "
                    f"are spread over all learners; leave {NUM_LEARNERS} out"
                )
            _check_frozen(module_id, table)
        for pattern, module_ids in self.shared.items():
            where = f"shared: {pattern!r}"
            for module_id in module_ids:
                check_module_id(module_id, where)
                if NUM_LEARNERS in self.modules.get(module_id, {}):
                    raise ConfigError(
                        f"modules.{module_id}: {NUM_LEARNERS} with {where}: modules that share "
                        f"parts are trained by the same processes; leave {NUM_LEARNERS} out"
                    )
            if len(set(module_ids)) < 2 or len(set(module_ids)) < len(module_ids):
                raise ConfigError(f"{where} = {module_ids}: name at least two modules, each once")
            for module_id in module_ids:
                if is_frozen(self.modules.get(module_id)):
                    raise ConfigError(
                        f"{where}: module {module_id!r} is not trained, so its parameters never "
                        "change: leave it out"
                    )
        if self.agents:
            self.must_be_used(self.acting_ids)
        if self.agents or not self.modules.keys() - {DEFAULT_MODULE}:
            self._must_train()

    @property
    def acting_ids(self) -> tuple[str, ...]:
        """The modules that agents are mapped to, in the order of the table, trained or not;
        "default" alone where the table is empty."""
        said = (module_id for each in self.agents.values() for module_id in may_play(each))
        return tuple(dict.fromkeys(said)) or (DEFAULT_MODULE,)

    @property
    def frozen_ids(self) -> tuple[str, ...]:
        """Those of them that play with the weights of a checkpoint, and are not trained."""
        return tuple(each for each in self.acting_ids if is_frozen(self.modules.get(each)))

    @property
    def module_ids(self) -> tuple[str, ...]:
        """Those of them that are trained."""
        others = {RANDOM, *self.frozen_ids}
        return tuple(each for each in self.acting_ids if each not in others)

    @property
    def own_learners(self) -> dict[str, int]:
        """By id of the modules that say so, how many learner processes train them."""
        tables = ((each, self.modules.get(each, {})) for each in self.module_ids)
        return {each: table[NUM_LEARNERS] for each, table in tables if NUM_LEARNERS in table}

    @property
    def needed_learners(self) -> int:
        """How many learner processes the run needs at least, if some modules say how many are their
        own: one for each of the others, too, where those that share parts count as one."""
        own = self.own_learners
        return sum(own.values()) + len(self.trained_together) - len(own)

    @property
    def trained_together(self) -> tuple[tuple[str, ...], ...]:
        """The modules, in groups that share parts, directly or through others; most are alone."""
        groups = [{module_id} for module_id in self.module_ids]
        for module_ids in self.shared.values():
            joined = [group for group in groups if group & set(module_ids)]
            groups = [group for group in groups if group not in joined]
            groups += [set().union(*joined)] if joined else []
        in_order = [tuple(each for each in self.module_ids if each in group) for group in groups]
        return tuple(sorted(in_order, key=lambda group: self.module_ids.index(group[0])))

    @property
    def first_given(self) -> str:
        """The first of these tables that has something in it; "": none has."""
        return next((table.name for table in fields(self) if getattr(self, table.name)), "")

    @property
    def has_patterns(self) -> bool:
        """Whether agents, or the modules that play them, have yet to be found in an environment."""
        if not self.agents:
            tables = self.modules.keys() - {DEFAULT_MODULE}
            return bool(self.shared or self.mapping or self.league or tables)
        return any(set(pattern) & set("*?[") for pattern in self.agents)

    def must_be_used(self, module_ids: Sequence[str]) -> None:
        """
        Args:
            module_ids: of the modules that agents are mapped to.

        Raises:
            ConfigError: another module has a table, or shares parts.
        """
        for pattern, sharing in self.shared.items():
            for module_id in sharing:
                if module_id not in module_ids:
                    raise ConfigError(
                        f"shared: {pattern!r}: there is no module {module_id!r}"
                        f"{instead(module_id, module_ids)}"
                    )
        nobody = "the league has no player" if self.league else "no agent is mapped to module"
        for module_id in self.modules:
            if module_id not in module_ids:
                raise ConfigError(
                    f"modules.{module_id}: {nobody} {module_id!r}{instead(module_id, module_ids)}"
                )

    def _must_train(self) -> None:
        if not self.module_ids:
            raise ConfigError(
                f"agents: no module of this run is trained, since {listed(self.acting_ids)} only "
                "play: map an agent to a module without train = false"
            )


def _check_learners(module_id: str, table: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: its number of learners is no number above 0.
    """
    count = table.get(NUM_LEARNERS, 1)
    if type(count) is not int or count < 1:
        raise ConfigError(
            f"modules.{module_id}: {NUM_LEARNERS} = {count!r}: expected an integer of at least 1"
        )


def _check_frozen(module_id: str, table: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: the keys about its weights do not go together.
    """
    where = f"modules.{module_id}"
    kinds = ((TRAIN, bool, "true or false"), (FROM, str, "a path"), (DIGEST, str, "a SHA-256"))
    for key, kind, expected in kinds:
        if not isinstance(table.get(key, kind()), kind):
            raise ConfigError(f"{where}: {key} = {table[key]!r}: expected {expected}")
    if not is_frozen(table):
        if DIGEST in table:
            raise ConfigError(f"{where}: digest is for a module with train = false: leave it out")
        return
    if not table.get(FROM):
        raise ConfigError(
            f"{where}: train = false needs from: the run or checkpoint whose weights it plays with"
        )
    if others := [key for key in table if key not in _FROZEN_KEYS]:
        raise ConfigError(
            f"{where}: {others[0]} with train = false: a module that is not trained is what it was "
            "in its checkpoint; leave it out"
        )
