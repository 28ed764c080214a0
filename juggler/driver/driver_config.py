"""Keys of the whole run, and of its agents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, Final, Literal

from juggler.envrunner.setup import RANDOM, matches, may_play
from juggler.learner.process.learner_program import parse_devices
from juggler.runtime.checkpoints.checkpoint import CONNECTORS, IMITATION, PIPELINES, REPLAY, RND
from juggler.runtime.checkpoints.weights import DIGEST, FROM, TRAIN, is_frozen
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.near_matches import closest, listed, nearest
from juggler.runtime.wrong_value import CheckedKeys, WrongValue, converted, wrong_where

TENSORBOARD: Final = "tensorboard"
MOST_LEARNERS: Final = 64  # maximum number of learners at once
#: Sample requests in flight at one EnvRunner: the next one is always waiting.
REQUESTS_PER_RUNNER: Final = 2
UPDATES_IN_FLIGHT: Final = 2  # updates in flight: the learner always has the next one waiting
#: Names for `track`. For all but the first, `juggler.driver.trackers` has a tracker.
TRACKERS: Final = (TENSORBOARD, "mlflow", "wandb")
#: Keys of numbers that must be at least 1.
_AT_LEAST_1: Final = (
    *("num_env_runners", "learner_threads", "checkpoint_updates", "keep_checkpoints"),
    *("evaluation_episodes", "num_evaluators", "stop_steps"),
)


class ConfigError(ValueError):
    """A configuration that cannot be run.

    The message names the key and what to do.
    """


@contextmanager
def config_errors(where: str = "") -> Iterator[None]:
    """Turn ValueErrors raised within into ConfigErrors, with `where` before the message."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}{error}") from error


