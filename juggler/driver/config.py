"""A run's configuration: parts of all rooms under flat keys."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from juggler.driver.core.staleness import OpenBatchLimit, StalenessBudget
from juggler.driver.driver_config import (
    OWN_KEYS,
    WAITED_FOR,
    AgentsConfig,
    config_errors,
    who_plays,
)
from juggler.driver.driver_config import ConfigError as ConfigError
from juggler.driver.driver_config import DriverConfig as DriverConfig
from juggler.driver.league.builders import BUILDERS, NO_BUILDER
from juggler.driver.league.config import LeagueConfig
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.setup import RANDOM, may_play
from juggler.learner.algorithms.off_policy import OffPolicyConfig
from juggler.learner.algorithms.registry import ALGORITHMS, algorithms_with, find_algorithm
from juggler.learner.config import LearnerConfig
from juggler.learner.optim.config import Scheduled
from juggler.runtime.checkpoints.checkpoint import RETIRED_KEYS, without_retired
from juggler.runtime.checkpoints.weights import is_frozen
from juggler.runtime.connectors.config import BUILT_IN, ConnectorsTable, Place
from juggler.runtime.modules.config import ModuleConfig, QNetworkConfig
from juggler.runtime.modules.import_by_name import name_of
from juggler.runtime.near_matches import all_of, listed, nearest, one_of
from juggler.runtime.other_libraries import called_here
from juggler.runtime.wrong_value import WrongValue, errors_in, errors_of, misfit

#: Connectors that change neither what a policy sees nor what it does.
_HARMLESS = ("clip_actions", "discounted_returns")


@dataclass(kw_only=True)
class RunConfig:
    """A run's configuration; in files and commands, its keys are flat."""

    driver: DriverConfig = field(default_factory=DriverConfig)
    env_runner: EnvRunnerConfig = field(default_factory=EnvRunnerConfig)
    module: ModuleConfig = field(default_factory=ModuleConfig)
    connectors: ConnectorsTable = field(default_factory=ConnectorsTable)
    learner: LearnerConfig = field(
        default_factory=lambda: find_algorithm(LearnerConfig.algorithm).config()
    )
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    """Which modules play which agents, and the settings of each: tables of a file, or JSON on the
    command line. docs/multi-agent.md has examples."""

    @property
    def staleness(self) -> StalenessBudget:
        """Return the meaning of `max_staleness` for each part of a run."""
        learner, synchronous = self.learner, self.driver.synchronous
        interval = learner.weights_interval
        return StalenessBudget.of(learner.max_staleness, interval, synchronous=synchronous)

    @property
    def module_ids(self) -> tuple[str, ...]:
        """The modules that the run trains, in the order of its configuration.

        Preflight settles them.
        """
        return self.agents.module_ids

    @property
    def others(self) -> tuple[str, ...]:
        """Return the modules that play but are not trained, including "random"."""
        return tuple(each for each in self.agents.acting_ids if each not in self.module_ids)

    @property
    def plays(self) -> bool:
        """Return whether EnvRunners step environments, not read a data set."""
        return not self.env_runner.dataset or self.driver.evaluation_seconds > 0

    @property
    def critics_see(self) -> tuple[str, ...]:
        """Names of the value functions' inputs other than observations.

        They are the values of `critic_sees` without "observation".
        """
        tables = self.agents.modules.values()
        seen = [self.module.critic_sees, *(table.get("critic_sees") for table in tables)]
        return tuple(sorted({str(each) for each in seen if each not in (None, "observation")}))

    @property
    def played_by(self) -> dict[str, tuple[str, ...]]:
        """Modules that may play each agent, trained or not.

        Set by preflight. {}: the environments have one agent. With a gateway, keys may be patterns.
        """
        return _all_ids(self.agents.agents)

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Names of agents; (): one agent, or simulators name theirs later."""
        later = self.env_runner.gateway and self.agents.has_patterns
        return () if later else tuple(self.played_by)

    def played_by_in(self, groups: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Return by agent of an environment the modules that may play it.

        Args:
            groups: the agents of the environment, grouped by equal spaces.

        Raises:
            ConfigError: the run had simulators, and its table does not fit these agents.
        """
        return (
            _all_ids(who_plays(self.agents, groups)) if self.env_runner.gateway else self.played_by
        )

    def waits_for(self, module_id: str) -> bool:
        """Return whether sampling waits until this module has room."""
        return bool(self.agents.modules.get(module_id, {}).get(WAITED_FOR, True))

    def of(self, module_id: str) -> RunConfig:
        """Return the configuration of one module.

        It has the algorithm, the module and the connectors of that module.

        Raises:
            ConfigError: its table has a wrong key or value.
        """
        if not self.agents.first_given:
            return self
        own = dict(self.agents.modules.get(module_id, {}))
        for key in OWN_KEYS:
            own.pop(key, None)
        shared = replace(self, agents=AgentsConfig())
        if not own:
            return shared
        # Another algorithm has its own defaults, so only given values are kept.
        where = f"modules.{module_id}"
        algorithm = own.get("algorithm", self.learner.algorithm)
        values = shared.flat()
        if algorithm != self.learner.algorithm:
            values = _for_algorithm(shared, algorithm)
        try:
            made = RunConfig.from_flat({**values, **own}, where)
        except ConfigError as error:
            lines = str(error).splitlines()
            named = (each if each.startswith(where) else f"{where}: {each}" for each in lines)
            raise ConfigError("\n".join(named)) from error
        return replace(made, driver=self.driver, env_runner=self.env_runner)

    def validate(self) -> None:
        """Check all values and their combinations.

        Raises:
            ConfigError: values are out of their ranges, one per line, or contradict each other;
                names the keys.
        """
        with config_errors():
            find_algorithm(self.learner.algorithm)
        raise_all(self._errors())
        self._must_go_together()

    def _errors(self) -> list[ValueError]:
        """Return the errors of every part."""
        return [error for part in _parts(self).values() for error in errors_of(part)]

    def _must_go_together(self) -> None:
        """Check parts and tables of modules against each other."""
        with config_errors():
            self.learner.validate_rows(self.env_runner.fragment_steps)
        wrong: list[ValueError] = [ConfigError(text) for text in _contradictions(self)]
        for module_id, table in self.agents.modules.items():
            if is_frozen(table):
                continue
            try:
                raise_all(wrong_keys(module_id, table, self.learner.algorithm))
                self.of(module_id)
            except ConfigError as error:
                wrong.append(error)
        raise_all(wrong)

    def flat(self) -> dict[str, Any]:
        """Return every key with its value.

        Tables of `AgentsConfig` are left out if empty: a run with one agent has none.
        """
        merged: dict[str, Any] = {}
        for part in _parts(self).values():
            merged.update(asdict(part))
        for table in fields(self.agents):
            if not merged[table.name]:
                del merged[table.name]
        return merged

    def doubts(self) -> list[str]:
        """Return settings that are allowed but probably not meant.

        They are reported as a run starts.
        """
        scale = self.learner.reward_scale
        pieces = [piece.use for piece in self.connectors.parsed().pipeline("learner")]
        doubts = [
            f"rewards are scaled twice: reward_scale = {scale:g} multiplies the rewards after "
            f"{piece} in connectors.learner. If that is not intended, leave one of them out: "
            "reward_scale = 1.0"
            for piece in ("clip_rewards", "normalize_rewards", "scale_rewards")
            if piece in pieces and scale != 1.0
        ]
        # A replay keeps rewards with the scale at which they came.
        if "normalize_rewards" in pieces and isinstance(self.learner, OffPolicyConfig):
            doubts.append(
                "normalize_rewards in connectors.learner: its scale changes during training, and "
                f"{self.learner.algorithm} keeps steps with their first scale. Leave "
                "it out, and set reward_scale"
            )
        stale = self.learner.max_staleness
        if self.driver.synchronous and stale != type(self.learner).max_staleness:
            doubts.append(
                f"max_staleness = {stale} with synchronous = true has no effect: each update "
                "learns from the steps sampled just before it"
            )
        doubts += _without_effect(self.driver, self.agents)
        # A misspelt "random" would become a module that learns.
        if RANDOM not in self.others:
            doubts += [
                f"module {each!r} learns like any other: did you mean {RANDOM!r}, which draws "
                "actions at random and needs no training?"
                for each in get_close_matches(RANDOM, self.module_ids, cutoff=0.8)
            ]
        if self.agents.league and self.driver.evaluation_seconds:
            doubts.append(
                f"evaluation_seconds = {self.driver.evaluation_seconds:g} keeps no best checkpoint "
                "of a league, because the return of a match does not say how good its players are: "
                "their ratings do, which `juggler league RUN_DIR` shows"
            )
        if not self.agents.first_given:
            doubts += _runners_without_room(self)
        return doubts + self.learner.doubts()

    @classmethod
    def from_flat(cls, values: Mapping[str, Any], where: str = "configuration") -> RunConfig:
        """Make a configuration from values; other keys have their defaults.

        Raises:
            ConfigError: unknown keys (with the nearest known ones), or values of the wrong type or
                out of range, one per line.
        """
        values = without_retired(plain(values))
        if isinstance(builder := values.get("league"), str):  # a bare name has no other keys
            values = {**values, "league": {"builder": builder}}
        name = values.get("algorithm", LearnerConfig.algorithm)
        try:
            algorithm = find_algorithm(name)
        except ValueError as error:
            known = _owners(cls(), where)
            odd = [key for key in values if key not in known and not algorithms_with(key)]
            unknown = [unknown_key(key, known, LearnerConfig.algorithm, where) for key in odd]
            raise_all([WrongValue("algorithm", f"{where}: {error}"), *unknown])
            raise
        # The algorithm comes first, because it has keys of its own.
        config = cls(learner=algorithm.config(algorithm=name))
        owners = _owners(config, where)
        if isinstance(values.get("module"), Mapping):
            raise ConfigError(f"{where}: module is a name: did you mean the table 'modules'?")
        wrong: list[ValueError] = [
            unknown_key(key, owners, name, where, values[key])
            for key in values
            if key not in owners
        ]
        for part_name, part in _parts(config).items():
            mine = {key: value for key, value in values.items() if owners.get(key) == part_name}
            made, of_other_types = converted(type(part), mine, where)
            setattr(config, part_name, made)
            wrong += of_other_types
        # An algorithm brings its module, unless the run names another.
        if config.module.module is None:
            config.module.module = name_of(algorithm.module)
        if not wrong:
            config.have_needed_learners()
        raise_all(wrong + config._errors())
        config._must_go_together()
        return config

    def have_needed_learners(self) -> None:
        """Set `num_learners` to what the modules need.

        For a run that does not set `num_learners`, while some of its modules do.
        """
        own = self.agents.own_learners.values()
        if own and self.driver.num_learners is None and all(type(each) is int for each in own):
            most = max(self.agents.needed_learners, self.driver.learners)
            self.driver = replace(self.driver, num_learners=most)

    @classmethod
    def to_act(cls, values: Mapping[str, Any], where: str = "configuration") -> RunConfig:
        """Read only the keys that acting needs; otherwise like `from_flat`.

        No algorithm has to be importable here.

        Raises:
            ConfigError: as `from_flat`.
        """
        of_module = {key.name for part in (ModuleConfig, ConnectorsTable) for key in fields(part)}
        of_run = {key.name for part in (DriverConfig, EnvRunnerConfig) for key in fields(part)}
        # A policy plays the environment, even if the run learned from a data set.
        without = {"dataset", "record"}
        known = (of_module | of_run | {"agents", "mapping", "league"}) - without
        acting = {key: values[key] for key in values if key in known}
        if acting.get("league"):  # the played modules are read; the builder is not called
            acting["league"] = {**acting["league"], "builder": NO_BUILDER, "options": {}}
        acting["modules"] = {
            module_id: {key: table[key] for key in table if key in of_module or key in OWN_KEYS}
            for module_id, table in values.get("modules", {}).items()
        }
        return cls.from_flat(acting, where)


