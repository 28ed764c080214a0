"""A run's configuration: what the rooms own, side by side, under one flat set of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from juggler.driver.agents_config import OWN_KEYS, WAITED_FOR, AgentsConfig
from juggler.driver.config_keys import (
    converted,
    plain,
    said_of,
    tell,
    unknown_key,
    without_retired,
    wrong_keys,
)
from juggler.driver.core.room import Room
from juggler.driver.core.staleness import StalenessBudget
from juggler.driver.driver_config import ConfigError as ConfigError
from juggler.driver.driver_config import DriverConfig as DriverConfig
from juggler.driver.league.builders import NO_BUILDER
from juggler.driver.league.config import LeagueConfig
from juggler.driver.who_plays import who_plays
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.setup import RANDOM, may_play
from juggler.learner.algorithms.off_policy.config import OffPolicyConfig
from juggler.learner.algorithms.registry import ALGORITHMS, find_algorithm
from juggler.learner.config import LearnerConfig
from juggler.runtime.checkpoints.frozen import is_frozen
from juggler.runtime.connectors.built_in import Place
from juggler.runtime.connectors.config import ConnectorsConfig, ConnectorsTable
from juggler.runtime.modules.by_name import name_of
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.nearest import all_of, listed, one_of
from juggler.runtime.wrong_value import errors_in, errors_of

#: Connectors that change neither what a policy sees nor what it does.
_HARMLESS = ("clip_actions", "discounted_returns")


@dataclass(frozen=True, slots=True)
class Checked:
    """What is read of a run's configuration; see `RunConfig` for what each of these is."""

    driver: DriverConfig
    env_runner: EnvRunnerConfig
    learner: LearnerConfig
    agents: AgentsConfig
    connectors: ConnectorsConfig
    critics_see: Sequence[str]
    others: Sequence[str]
    played_by: Mapping[str, Sequence[str]]


