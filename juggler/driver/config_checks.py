"""What keys of a run's configuration do not go with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from juggler.driver.agents_config import WAITED_FOR, AgentsConfig
from juggler.driver.core.room import Room
from juggler.driver.driver_config import ConfigError, DriverConfig
from juggler.driver.league.config import LeagueConfig
from juggler.envrunner.config import EnvRunnerConfig
from juggler.learner.algorithms.registry import ALGORITHMS, find_algorithm
from juggler.learner.config import LearnerConfig
from juggler.runtime.connectors.built_in import Place
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.nearest import all_of, listed, one_of
from juggler.runtime.wrong_value import errors_in

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