def _for_algorithm(config: RunConfig, algorithm: object) -> dict[str, Any]:
    """Return the keys for a module with another algorithm."""
    other, before = find_algorithm(algorithm), find_algorithm(config.learner.algorithm)
    defaults, known = asdict(before.config()), {key.name for key in fields(other.config)}
    values = config.flat()
    for key in fields(config.learner):
        was_meant = values[key.name] != defaults[key.name]
        if key.name not in known or not was_meant:
            del values[key.name]
    if values["module"] == name_of(before.module):
        del values["module"]  # each algorithm brings its own
    return values


def _owners(config: RunConfig, where: str) -> dict[str, str]:
    """Return by key the part of a configuration that has it."""
    owners: dict[str, str] = {}
    for name, part in _parts(config).items():
        for key in fields(part):
            if owners.setdefault(key.name, name) != name:
                raise ConfigError(
                    f"{where}: algorithm {config.learner.algorithm!r} has a key {key.name!r}, "
                    f"which every run has: rename it in {type(config.learner).__name__}"
                )
    return owners


def _parts(config: RunConfig) -> dict[str, Any]:
    return {part.name: getattr(config, part.name) for part in fields(config)}


def _all_ids(agents: Mapping[str, str | list[str]]) -> dict[str, tuple[str, ...]]:
    """Return by agent or pattern the modules that may play."""
    return {agent: may_play(why) for agent, why in agents.items()}