@dataclass(kw_only=True)
class DriverConfig(CheckedKeys):
    """Keys for how a run is driven, and when it stops."""

    seed: int = 0
    """Seed of all randomness of the run."""

    run_dir: str | None = None
    """Directory of the run; none: a new one under runs/."""

    from_checkpoint: str | None = None
    """Checkpoint, or run directory with checkpoints, whose weights the run begins with (`--from`).
    Counters and the optimizer start from zero."""

    from_parameters: list[str] = field(default_factory=list)
    """Patterns of parameters and buffers to take from from_checkpoint, such as encoder.*; others
    are drawn from the seed. Empty: all, and the state of connectors."""

    num_env_runners: int = 2
    """EnvRunner processes on this host."""

    num_learners: int | None = None
    """Number of learner processes at the start, at most 64; none: one for each of `devices`. The
    run waits up to worker_timeout_seconds for them once the first is ready."""

    learner_threads: int = 1
    """Number of CPU threads of each learner. More help if cores are idle: try `juggler tune`. The
    last bits of sums depend on it."""

    devices: str = "auto"
    """Devices of the learners, separated by commas: auto (a GPU of their host, in turn, or the
    CPU), cpu, cuda:0, or fake:4 (four CPU processes instead of GPUs)."""

    synchronous: bool = False
    """Whether sampling and updates take turns: slower, on-policy, and the same numbers every time.
    """

    stop_return: float | dict[str, float] | None = None
    """Mean return of the last 100 training episodes at which the run is solved and stops, once
    `confirm` agrees. With several agents it is their sum. A table such as {main = 20.0} has goals
    by module or by agent, all of which must be reached."""

    confirm: bool = True
    """Whether 100 further episodes with the kept weights must confirm `stop_return`; more after
    failed attempts."""

    stop_steps: int | None = None
    """Number of environment steps trained on, of all agents, after which the run stops."""

    stop_seconds: float | None = None
    """Seconds of training, since the first sample request, after which the run stops. Updates in
    flight and a last checkpoint still finish. If workers never connect, the run ends after this
    long or worker_timeout_seconds, whichever is greater."""

    metrics_steps: int | None = None
    """Environment steps between two lines of metrics, in addition to one each second; 0: no such
    lines; none: 1 % of stop_steps. Synchronous runs with equal seeds have these lines at equal
    steps."""

    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints of an asynchronous run; there is always one at the end."""

    checkpoint_updates: int = 1000
    """Updates between checkpoints of a synchronous run. All environments are reset there, so that a
    run resumed from it gives the same numbers. A run that is stopped in between resets them there,
    too, and then differs from one without a stop."""

    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep."""

    evaluation_seconds: float = 0.0
    """Seconds between evaluations, which run alongside training; 0: none. The checkpoint with the
    highest mean return is kept in `best`."""

    evaluation_episodes: int = 10
    """Number of episodes in one evaluation."""

    num_evaluators: int = 1
    """Number of local processes that share an evaluation."""

    evaluation_video: int = 0
    """Number of evaluations from one video to the next, starting with the first, in `videos` of the
    run's directory; 0: none."""

    worker_timeout_seconds: float = 60.0
    """Seconds to wait for workers to attach and set up; up to ten times that while local workers
    are busy."""

    hang_seconds: float = 120.0
    """Seconds without progress of its main loop after which a worker is killed and replaced."""

    track: list[str] = field(default_factory=lambda: [TENSORBOARD])
    """Trackers of configuration and metrics, some of: tensorboard (events in the run's directory),
    wandb and mlflow (checkpoints, too)."""

    web: bool = False
    """Whether the run serves a page for a local browser, at http://127.0.0.1:7070/ or the next free
    port."""

    progress: Literal["auto", "live", "plain", "json", "off"] = "auto"
    """Display of progress. auto: live in a terminal, one line in a notebook, plain lines elsewhere;
    json: lines as objects."""

    def validate(self) -> None:
        for key in _AT_LEAST_1:
            self.check_at_least(key, 1)
        for key in ("evaluation_seconds", "evaluation_video", "metrics_steps", "seed"):
            self.check_at_least(key, 0, or_inf=True)
        # Infinite: never.
        for key in ("checkpoint_seconds", "worker_timeout_seconds", "hang_seconds", "stop_seconds"):
            self.check_above(key, 0, or_inf=True)
        with wrong_where("devices"):
            self.device_names()
        for name in self.track:
            if name not in TRACKERS:
                raise WrongValue(
                    "track", f"track = {self.track}: unknown {name!r}{nearest(name, TRACKERS)}"
                )
        # A run would train forever for goals that are empty or NaN.
        if self.stop_return == {}:
            message = "stop_return = {}: name a module or an agent, or leave it out"
            raise WrongValue("stop_return", message)
        goals = self.stop_return
        for name, goal in goals.items() if isinstance(goals, dict) else [("", goals)]:
            if goal is not None and math.isnan(goal):
                where = f"stop_return.{name}" if name else "stop_return"
                raise WrongValue("stop_return", f"{where} = nan: no return ever reaches it")
        if wrong := list(self._contradictions()):
            raise ConfigError("\n".join(wrong))

    def _contradictions(self) -> Iterator[str]:
        """Yield an error for each pair of keys that contradict each other."""
        if self.from_parameters and self.from_checkpoint is None:
            names = self.from_parameters
            yield f"from_parameters = {names}: set from_checkpoint, which has these parameters"
        devices = self.device_names()
        if self.num_learners is not None and self.num_learners < len(devices):
            yield (
                f"num_learners = {self.num_learners}: must be at least {len(devices)}, for "
                f"devices = {self.devices!r}"
            )
        if self.learners > MOST_LEARNERS:
            yield f"num_learners = {self.learners}: must be at most {MOST_LEARNERS}"
        # A synchronous run counts updates, because times differ between runs.
        idle, instead = "checkpoint_updates", "checkpoint_seconds"
        if self.synchronous:
            idle, instead = instead, idle
        if (value := getattr(self, idle)) != (default := getattr(DriverConfig, idle)):
            yield (
                f"{idle} = {value} with synchronous = {str(self.synchronous).lower()}: set "
                f"{instead}, and leave {idle} at {default}"
            )
        # These keys mean nothing without evaluations.
        for key in ("num_evaluators", "evaluation_video"):
            value, default = getattr(self, key), getattr(DriverConfig, key)
            if value != default and not self.evaluation_seconds:
                yield f"{key} = {value}: there are no evaluations; set evaluation_seconds"
        if self.num_evaluators > self.evaluation_episodes:
            yield (
                f"num_evaluators = {self.num_evaluators}: there are more evaluators than "
                f"evaluation_episodes = {self.evaluation_episodes}"
            )

    @property
    def learners(self) -> int:
        """Number of learner processes at the start."""
        return len(self.device_names()) if self.num_learners is None else self.num_learners

    def most_learners(self, *, dialled: bool) -> int:
        """Return the maximum number of learners at once, local or `dialled` in."""
        return MOST_LEARNERS if dialled else self.learners

    def device_name(self, index: int) -> str:
        """Return the device of the learner process of this index."""
        names = self.device_names()
        return names[index % len(names)]

    def device_names(self) -> list[str]:
        """Return the learners' devices, by index."""
        return parse_devices(self.devices)


