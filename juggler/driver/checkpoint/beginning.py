"""What a new run begins with that another one has learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from juggler.driver.agents_config import listed
from juggler.driver.checkpoint.shared_parts import different_parts
from juggler.driver.config import ConfigError, RunConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read
from juggler.runtime.checkpoints.weights import NoSuchWeights, Weights, weights_of
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.mergeable_state import State, connector_state


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """Weights of another run, and what goes with them.

    Attributes:
        weights: for the learners, by module id of the new run.
        whole: these are all that the checkpoint has, and so all that a module must have.
        connectors: by module id of the new run, what the other run's connectors had learned of
            observations; {}: nothing.
        text: for people, where all of it is from.
        warnings: for people.
    """

    weights: Weights
    whole: bool
    connectors: Mapping[str, State]
    text: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OtherRun:
    """The checkpoint that a new run begins with.

    Attributes:
        checkpoint: of the other run.
        weights: those that were asked for, by module id of the other run.
    """

    checkpoint: Checkpoint
    weights: Weights

    def beginning(self, config: RunConfig) -> Beginning:
        """What each module of a configuration begins with: the weights of the module with the same
        id, or those of the only module that there is.

        Raises:
            ConfigError: there are none for a module.
        """
        checkpoint, whole = self.checkpoint, not config.driver.from_parameters
        weights: Weights = {}
        learned: dict[str, State] = {}
        warnings = list(checkpoint.problems)
        for module_id in config.module_ids:
            source = self._source(module_id)
            weights[module_id] = self.weights[source]
            same = _same_observations(config.of(module_id), checkpoint, source)
            learned[module_id] = _learned(config, checkpoint, source) if whole and same else {}
            if not same:
                which = "" if len(config.module_ids) == 1 else f" of module {source!r}"
                warnings.append(
                    f"the weights{which} of {checkpoint.path} were trained on what other "
                    "connectors make of observations: connectors.env_to_module is not the same "
                    "there"
                )
        shared = config.agents.shared
        for name, one, other in islice(different_parts(weights, shared), 1):
            warnings.append(
                f"modules {one!r} and {other!r} share {name!r}, and have different values of it in "
                f"{checkpoint.path}: all who share parts begin with those of the module that the "
                "table agents names last"
            )
        parts = "the weights" if whole else "weights"
        text = f"{parts} of update {checkpoint.version[1]} in {checkpoint.path}"
        return Beginning(weights, whole, learned, text, tuple(warnings))

    def _source(self, module_id: str) -> str:
        if len(self.weights) == 1:
            return next(iter(self.weights))
        if module_id not in self.weights:
            raise ConfigError(
                f"from_checkpoint: {self.checkpoint.path} has weights of the modules "
                f"{listed(self.weights)}, and none for module {module_id!r} of this run: give "
                "modules the same ids as there"
            )
        return module_id


def other_run(config: RunConfig) -> OtherRun | None:
    """The checkpoint that a configuration begins with; None: it begins with what the seed gives.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or no parameter in it has one of
            the names asked for.
    """
    driver = config.driver
    if driver.from_checkpoint is None:
        return None
    try:
        checkpoint = read(Path(driver.from_checkpoint))
        return OtherRun(checkpoint, weights_of(checkpoint, driver.from_parameters))
    except CheckpointError as error:
        raise ConfigError(f"from_checkpoint = {driver.from_checkpoint!r}: {error}") from error
    except NoSuchWeights as error:
        raise ConfigError(f"from_parameters = {driver.from_parameters}: {error}") from None


def beginning_of(config: RunConfig) -> Beginning | None:
    """What a configuration whose modules are known begins with; None: with what the seed gives.

    Raises:
        ConfigError: as `other_run` and `OtherRun.beginning`.
    """
    other = other_run(config)
    return None if other is None else other.beginning(config)


def _learned(config: RunConfig, checkpoint: Checkpoint, source: str) -> State:
    try:
        return connector_state(checkpoint, source)
    except CheckpointError as error:
        where = f"from_checkpoint = {config.driver.from_checkpoint!r}"
        raise ConfigError(f"{where}: {error}") from error


def _same_observations(config: RunConfig, checkpoint: Checkpoint, source: str) -> bool:
    """Whether a module's observations go through the same connectors as in another run."""
    try:
        before = ConnectorsConfig.parse(checkpoint.config_of(source).get("connectors", {}))
        theirs = list(before.pipeline("env_to_module"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the connectors of {checkpoint.path}: {error}") from error
    return theirs == list(config.connectors.parsed().pipeline("env_to_module"))