# -- keys that contradict each other --------------------------------------------------------------


def _contradictions(config: RunConfig) -> Iterator[str]:
    """Yield an error for each pair of keys that contradict each other."""
    driver, runner, agents = config.driver, config.env_runner, config.agents
    if driver.synchronous and (interval := config.learner.weights_interval) != 1:
        yield (
            f"weights_interval = {interval} with synchronous = true: each turn acts with the "
            "weights that the last one made; set weights_interval = 1, or synchronous = false"
        )
    yield from _of_other_rewards(config)
    if agents.own_learners:
        yield from _of_own_learners(config)
    if agents.league:
        yield from _of_league(config)
    if runner.gateway:
        yield from _of_gateway(config)
    # A video is made with the modules of its checkpoint alone.
    if (every := driver.evaluation_video) and (agents.league or agents.frozen_ids):
        what = "a league" if agents.league else "modules that are not trained"
        yield (
            f"evaluation_video = {every} with {what}: only evaluations in which every module is "
            "trained are recorded; leave it out, and use `juggler evaluate --video`"
        )
    if runner.dataset:
        yield from _of_dataset(config)
    yield from _of_record(config)
    # Simulators are elsewhere, and so is all that they know.
    if (runner.gateway or runner.is_served) and (seen := config.critics_see):
        yield (
            f"critic_sees = {seen[0]!r}: simulators send what an agent observes, and no more "
            "that a value function could see; leave it out"
        )
    is_served = runner.is_served and not runner.gateway  # else env is only a name
    if is_served and (key := agents.first_given):
        yield f"{key} with env = {runner.env!r}: its environments have one agent; leave out {key}"