_MODULE_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Ids that no module can have, and why.
RESERVED: Final = {
    **dict.fromkeys(
        (CONNECTORS, PIPELINES, REPLAY, RND, IMITATION),
        "checkpoints use this name for something else",
    ),
    RANDOM: "it is the module that draws every action at random",
}


def check_module_id(module_id: object, where: str) -> None:
    """Check a module's id."""
    if not isinstance(module_id, str) or not _MODULE_ID.fullmatch(module_id):
        raise ConfigError(
            f"{where}: {module_id!r} cannot be a module's id: use 1 to 64 letters, digits, _ and -"
        )
    if module_id in RESERVED:
        raise ConfigError(
            f"{where}: {module_id!r} cannot be a module's id, because {RESERVED[module_id]}: "
            "choose another"
        )


def instead(module_id: str, module_ids: Sequence[str]) -> str:
    """End an error about an unknown module with known ones."""
    near, known = closest(module_id, module_ids), listed(dict.fromkeys(module_ids))
    return f": did you mean {near!r}? The run has {known}" if near else f"; the run has {known}"


#: Keys of a module's table that no other part of a configuration has, and their types.
WAITED_FOR: Final = "waited_for"
NUM_LEARNERS: Final = "num_learners"
OWN_KEYS: Final = {WAITED_FOR: bool, NUM_LEARNERS: int, TRAIN: bool, FROM: str, DIGEST: str}
_FROZEN_KEYS: Final = (TRAIN, FROM, DIGEST)  # the keys of a module that is not trained


