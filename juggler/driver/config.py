"""A run's configuration: what the rooms own, side by side, under one flat set of keys."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from juggler.driver.core.staleness import StalenessBudget
from juggler.envrunner.config import EnvRunnerConfig
from juggler.learner.algorithms.registry import algorithms_with, find_algorithm
from juggler.learner.config import LearnerConfig
from juggler.learner.process.devices import parse_devices
from juggler.runtime.connectors.config import ConnectorsTable
from juggler.runtime.elsewhere import called_here
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules.by_name import name_of
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.modules.model_config import ModelConfig
from juggler.runtime.nearest import nearest


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the key and what to do."""


@dataclass(kw_only=True)
class DriverConfig:
    """How the run as a whole is driven, and when it stops."""

    seed: int = 0
    """All randomness of the run derives from it."""

    run_dir: str | None = None
    """Where the run writes; none: a new directory under runs/."""

    from_checkpoint: str | None = None
    """Begin with the weights in this checkpoint, or in the newest one of this run's directory:
    `--from` on the command line. All else, such as counts and the optimizer, begins anew."""

    from_parameters: list[str] = field(default_factory=list)
    """With from_checkpoint, take only parameters and buffers whose names fit one of these patterns,
    such as encoder.*; the rest is drawn from the seed. Empty: take all of them, and what connectors
    have learned of observations."""

    num_env_runners: int = 2
    """EnvRunner processes on this host."""

    num_learners: int | None = None
    """Learner processes that a run begins with; none: one for each of `devices`. It waits for them
    up to worker_timeout_seconds once the first is ready, and then begins with those that are."""

    max_learners: int = 64
    """Learners that may take part at once where they dial in (`juggler driver`): beyond
    num_learners, they may come and go at any time."""

    devices: str = "auto"
    """Where learners compute: auto (a GPU of their host, in turn, or its CPU), cpu, cuda:0, several
    with commas between them, or fake:4 (four processes on the CPU that stand for GPUs)."""

    synchronous: bool = False
    """Sample, wait for all, update, wait: slower, on-policy, and the same numbers every time."""

    requests_per_runner: int = 2
    """Sample requests in flight at one EnvRunner."""

    updates_in_flight: int = 2
    """Updates issued and not finished: the learner finds the next one waiting."""

    stop_return: float | None = None
    """Stop when the mean return of the last 100 training episodes gets there, and `confirm` agrees:
    solved."""

    confirm: bool = True
    """A run is solved when the very weights that are kept have a mean return of `stop_return` in
    100 episodes of an evaluation beside training, or more where others before them had not."""

    stop_steps: int | None = None
    """Stop after so many environment steps trained on."""

    stop_seconds: float | None = None
    """Stop after so many seconds of training, which begin with the first sample request and not
    with the command, and go on where a run is resumed. One that cannot begin ends after as many,
    and not before worker_timeout_seconds."""

    checkpoint_seconds: float = 30.0
    """Between checkpoints of an asynchronous run; there is always one at the end."""

    checkpoint_updates: int = 1000
    """Updates between checkpoints of a synchronous run. Episodes do not go on beyond one: all
    environments are reset, so that a run that is resumed there gives the same numbers."""

    keep_checkpoints: int = 3
    """How many to keep, the newest first."""

    evaluation_seconds: float = 0.0
    """Between evaluations, on an EnvRunner of their own beside training; 0: none."""

    evaluation_episodes: int = 10
    """Episodes in one evaluation."""

    worker_timeout_seconds: float = 60.0
    """How long to wait for workers to attach and set up, and for anything else that must come; up
    to ten times that while workers of this host are at work."""

    hang_seconds: float = 120.0
    """A worker whose main loop makes no progress for so long is killed and replaced."""

    progress: Literal["auto", "live", "plain", "json", "off"] = "auto"
    """What is shown meanwhile; auto: live in a terminal, one line in a notebook, plain lines
    elsewhere; json: those as objects."""

    def validate(self) -> None:
        at_least = {
            "num_env_runners": 1,
            "max_learners": 1,
            "requests_per_runner": 1,
            "updates_in_flight": 1,
            "checkpoint_updates": 1,
            "keep_checkpoints": 1,
            "evaluation_episodes": 1,
            "seed": 0,
        }
        for key, minimum in at_least.items():
            if getattr(self, key) < minimum:
                raise ConfigError(f"{key} = {getattr(self, key)}: must be at least {minimum}")
        if self.from_parameters and self.from_checkpoint is None:
            raise ConfigError(
                f"from_parameters = {self.from_parameters}: set from_checkpoint, which they are of"
            )
        devices = self.device_names()
        if self.num_learners is not None and self.num_learners < len(devices):
            raise ConfigError(
                f"num_learners = {self.num_learners}: must be at least {len(devices)}, for "
                f"devices = {self.devices!r}"
            )
        if self.learners > self.max_learners:
            raise ConfigError(
                f"num_learners = {self.learners}: must be at most max_learners = "
                f"{self.max_learners}"
            )
        above_0 = ("checkpoint_seconds", "worker_timeout_seconds", "hang_seconds")
        for key in (*above_0, "stop_steps", "stop_seconds"):
            if (value := getattr(self, key)) is not None and not value > 0:  # NaN is not
                raise ConfigError(f"{key} = {value}: must be above 0")
        idle, instead = "checkpoint_updates", "checkpoint_seconds"
        if self.synchronous:
            idle, instead = instead, idle
        if (value := getattr(self, idle)) != (default := getattr(DriverConfig, idle)):
            raise ConfigError(
                f"{idle} = {value} with synchronous = {str(self.synchronous).lower()}: set "
                f"{instead}, and leave {idle} at {default}"
            )
        if not self.evaluation_seconds >= 0:
            raise ConfigError(f"evaluation_seconds = {self.evaluation_seconds}: must be at least 0")
        if self.stop_return is not None and math.isnan(self.stop_return):
            raise ConfigError("stop_return = nan: no return ever gets there")

    @property
    def confirms(self) -> bool:
        """Whether being solved is to be confirmed."""
        return self.confirm and self.stop_return is not None

    @property
    def learners(self) -> int:
        """How many learner processes the run begins with."""
        return len(self.device_names()) if self.num_learners is None else self.num_learners

    def most_learners(self, *, dialled: bool) -> int:
        """How many learners may take part at once.

        Args:
            dialled: workers dial in; else the driver starts its own, and nobody else can come.
        """
        return self.max_learners if dialled else self.learners

    def device_names(self) -> list[str]:
        """Where learners compute, one after the other.

        Raises:
            ConfigError: one of them is no device.
        """
        try:
            return parse_devices(self.devices)
        except ValueError as error:
            raise ConfigError(str(error)) from None


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

    @property
    def staleness(self) -> StalenessBudget:
        """What `max_staleness` means in each part of a run."""
        learner, synchronous = self.learner, self.driver.synchronous
        interval = learner.weights_interval
        return StalenessBudget.of(learner.max_staleness, interval, synchronous=synchronous)

    @property
    def module_ids(self) -> tuple[str, ...]:
        """The modules of the run, in the order of its configuration."""
        return (DEFAULT_MODULE,)

    def of(self, module_id: str) -> RunConfig:
        """This configuration as one module has it."""
        return self

    @property
    def played_by(self) -> dict[str, str]:
        """By agent, the module that plays it; {}: the environments have one agent."""
        return {}

    def validate(self) -> None:
        """Raises:
        ConfigError: a value is out of its range; names the key.
        """
        try:
            find_algorithm(self.learner.algorithm)
            for part in _parts(self).values():
                part.validate()
            self.learner.validate_rows(self.env_runner.fragment_steps)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.env_runner.gateway and self.driver.evaluation_seconds > 0:
            raise ConfigError(
                f"evaluation_seconds = {self.driver.evaluation_seconds:g} with gateway = "
                f"{self.env_runner.gateway!r}: an evaluation plays environments, and this run has "
                "those of simulators alone; set evaluation_seconds = 0"
            )
        if self.driver.synchronous and self.learner.weights_interval != 1:
            raise ConfigError(
                f"weights_interval = {self.learner.weights_interval} with synchronous = true: each "
                "round acts with the weights that the last one made; set weights_interval = 1, or "
                "synchronous = false"
            )

    def flat(self) -> dict[str, Any]:
        """Every key with its value."""
        merged: dict[str, Any] = {}
        for part in _parts(self).values():
            merged.update(asdict(part))
        return merged

    def doubts(self) -> list[str]:
        """What can be meant, and hardly is; as people are told when a run starts."""
        scale = self.learner.reward_scale
        pieces = [piece.use for piece in self.connectors.parsed().pipeline("learner")]
        return [
            f"rewards are scaled twice: reward_scale = {scale:g} multiplies what {piece} in "
            "connectors.learner makes of them. Where that is not meant, leave one of them out: "
            "reward_scale = 1.0"
            for piece in ("clip_rewards", "normalize_rewards", "scale_rewards")
            if piece in pieces and scale != 1.0
        ]

    @classmethod
    def from_flat(cls, values: Mapping[str, Any], where: str = "configuration") -> RunConfig:
        """The defaults, with `values` in place of some.

        Raises:
            ConfigError: a key that nobody knows (the nearest right one is named), or a value of
                the wrong type or out of range.
        """
        name = values.get("algorithm", LearnerConfig.algorithm)
        try:
            algorithm = find_algorithm(name)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        config = cls(learner=algorithm.config(algorithm=name))
        owners = _owners(config, where)
        for key in values:
            if key not in owners:
                must_suit(key, name, where)
                raise ConfigError(
                    f"{where}: unknown key {key!r}{instead_of(key) or nearest(key, owners)}"
                )
        for part_name, part in _parts(config).items():
            mine = {key: value for key, value in values.items() if owners[key] == part_name}
            setattr(config, part_name, _converted(type(part), mine, where))
        if config.module.module is None:
            config.module.module = name_of(algorithm.module)
        config.validate()
        return config

    @classmethod
    def to_act(cls, values: Mapping[str, Any], where: str = "configuration") -> RunConfig:
        """As `from_flat`, of all that acting needs: whatever algorithm it is, it need not be here.

        Raises:
            ConfigError: as `from_flat`.
        """
        parts = (DriverConfig, EnvRunnerConfig, ModuleConfig, ConnectorsTable)
        known = {key.name for part in parts for key in fields(part)}
        return cls.from_flat({key: values[key] for key in values if key in known}, where)

    @classmethod
    def from_toml(cls, path: Path) -> RunConfig:
        """The defaults, with what a file gives in place of some.

        Raises:
            ConfigError: the file is missing, is not TOML, or says something wrong.
        """
        return cls.from_flat(read_toml(path), where=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """What a file gives, by key.

    Raises:
        ConfigError: the file is missing, is not TOML, or tells what only those that ship tell.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    if "seen" in values:
        raise ConfigError(
            f"{path}: the table 'seen' tells what a configuration that ships was seen to "
            "reach: leave it out of a file of your own"
        )
    return values


def must_suit(key: str, algorithm: str, where: str) -> None:
    """
    Raises:
        ConfigError: only other algorithms have this key.
    """
    having = algorithms_with(key)
    if having and key not in (each.name for each in fields(find_algorithm(algorithm).config)):
        names = " and ".join(having)
        raise ConfigError(f"{where}: {key!r} is a key of {names}, and algorithm = {algorithm!r}")


def instead_of(key: str) -> str:
    """How an error about a key ends that no run has, and that other libraries or models have; or
    ""."""
    own_keys = [each.name for each in fields(ModelConfig) if each.name != "distribution"]
    if key in own_keys:
        return f": it is a key of the table model, as in model = {{{key} = ...}}"
    return called_here(key)


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


def _converted(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    # By field: of a class that it knows, msgspec keeps what cannot be pickled with the class.
    return kind(**{key: _value(key, value, hints[key], where) for key, value in values.items()})


def _value(key: str, value: Any, hint: Any, where: str) -> Any:
    # TOML has no word for None; where None is allowed, "none" is it.
    if value == "none" and NoneType in get_args(hint):
        value = None
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        for word, in_toml in (("object", "table"), ("null", "none")):
            text = re.sub(rf"\b{word}\b", in_toml, text)
        if text.startswith("Invalid enum value"):
            text = f"{value!r} is not known{nearest(value, map(str, get_args(hint)))}"
        raise ConfigError(f"{where}: {key}{place.rstrip('`')}: {text}") from error