def _of_record(config: RunConfig) -> Iterator[str]:
    """Yield errors about keys for recordings."""
    runner, agents = config.env_runner, config.agents
    # Minari knows episodes of one agent.
    if (record := runner.record) and (key := agents.first_given):
        yield (
            f"record = {record!r} with {key}: a data set has the steps of one agent; leave out "
            "record"
        )
    elif record and runner.dataset:
        yield (
            f"record = {record!r} with dataset = {runner.dataset!r}: the steps are in that data "
            "set; leave out record"
        )


def _of_other_rewards(config: RunConfig) -> Iterator[str]:
    """Yield why a module cannot have other rewards."""
    algorithm = config.learner.algorithm
    for name in ("intrinsic", "imitation"):
        if not (table := getattr(config.learner, name)):
            continue
        if find_algorithm(algorithm).offline:
            yield (
                f"{name} = {table!r} with algorithm = {algorithm!r}: it learns from a data set, so "
                "it never acts or earns rewards; leave it out"
            )
        if config.agents.shared:
            yield (
                f"{name} = {table!r} with shared: modules that share parts cannot have rewards of "
                "their own; leave one of them out"
            )
    # A discriminator compares the policy's steps with demonstrations.
    places: tuple[Place, ...] = ("env_to_module", "module_to_env")
    for place in places if config.learner.imitation else ():
        pieces = [piece.use for piece in config.connectors.parsed().pipeline(place)]
        if other := [piece for piece in pieces if piece not in _HARMLESS]:
            yield (
                f"imitation with {other[0]!r} in connectors.{place}: demonstrations have the "
                "environment's own observations and actions, unlike the policy; leave it out"
            )