def runners_without_room(
    driver: DriverConfig, env_runner: EnvRunnerConfig, learner: LearnerConfig, open_updates: int
) -> list[str]:
    """What people are told where some EnvRunners of one agent would always wait for requests.

    Args:
        driver: of a run.
        env_runner: of its EnvRunners.
        learner: of its only module.
        open_updates: that batches may be open for.
    """
    if driver.synchronous or env_runner.gateway:
        return []
    fragment = env_runner.envs_per_runner * env_runner.fragment_steps
    at_once = Room(open_updates, learner.batch_size, driver.learners).batches(fragment)
    if driver.num_env_runners <= at_once:
        return []
    # Whole fragments, so many that room is left while all the others' are open.
    enough = ((driver.num_env_runners - 1) // open_updates + 1) * fragment
    return [
        f"at most {at_once} of the {driver.num_env_runners} EnvRunners sample at a time: "
        f"max_staleness = {learner.max_staleness} leaves room for {open_updates} updates of "
        f"batch_size = {learner.batch_size}, which {at_once} fragments of {fragment} steps fill. "
        f"batch_size = {enough} would let all of them sample at once; so would shorter "
        "fragment_steps or a higher max_staleness"
    ]


def without_effect(driver: DriverConfig, agents: AgentsConfig) -> list[str]:
    """Keys that make no difference beside others, in words."""
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


def must_go_together(config: Checked) -> None:
    """
    Raises:
        ConfigError: two keys contradict each other; names both.
    """
    if config.driver.synchronous and (interval := config.learner.weights_interval) != 1:
        raise ConfigError(
            f"weights_interval = {interval} with synchronous = true: each turn acts with the "
            "weights that the last one made; set weights_interval = 1, or synchronous = false"
        )
    for name in ("intrinsic", "imitation"):
        if table := getattr(config.learner, name):
            _check_rewards(config, f"{name} = {table!r}")
    if config.learner.imitation:
        _check_imitation(config)
    if config.agents.own_learners:
        _check_learners(config)
    if config.agents.league:
        _check_league(config)
    if config.env_runner.gateway:
        _check_gateway(config)
    _check_videos(config)
    if config.env_runner.dataset:
        _check_dataset(config)
    runner = config.env_runner
    if runner.record:
        _check_record(config)
    elif runner.record_gb is not None:
        raise ConfigError(
            f"record_gb = {runner.record_gb:g} without record: nothing is recorded; name a "
            "directory with record = ..., or leave out record_gb"
        )
    if (runner.gateway or runner.is_served) and (seen := config.critics_see):
        raise ConfigError(
            f"critic_sees = {seen[0]!r}: simulators send what an agent observes, and no more "
            "that a value function could see; leave it out"
        )
    is_served = runner.is_served and not runner.gateway  # else env is only a name
    if is_served and (key := config.agents.first_given):
        raise ConfigError(
            f"{key} with env = {runner.env!r}: its environments have one agent; leave out {key}"
        )


def _check_rewards(config: Checked, given: str) -> None:
    """
    Raises:
        ConfigError: other rewards make no difference, or the module shares parts.
    """
    algorithm = config.learner.algorithm
    if find_algorithm(algorithm).offline:
        raise ConfigError(
            f"{given} with algorithm = {algorithm!r}: it learns from a data set, so that nothing "
            "that it does is ever rewarded; leave it out"
        )
    if config.agents.shared:
        raise ConfigError(
            f"{given} with shared: modules that share parts cannot have rewards of their own; "
            "leave one of them out"
        )


def _check_imitation(config: Checked) -> None:
    """
    Raises:
        ConfigError: policy and demonstrations would not see and do the same.
    """
    places: tuple[Place, ...] = ("env_to_module", "module_to_env")
    for place in places:
        pieces = [piece.use for piece in config.connectors.pipeline(place)]
        if other := [piece for piece in pieces if piece not in _HARMLESS]:
            raise ConfigError(
                f"imitation with {other[0]!r} in connectors.{place}: demonstrations have what the "
                "environment showed and got, and the policy would have something else; leave it out"
            )


def _check_videos(config: Checked) -> None:
    """
    Raises:
        ConfigError: no video can be recorded of its evaluations.
    """
    if not (every := config.driver.evaluation_video):
        return
    if config.agents.league or config.agents.frozen_ids:
        what = "a league" if config.agents.league else "modules that are not trained"
        raise ConfigError(
            f"evaluation_video = {every} with {what}: only evaluations in which every module is "
            "trained are recorded; leave it out, and use `juggler evaluate --video`"
        )


def _check_learners(config: Checked) -> None:
    """
    Raises:
        ConfigError: the learners of single modules are not those that the run has.
    """
    counts, has = config.agents.own_learners, config.driver.learners
    named = all_of(f"modules.{each} has {count}" for each, count in counts.items())
    given = f"num_learners: {named}"
    others = [each for each in config.agents.module_ids if each not in counts]
    needed = config.agents.needed_learners
    if needed > has:
        each_of = "each of " if len(others) > 1 else ""
        rest = f", and at least one for {each_of}{listed(others)}" if others else ""
        raise ConfigError(
            f"{given}{rest}: that is {needed}, and the run has {has}; set num_learners = {needed} "
            "outside of the tables"
        )
    if not others and needed < has:
        raise ConfigError(
            f"{given}, and the run {has}, so that some would train nothing: set num_learners = "
            f"{needed} outside of the tables"
        )


def _check_gateway(config: Checked) -> None:
    """
    Raises:
        ConfigError: a key is for environments that EnvRunners have.
    """
    gateway, tables = config.env_runner.gateway, config.agents
    if config.driver.evaluation_seconds > 0:
        raise ConfigError(
            f"evaluation_seconds = {config.driver.evaluation_seconds:g} with gateway = "
            f"{gateway!r}: an evaluation plays environments, and this run has those of simulators "
            "alone; set evaluation_seconds = 0"
        )
    if drawn := tables.mapping or config.others:
        what = f"mapping = {drawn!r}" if tables.mapping else f"module {config.others[0]!r}"
        raise ConfigError(
            f"agents: {what} with gateway = {gateway!r}: simulators play with modules that are "
            "trained, the same ones in every episode"
        )
    if any(len(ids) > 1 for ids in config.played_by.values()):
        raise ConfigError(
            f"agents: a list of modules with gateway = {gateway!r}: simulators play with the same "
            "module in every episode; name one for each pattern"
        )
    if tables.shared and not tables.agents:
        raise ConfigError(
            f"shared with gateway = {gateway!r}: simulators have one agent, unless the table "
            "agents says who acts for whom: add it, or leave out shared"
        )


def _check_dataset(config: Checked) -> None:
    """
    Raises:
        ConfigError: the algorithm, or another key, is for steps that a policy takes in training.
    """
    dataset, goal = config.env_runner.dataset, config.driver.stop_return
    algorithm = config.learner.algorithm
    if not find_algorithm(algorithm).offline:
        able = one_of(key for key, each in ALGORITHMS.items() if each.offline)
        raise ConfigError(
            f"dataset = {dataset!r} with algorithm = {algorithm!r}, which learns from steps that "
            f"its own policy takes: choose {able}, or leave out dataset"
        )
    if gateway := config.env_runner.gateway:
        raise ConfigError(
            f"dataset = {dataset!r} with gateway = {gateway!r}: EnvRunners take steps from one of "
            "them; leave out the other"
        )
    if key := config.agents.first_given:
        raise ConfigError(
            f"{key} with dataset = {dataset!r}: a data set has the steps of one agent; leave out "
            f"{key}"
        )
    if goal is not None:
        raise ConfigError(
            f"stop_return = {goal} with dataset = {dataset!r}: nobody plays in training, so there "
            "is no training return; set stop_steps, and evaluation_seconds to keep the best "
            "checkpoint"
        )


def _check_record(config: Checked) -> None:
    """
    Raises:
        ConfigError: there are several agents, or the steps are those of a data set.
    """
    record = config.env_runner.record
    if key := config.agents.first_given:
        raise ConfigError(
            f"record = {record!r} with {key}: a data set has the steps of one agent; leave out "
            "record"
        )
    if dataset := config.env_runner.dataset:
        raise ConfigError(
            f"record = {record!r} with dataset = {dataset!r}: the steps are in that data set; "
            "leave out record"
        )


def _check_league(config: Checked) -> None:
    """
    Raises:
        ConfigError: its table is wrong, or another key does not go with it.
    """
    try:
        wrong = errors_in(config.agents.league, LeagueConfig.from_table)
    except TypeError as error:
        raise ConfigError(f"league: {error}") from error
    if wrong:
        raise ConfigError("\n".join(f"league: {each}" for each in wrong)) from wrong[0]
    if config.agents.mapping:
        raise ConfigError(
            f"mapping = {config.agents.mapping!r} with a league, which says who plays: leave one "
            "of them out"
        )
    if config.driver.synchronous:
        raise ConfigError(
            "synchronous = true with a league: players copy and reset each other at moments that "
            "nobody can repeat; leave synchronous out"
        )
    if config.env_runner.gateway:
        raise ConfigError(
            f"league with gateway = {config.env_runner.gateway!r}: simulators play with the same "
            "modules in every episode; leave the table league out"
        )


@dataclass(kw_only=True)
class RunConfig:
    """All of a run's configuration. Its keys, in files and on the command line, are flat."""

    driver: DriverConfig = field(default_factory=DriverConfig)
    env_runner: EnvRunnerConfig = field(default_factory=EnvRunnerConfig)
    module: ModuleConfig = field(default_factory=ModuleConfig)
    connectors: ConnectorsTable = field(default_factory=ConnectorsTable)
    learner: LearnerConfig = field(
        default_factory=lambda: find_algorithm(LearnerConfig.algorithm).config()
    )
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    """Which modules play which agents, and what each has of its own: tables of a file, or JSON
    on the command line. docs/multi-agent.md has examples."""

    @property
    def staleness(self) -> StalenessBudget:
        """What `max_staleness` means in each part of a run."""
        learner, synchronous = self.learner, self.driver.synchronous
        interval = learner.weights_interval
        return StalenessBudget.of(learner.max_staleness, interval, synchronous=synchronous)

    @property
    def module_ids(self) -> tuple[str, ...]:
        """The modules that the run trains, in the order of its configuration. Preflight settles
        them."""
        return self.agents.module_ids

    @property
    def trained_together(self) -> tuple[tuple[str, ...], ...]:
        """The same modules, in groups that share parts; most are alone in theirs."""
        return self.agents.trained_together

    @property
    def others(self) -> tuple[str, ...]:
        """The modules that play and are not trained, "random" among them."""
        return tuple(each for each in self.agents.acting_ids if each not in self.module_ids)

    @property
    def plays(self) -> bool:
        """Whether anybody steps environments, and not only reads a data set."""
        return not self.env_runner.dataset or self.driver.evaluation_seconds > 0

    @property
    def critics_see(self) -> tuple[str, ...]:
        """What value functions see beside the observations of their own agents: values of
        `critic_sees`, without "observation"."""
        tables = self.agents.modules.values()
        seen = [self.module.critic_sees, *(table.get("critic_sees") for table in tables)]
        return tuple(sorted({str(each) for each in seen if each not in (None, "observation")}))

    @property
    def played_by(self) -> dict[str, tuple[str, ...]]:
        """By agent, the modules that may play it, trained or not, as preflight has found them; {}:
        the environments have one agent. With a gateway it may have patterns."""
        return _all_ids(self.agents.agents)

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Of several agents; (): there is one, or simulators tell their agents later."""
        return () if self.env_runner.gateway else tuple(self.played_by)

    def played_by_in(self, groups: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """By agent of an environment, the modules that may play it.

        Args:
            groups: the agents of the environment; those of a group have equal spaces.

        Raises:
            ConfigError: the run had simulators, and its table does not suit these agents.
        """
        return (
            _all_ids(who_plays(self.agents, groups)) if self.env_runner.gateway else self.played_by
        )

    def waits_for(self, module_id: str) -> bool:
        """Whether sampling waits until this module has room for its share."""
        return bool(self.agents.modules.get(module_id, {}).get(WAITED_FOR, True))

    def of(self, module_id: str) -> RunConfig:
        """This configuration as one module has it: with its algorithm, module and connectors.

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
        where = f"modules.{module_id}"
        algorithm = own.get("algorithm", self.learner.algorithm)
        values = shared.flat()
        if algorithm != self.learner.algorithm:
            values = _for_algorithm(shared, algorithm, where)
        try:
            made = RunConfig.from_flat({**values, **own}, where)
        except ConfigError as error:
            raise said_of(where, error) from error
        return replace(made, driver=self.driver, env_runner=self.env_runner)

    def validate(self) -> None:
        """Raises:
        ConfigError: values are out of their ranges, one in each line, or do not go together; names
            the keys.
        """
        try:
            find_algorithm(self.learner.algorithm)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        tell(self._errors())
        self._must_go_together()

    def _errors(self) -> list[ValueError]:
        """What is wrong in each part of it."""
        return [error for part in _parts(self).values() for error in errors_of(part)]

    def _must_go_together(self) -> None:
        """
        Raises:
            ConfigError: parts of it contradict each other, or tables of modules are wrong.
        """
        try:
            self.learner.validate_rows(self.env_runner.fragment_steps)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        parts = self.driver, self.env_runner, self.learner, self.agents, self.connectors.parsed()
        must_go_together(Checked(*parts, self.critics_see, self.others, self.played_by))
        wrong: list[ValueError] = []
        for module_id, table in self.agents.modules.items():
            if is_frozen(table):
                continue
            try:
                tell(wrong_keys(module_id, table, self.learner.algorithm))
                self.of(module_id)
            except ConfigError as error:
                wrong.append(error)
        tell(wrong)

    def flat(self) -> dict[str, Any]:
        """Every key with its value, without the tables of `AgentsConfig` where they are empty: a
        run with one agent has none."""
        merged: dict[str, Any] = {}
        for part in _parts(self).values():
            merged.update(asdict(part))
        for table in fields(self.agents):
            if not merged[table.name]:
                del merged[table.name]
        return merged

    def doubts(self) -> list[str]:
        """Settings that are allowed but probably not meant; people are told as a run starts."""
        scale = self.learner.reward_scale
        pieces = [piece.use for piece in self.connectors.parsed().pipeline("learner")]
        doubts = [
            f"rewards are scaled twice: reward_scale = {scale:g} multiplies what {piece} in "
            "connectors.learner makes of them. Where that is not meant, leave one of them out: "
            "reward_scale = 1.0"
            for piece in ("clip_rewards", "normalize_rewards", "scale_rewards")
            if piece in pieces and scale != 1.0
        ]
        if "normalize_rewards" in pieces and isinstance(self.learner, OffPolicyConfig):
            doubts.append(
                "normalize_rewards in connectors.learner: its scale changes as training goes, and "
                f"{self.learner.algorithm} keeps steps with the scale that they came with. Leave "
                "it out, and set reward_scale"
            )
        stale = self.learner.max_staleness
        if self.driver.synchronous and stale != type(self.learner).max_staleness:
            doubts.append(
                f"max_staleness = {stale} with synchronous = true has no effect: each update "
                "learns from the steps sampled just before it"
            )
        doubts += without_effect(self.driver, self.agents)
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
            doubts += runners_without_room(
                self.driver, self.env_runner, self.learner, self.staleness.open_updates
            )
        return doubts + self.learner.doubts()

    @classmethod
    def from_flat(cls, values: Mapping[str, Any], where: str = "configuration") -> RunConfig:
        """The defaults, with `values` in place of some.

        Raises:
            ConfigError: keys that nobody knows (the nearest right ones are named), or values of
                the wrong type or out of range, one in each line.
        """
        values = without_retired(plain(values))
        if isinstance(builder := values.get("league"), str):  # its other keys have their defaults
            values = {**values, "league": {"builder": builder}}
        name = values.get("algorithm", LearnerConfig.algorithm)
        try:
            algorithm = find_algorithm(name)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        config = cls(learner=algorithm.config(algorithm=name))
        owners = _owners(config, where)
        if isinstance(values.get("module"), Mapping):
            raise ConfigError(f"{where}: module is a name: did you mean the table 'modules'?")
        wrong: list[ValueError] = [
            unknown_key(key, owners, name, where) for key in values if key not in owners
        ]
        for part_name, part in _parts(config).items():
            mine = {key: value for key, value in values.items() if owners.get(key) == part_name}
            made, of_other_types = converted(type(part), mine, where)
            setattr(config, part_name, made)
            wrong += of_other_types
        if config.module.module is None:
            config.module.module = name_of(algorithm.module)
        if not wrong:
            config.have_needed_learners()
        tell(wrong + config._errors())
        config._must_go_together()
        return config

    def have_needed_learners(self) -> None:
        """A run that does not say how many learners it has gets as many as its modules need, where
        some of them say how many are their own."""
        own = self.agents.own_learners.values()
        if own and self.driver.num_learners is None and all(type(each) is int for each in own):
            most = max(self.agents.needed_learners, self.driver.learners)
            self.driver = replace(self.driver, num_learners=most)

    @classmethod
    def to_act(cls, values: Mapping[str, Any], where: str = "configuration") -> RunConfig:
        """As `from_flat`, of all that acting needs: no algorithm has to be importable here.

        Raises:
            ConfigError: as `from_flat`.
        """
        of_module = {key.name for part in (ModuleConfig, ConnectorsTable) for key in fields(part)}
        of_run = {key.name for part in (DriverConfig, EnvRunnerConfig) for key in fields(part)}
        # Whoever acts plays the environment, and not what the run may have learned from.
        without = {"dataset", "record", "record_gb"}
        known = (of_module | of_run | {"agents", "mapping", "league"}) - without
        acting = {key: values[key] for key in values if key in known}
        if acting.get("league"):  # what was played is read, and its builder is not asked
            acting["league"] = {**acting["league"], "builder": NO_BUILDER, "options": {}}
        acting["modules"] = {
            module_id: {key: table[key] for key in table if key in of_module or key in OWN_KEYS}
            for module_id, table in values.get("modules", {}).items()
        }
        return cls.from_flat(acting, where)


def _for_algorithm(config: RunConfig, algorithm: object, where: str) -> dict[str, Any]:
    """The keys of a configuration for a module with another algorithm. What is not the default of
    the run's algorithm was meant, and goes over where the other algorithm has such a key.

    Raises:
        ConfigError: there is no such algorithm.
    """
    try:
        other = find_algorithm(algorithm)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    before = find_algorithm(config.learner.algorithm)
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
    """By key, the part of a configuration that has it.

    Raises:
        ConfigError: an algorithm has a key that all runs have.
    """
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
    """By agent or pattern, the modules that may play."""
    return {agent: may_play(said) for agent, said in agents.items()}