@dataclass(kw_only=True)
class AgentsConfig:
    """Modules by agent, and settings of each module.

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

    Every module is trained by its own learner group, with its own algorithm, optimizer and
    connectors. It has the keys of the run, except for keys in its table. If its table names
    another algorithm, it has that algorithm's defaults, and takes from the run only values that
    differ from the defaults of the run's algorithm: above, `hunters` has the run's `lr`, and
    IMPALA's `batch_size`.

    A module whose table has `train = false` plays but is not trained. It has the weights, the
    network and the connectors of the module that `from` names. The module "random" draws every
    action at random, and has no table.

    A module's id consists of letters, digits, "_" and "-", at most 64 of them, and cannot be
    "connectors", "learner_pipelines" or "random". A run's `config.toml` lists every agent by name
    in `agents`.
    """

    agents: dict[str, str | list[str]] = field(default_factory=dict)
    """By pattern of agents' names, with `*`, `?` and `[...]`, the id of a module, or a list of ids
    to draw from for each episode; the first match counts. Empty: agents with equal spaces share a
    module: default, or one named by the common prefix of their names."""

    mapping: str = ""
    """Function as "package.module:function" that chooses the modules of an episode: it gets the
    agents' names and a NumPy generator, and returns a module id for each agent."""

    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By module id, keys that override the run's: algorithm and its keys, module, model,
    distribution, critic_sees, check_specs, connectors. Also from (a run or checkpoint with the
    first weights, with `:MODULE`), train = false, digest (SHA-256 of kept weights), num_learners,
    and waited_for (false: sampling does not wait for this module)."""

    league: dict[str, Any] = field(default_factory=dict)
    """League whose players are the modules of the run: a table, whose keys are listed in
    docs/configuration.md, or the name of a builder. All agents have equal spaces."""

    shared: dict[str, list[str]] = field(default_factory=dict)
    """By pattern of parameters' names, such as encoder.*, the ids of modules that share them. The
    same learner process trains these modules."""

    def __post_init__(self) -> None:
        # As in a file: TOML has no None.
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
        """Check ids and tables of modules."""
        for pattern, named in self.agents.items():
            if not may_play(named):
                raise ConfigError(f"agents: {pattern!r} = []: name at least one module")
            for module_id in may_play(named):
                if module_id != RANDOM:
                    check_module_id(module_id, f"agents: {pattern!r}")
        for module_id, table in self.modules.items():
            self._check_table(module_id, table)
        for pattern, module_ids in self.shared.items():
            self._check_sharing(pattern, module_ids)
        if self.agents:
            self.must_be_used(self.acting_ids)
        # Without agents, the environment may still settle the modules.
        is_settled = self.agents or not self.modules.keys() - {DEFAULT_MODULE}
        if is_settled and not self.module_ids:
            raise ConfigError(
                f"agents: no module of this run is trained: {listed(self.acting_ids)} would only "
                "play; map an agent to a module without train = false"
            )

    def _check_table(self, module_id: str, table: Any) -> None:
        """Check a module's id, and the keys that only its table has."""
        where = f"modules.{module_id}"
        check_module_id(module_id, "modules")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where} = {table!r}: expected a table of keys")
        with config_errors():
            own = {key: table[key] for key in OWN_KEYS if key in table}
            converted(own, OWN_KEYS, where)
        if (count := table.get(NUM_LEARNERS, 1)) < 1:
            raise ConfigError(f"{where}: {NUM_LEARNERS} = {count}: must be at least 1")
        if NUM_LEARNERS in table and self.league:
            raise ConfigError(
                f"{where}: {NUM_LEARNERS} with league: players come and go, and "
                f"are spread over all learners; leave {NUM_LEARNERS} out"
            )
        _check_frozen(module_id, table)

    def _check_sharing(self, pattern: str, module_ids: Sequence[str]) -> None:
        """Check that these modules can share parameters."""
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
        # A frozen module keeps its own values.
        for module_id in module_ids:
            if is_frozen(self.modules.get(module_id)):
                raise ConfigError(
                    f"{where}: module {module_id!r} is not trained, so its parameters never "
                    "change: leave it out"
                )

    @property
    def acting_ids(self) -> tuple[str, ...]:
        """Modules that agents are mapped to, or only "default"."""
        named = (module_id for each in self.agents.values() for module_id in may_play(each))
        return tuple(dict.fromkeys(named)) or (DEFAULT_MODULE,)

    @property
    def frozen_ids(self) -> tuple[str, ...]:
        """Acting modules that are not trained, except "random"."""
        return tuple(each for each in self.acting_ids if is_frozen(self.modules.get(each)))

    @property
    def module_ids(self) -> tuple[str, ...]:
        """Acting modules that are trained."""
        others = {RANDOM, *self.frozen_ids}
        return tuple(each for each in self.acting_ids if each not in others)

    @property
    def own_learners(self) -> dict[str, int]:
        """Numbers of learners by module id, for modules whose table has one."""
        tables = ((each, self.modules.get(each, {})) for each in self.module_ids)
        return {each: table[NUM_LEARNERS] for each, table in tables if NUM_LEARNERS in table}

    @property
    def needed_learners(self) -> int:
        """Minimum number of learner processes if some modules have their own."""
        own = self.own_learners
        return sum(own.values()) + len(self.trained_together) - len(own)

    @property
    def trained_together(self) -> tuple[tuple[str, ...], ...]:
        """Trained modules, in groups that share parts."""
        groups = [{module_id} for module_id in self.module_ids]
        for module_ids in self.shared.values():
            joined = [group for group in groups if group & set(module_ids)]
            groups = [group for group in groups if group not in joined]
            groups += [set().union(*joined)] if joined else []
        in_order = [tuple(each for each in self.module_ids if each in group) for group in groups]
        return tuple(sorted(in_order, key=lambda group: self.module_ids.index(group[0])))

    @property
    def first_given(self) -> str:
        """Return the name of the first table that is not empty."""
        return next((table.name for table in fields(self) if getattr(self, table.name)), "")

    @property
    def has_patterns(self) -> bool:
        """Return whether the environment is needed to settle agents or modules."""
        if not self.agents:
            tables = self.modules.keys() - {DEFAULT_MODULE}
            return bool(self.shared or self.mapping or self.league or tables)
        return any(set(pattern) & set("*?[") for pattern in self.agents)

    def must_be_used(self, module_ids: Sequence[str]) -> None:
        """Check that agents are mapped to all modules named in tables."""
        for pattern, sharing in self.shared.items():
            for module_id in sharing:
                if module_id not in module_ids:
                    raise ConfigError(
                        f"shared: {pattern!r}: there is no module {module_id!r}"
                        f"{instead(module_id, module_ids)}"
                    )
        missing = "the league has no player" if self.league else "no agent is mapped to module"
        for module_id in self.modules:
            if module_id not in module_ids:
                raise ConfigError(
                    f"modules.{module_id}: {missing} {module_id!r}{instead(module_id, module_ids)}"
                )


def _check_frozen(module_id: str, table: Mapping[str, Any]) -> None:
    """Check that the keys about a module's weights go together."""
    where = f"modules.{module_id}"
    if not is_frozen(table):
        if DIGEST in table:
            raise ConfigError(f"{where}: digest is for a module with train = false: leave it out")
        return
    # A module that is not trained has nothing but weights.
    if not table.get(FROM):
        raise ConfigError(
            f"{where}: train = false needs from: the run or checkpoint that has its weights"
        )
    if others := [key for key in table if key not in _FROZEN_KEYS]:
        raise ConfigError(
            f"{where}: {others[0]} with train = false: a module that is not trained stays as it is "
            "in its checkpoint; leave it out"
        )