def _of_own_learners(config: RunConfig) -> Iterator[str]:
    """Yield why modules' learners do not add up to the run's."""
    counts, has = config.agents.own_learners, config.driver.learners
    named = all_of(f"modules.{each} has {count}" for each, count in counts.items())
    others = [each for each in config.agents.module_ids if each not in counts]
    needed = config.agents.needed_learners
    if needed > has:
        each_of = "each of " if len(others) > 1 else ""
        rest = f", and at least one for {each_of}{listed(others)}" if others else ""
        yield (
            f"num_learners: {named}{rest}: that makes {needed}, but the run has {has}; set "
            f"num_learners = {needed} outside the tables"
        )
    # A process without a module would never be ready.
    if not others and needed < has:
        yield (
            f"num_learners: {named}, and the run {has}, so some would train nothing: set "
            f"num_learners = {needed} outside the tables"
        )


def _of_gateway(config: RunConfig) -> Iterator[str]:
    """Yield errors about keys for environments of EnvRunners."""
    driver, tables = config.driver, config.agents
    gateway = f"gateway = {config.env_runner.gateway!r}"
    for key in ("num_evaluators", "evaluation_video"):
        if (value := getattr(driver, key)) != getattr(type(driver), key):
            yield f"{key} = {value} with {gateway}, which evaluates without it: leave it out"
    if tables.shared and not tables.agents:
        yield (
            f"shared with {gateway}: simulators have one agent, unless the table agents has "
            "several: add it, or leave out shared"
        )


def _of_dataset(config: RunConfig) -> Iterator[str]:
    """Yield errors about keys for steps of the policy."""
    dataset, algorithm = f"dataset = {config.env_runner.dataset!r}", config.learner.algorithm
    if not find_algorithm(algorithm).offline:
        able = one_of(key for key, each in ALGORITHMS.items() if each.offline)
        yield (
            f"{dataset} with algorithm = {algorithm!r}, which learns from steps that its own "
            f"policy takes: choose {able}, or leave out dataset"
        )
    # With a data set, EnvRunners play nothing.
    if gateway := config.env_runner.gateway:
        yield (
            f"{dataset} with gateway = {gateway!r}: EnvRunners read only one of them; leave "
            "out the other"
        )
    if key := config.agents.first_given:
        yield f"{key} with {dataset}: a data set has the steps of one agent; leave out {key}"
    if (goal := config.driver.stop_return) is not None:
        yield (
            f"stop_return = {goal} with {dataset}: training steps no environment, so it has "
            "no return; set stop_steps, and evaluation_seconds to keep the best checkpoint"
        )


def _of_league(config: RunConfig) -> Iterator[str]:
    """Yield errors in a league's table, and keys that contradict it."""
    try:
        yield from (
            f"league: {e}" for e in errors_in(config.agents.league, LeagueConfig.from_table)
        )
    except TypeError as error:
        yield f"league: {error}"
    # A league draws its own line-ups, at moments that depend on results.
    if config.agents.mapping:
        yield (
            f"mapping = {config.agents.mapping!r} with a league, which maps its players: leave one "
            "of them out"
        )
    if config.driver.synchronous:
        yield (
            "synchronous = true with a league: players copy and reset each other at moments that "
            "differ between runs; leave synchronous out"
        )


def _runners_without_room(config: RunConfig) -> list[str]:
    """Warn if some EnvRunners would always wait for requests."""
    driver, runner, learner = config.driver, config.env_runner, config.learner
    if driver.synchronous or runner.gateway:
        return []
    open_updates = config.staleness.open_updates
    fragment = runner.envs_per_runner * runner.fragment_steps
    at_once = OpenBatchLimit(open_updates, learner.batch_size, driver.learners).batches(fragment)
    if driver.num_env_runners <= at_once:
        return []
    # Whole fragments, enough to leave room while all other EnvRunners sample.
    enough = ((driver.num_env_runners - 1) // open_updates + 1) * fragment
    return [
        f"at most {at_once} of the {driver.num_env_runners} EnvRunners sample at a time: "
        f"max_staleness = {learner.max_staleness} leaves room for {open_updates} updates of "
        f"batch_size = {learner.batch_size}, which {at_once} fragments of {fragment} steps fill. "
        f"batch_size = {enough} would let all of them sample at once; so would shorter "
        "fragment_steps or a higher max_staleness"
    ]


def _without_effect(driver: DriverConfig, agents: AgentsConfig) -> list[str]:
    """Warn about keys that have no effect because of other keys."""
    found = []
    episodes = driver.evaluation_episodes
    if episodes != type(driver).evaluation_episodes and not driver.evaluation_seconds:
        found.append(
            f"evaluation_episodes = {episodes} has no effect: there are no evaluations; set "
            "evaluation_seconds, or leave evaluation_episodes out"
        )
    if driver.synchronous:
        found += [
            f"modules.{module_id}: {WAITED_FOR} = false with synchronous = true has no effect: "
            f"each turn waits for all modules; leave {WAITED_FOR} out, or set synchronous = false"
            for module_id, table in agents.modules.items()
            if not table.get(WAITED_FOR, True)
        ]
    return found


#: Example values, in TOML, for keys whose default is empty.
_EXAMPLES: Final = {
    "agents": '{"*" = "default"}',
    "burn_in": "8",
    "connectors": '{learner = ["clip_rewards"]}',
    "env_kwargs": "{size = 8}",
    "env_wrappers": '["FlattenObservation"]',
    "from_parameters": '["encoder.*"]',
    "imitation": '{demonstrations = "demonstrations/cartpole"}',
    "intrinsic": '{kind = "rnd"}',
    "league": '{builder = "self_play"}',
    "model": "{hidden_sizes = [128]}",
    "modules": "{default = {lr = 1e-3}}",
    "num_learners": "2",
    "optimizers": '{value = {parameters = ["value_*"]}}',
    "simulator_parameters": "{wind = 0.5}",
    "shared": '{"encoder.*" = ["first", "second"]}',
}
#: Examples for all other keys, by type.
_BY_KIND: Final[Mapping[Any, str]] = {bool: "true", int: "100", float: "0.5", str: '"..."'}


def must_suit(key: str, algorithm: str, where: str) -> None:
    """Check that the algorithm has this key."""
    if others := _of_others(key, algorithm):
        raise ConfigError(f"{where}: {others}")


def _of_others(key: str, algorithm: str) -> str:
    """Describe a key that only other algorithms have; otherwise ""."""
    having = algorithms_with(key)
    if not having or key in (each.name for each in fields(find_algorithm(algorithm).config)):
        return ""
    why = find_algorithm(algorithm).lacks.get(key, "")
    return f"{key!r} is a key of {all_of(having)}, but algorithm = {algorithm!r}" + (
        f": {why}" if why else ""
    )


def unknown_key(
    key: str, known: Iterable[str], algorithm: str, where: str, value: Any = None
) -> WrongValue:
    """Make the error about an unknown key."""
    if others := _of_others(key, algorithm):
        return WrongValue(key, f"{where}: {others}")
    keys_of = "" if algorithm == LearnerConfig.algorithm else f"--algorithm {algorithm} "
    near = nearest(key, known, listed_by=f"`juggler train {keys_of}--help`")
    what = "unknown key"
    if isinstance(value, Mapping):
        what = "keys are at the top level, and there is no table"
    return WrongValue(key, f"{where}: {what} {key!r}{instead_of(key) or near}")


def wrong_keys(module_id: str, table: Mapping[str, Any], of_run: str) -> list[ValueError]:
    """Return an error for each wrong key in a module's table."""
    where, algorithm = f"modules.{module_id}", table.get("algorithm", of_run)
    with config_errors(f"{where}: "):
        kinds = find_algorithm(algorithm).config, ModuleConfig, ConnectorsTable
    known = [*OWN_KEYS, *(key.name for kind in kinds for key in fields(kind))]
    shared = {key.name for kind in (DriverConfig, EnvRunnerConfig) for key in fields(kind)}
    wrong: list[ValueError] = []
    for key in table:
        if key in shared and key not in OWN_KEYS:
            why = "is a key of the whole run, the same for all modules"
            wrong.append(WrongValue(key, f"{where}: {key} {why}: set it outside [{where}]"))
        elif key not in known:
            wrong.append(unknown_key(key, known, algorithm, where))
    return wrong


def raise_all(errors: Sequence[ValueError]) -> None:
    """Raise one error that lists all of these.

    Raises:
        ConfigError: of all these errors, if any, one per line. If there are wrong values, other
            errors may only follow from them, and are left out.
    """
    if listed_errors := [each for each in errors if isinstance(each, WrongValue)] or errors:
        raise ConfigError("\n".join(map(str, listed_errors))) from listed_errors[0]


def instead_of(key: str) -> str:
    """Describe what to use instead of another library's key, or ""."""
    if key in RETIRED_KEYS:
        return f": {RETIRED_KEYS[key][1]}"
    hidden = {"distribution", "critic_space"}
    own_keys = [each.name for each in fields(QNetworkConfig) if each.name not in hidden]
    if key == "population":
        return (
            ": not in a run; a script trains many learners of one algorithm with "
            "juggler.Population: see docs/cores.md"
        )
    # Dots are usual in configurations of other libraries.
    if "." in key:
        table, _, of_table = key.partition(".")
        option, alone = table.replace("_", "-"), of_table.replace("_", "-")
        return (
            ": names of options have no dots. A key of a table is given in JSON, as in "
            f"--{option} '{{\"{of_table}\": ...}}'; any other key is an option, as in --{alone}"
        )
    if key in own_keys:
        return f": it is a key of the table model, as in model = {{{key} = ...}}"
    # Names from elsewhere: other libraries, or parts of this configuration.
    if answer := called_here(key):
        return answer
    if key in BUILT_IN:
        place = BUILT_IN[key].place
        return f": it is the connector {key}, as in connectors = {{{place} = [{key!r}]}}"
    if key in BUILDERS.keys() - {NO_BUILDER}:
        return f": it builds a league, as in league = {key!r}"
    return ""


def plain(value: Any) -> Any:
    """Convert NumPy numbers and paths to types of configuration files."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def converted(
    kind: type[Any], values: Mapping[str, Any], where: str
) -> tuple[Any, list[WrongValue]]:
    """Make a part of a configuration, and errors about wrong types."""
    hints = get_type_hints(kind)
    of_kind = {each.name: each for each in fields(kind)}
    made, wrong = {}, []
    # By field: of a class that it knows, msgspec keeps what cannot be pickled with the class.
    for key, value in values.items():
        try:
            made[key] = _value(of_kind[key], value, hints[key], where)
        except WrongValue as error:
            wrong.append(error)
    return kind(**made), wrong


def _value(of_kind: Field[Any], value: Any, hint: Any, where: str) -> Any:
    key = of_kind.name
    # A script may pass arrays, whose == does not return a bool.
    why = value if isinstance(value, str) and NoneType in get_args(hint) else ""
    if why == "none":  # TOML has no word for None
        value = None
    kinds = {hint, *get_args(hint)}
    if type(value) is float and value.is_integer() and int in kinds and float not in kinds:
        value = int(value)  # 1e6, which is a whole number, too
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        # msgspec's errors name no example.
        text = misfit(hint, value)
        if why == "auto":
            text += f': "auto" is "none" here, or {key} left out'
        elif hint == list[str] and isinstance(value, str):
            text = f"this is a list: {key} = {[value]}"
        elif get_origin(hint) is Literal and isinstance(value, str):
            pass  # the error already has all choices, or the nearest one
        elif example := _example(of_kind, value, hint):
            text += f", as in {key} = {example}"
        raise WrongValue(key, f"{where}: {key}: {text}") from error


def _example(key: Field[Any], given: Any, hint: Any) -> str:
    """Return an example of a key's value as TOML, or ""."""
    if hint == Scheduled and isinstance(given, list):
        return "[[0, 1e-3], [1000000, 1e-4]]"
    made = key.default_factory
    default = key.default if made is MISSING else made()
    if default and default is not MISSING and not isinstance(default, Mapping):
        return json.dumps(default)
    if key.name in _EXAMPLES:
        return _EXAMPLES[key.name]
    kinds = [get_origin(each) or each for each in (hint, *get_args(hint))]
    return next((_BY_KIND[each] for each in kinds if each in _BY_KIND), "")