_LONGEST_PREFIX: Final = 60  # leaves room for a number after it


def who_plays(tables: AgentsConfig, groups: Sequence[Sequence[str]]) -> dict[str, str | list[str]]:
    """Return the possible modules of each agent, given groups of equal spaces.

    Raises:
        ConfigError: an agent has no module, a pattern matches no agent, agents with different
            spaces are mapped to one module, or a module has a table but no agent.
    """
    if tables.agents:
        found = _matched(tables, groups)
    elif tables.mapping:
        found = _any_of_the_tables(tables, groups)
    else:
        found = _named_by_prefix(groups)
    # A module has one network, and so one pair of spaces.
    first_of: dict[str, tuple[str, Sequence[str]]] = {}  # an agent, and its group
    for group in groups:
        for agent, module_id in ((a, m) for a in group for m in may_play(found[a])):
            if module_id == RANDOM:
                continue  # it plays in any space
            first, of_first = first_of.setdefault(module_id, (agent, group))
            if of_first is not group:
                raise ConfigError(
                    f"agents: {first!r} and {agent!r} have different spaces, and both are "
                    f"mapped to module {module_id!r}: map them to different modules, or pad their "
                    "spaces: with pad_agents = true, or, in a run with a gateway, in the "
                    "environment itself"
                )
    tables.must_be_used([each for named in found.values() for each in may_play(named)])
    return found


def _any_of_the_tables(
    tables: AgentsConfig, groups: Sequence[Sequence[str]]
) -> dict[str, str | list[str]]:
    """Return the modules for `mapping` if there is no table of agents."""
    if not tables.modules:
        raise ConfigError(
            f"mapping = {tables.mapping!r}: there is no module to choose from: give each a "
            "table, such as [modules.main], or list them in the table agents"
        )
    if len(groups) > 1:
        raise ConfigError(
            f"mapping = {tables.mapping!r}: agents {groups[0][0]!r} and {groups[1][0]!r} have "
            "different spaces, so not every module can play every agent: list in the table "
            "agents the modules that may play each, or set pad_agents = true"
        )
    return {agent: [*tables.modules, RANDOM] for agent in groups[0]}


def _matched(tables: AgentsConfig, groups: Sequence[Sequence[str]]) -> dict[str, str | list[str]]:
    agents = [agent for group in groups for agent in group]
    deciding: dict[str, str] = {}  # the first pattern that matches an agent
    for agent in agents:
        matching = [pattern for pattern in tables.agents if matches(agent, pattern)]
        if not matching:
            add = f'add one for it, such as "*" = "{DEFAULT_MODULE}" as the last one'
            idle = [each for each in tables.agents if not any(matches(a, each) for a in agents)]
            near = closest(agent, idle)
            hint = f"did you mean it with {near!r}, which matches none?" if near else add
            raise ConfigError(f"agents: no pattern matches agent {agent!r}: {hint}")
        deciding[agent] = matching[0]
    # A pattern without effect is probably a mistake.
    for pattern in [each for each in tables.agents if each not in deciding.values()]:
        if any(matches(agent, pattern) for agent in agents):
            raise ConfigError(
                f"agents: {pattern!r} has no effect, since every agent that it matches is "
                "matched by an earlier pattern: move it up, or leave it out"
            )
        raise ConfigError(
            f"agents: {pattern!r} matches no agent: the environment has {listed(agents)}"
        )
    return {agent: tables.agents[pattern] for agent, pattern in deciding.items()}


def _named_by_prefix(groups: Sequence[Sequence[str]]) -> dict[str, str | list[str]]:
    """Name a module for each group after its agents' common prefix."""
    if len(groups) == 1:
        return dict.fromkeys(groups[0], DEFAULT_MODULE)
    found: dict[str, str | list[str]] = {}
    taken = set(RESERVED)
    for group in groups:
        # The letters that their names have in common, without numbers, as an id.
        shared = takewhile(lambda at: len(set(at)) == 1, zip(*group, strict=False))
        prefix = "".join(letters[0] for letters in shared).rstrip("0123456789")
        prefix = re.sub(r"[^A-Za-z0-9_-]", "_", prefix).strip("_-")[:_LONGEST_PREFIX] or "agents"
        module_id, number = prefix, 1
        while module_id in taken:
            number += 1
            module_id = f"{prefix}_{number}"
        taken.add(module_id)
        found.update(dict.fromkeys(group, module_id))
    return found
