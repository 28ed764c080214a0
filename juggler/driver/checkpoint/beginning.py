"""What a new run begins with that another one has learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from juggler.driver.config import ConfigError, RunConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read
from juggler.runtime.checkpoints.weights import NoSuchWeights, Weights, weights_of
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.mergeable_state import State, connector_state


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """Weights of another run, and what goes with them.

    Attributes:
        weights: for the learner.
        whole: these are all that the checkpoint has, and so all that the module must have.
        connectors: what the other run's connectors had learned of observations; {}: nothing.
        text: for people, where all of it is from.
        warnings: for people.
    """

    weights: Weights
    whole: bool
    connectors: State
    text: str
    warnings: tuple[str, ...]


def beginning_of(config: RunConfig) -> Beginning | None:
    """What a configuration says that a run begins with; None: with what the seed gives.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or no parameter in it has one of
            the names asked for.
    """
    driver = config.driver
    if driver.from_checkpoint is None:
        return None
    try:
        checkpoint = read(Path(driver.from_checkpoint))
        weights = weights_of(checkpoint, driver.from_parameters)
        whole = not driver.from_parameters
        learned = connector_state(checkpoint) if whole else {}
    except CheckpointError as error:
        raise ConfigError(f"from_checkpoint = {driver.from_checkpoint!r}: {error}") from error
    except NoSuchWeights as error:
        raise ConfigError(f"from_parameters = {driver.from_parameters}: {error}") from None
    warnings = list(checkpoint.problems)
    if not _same_observations(config, checkpoint):
        learned = {}
        warnings.append(
            f"the weights of {checkpoint.path} were trained on what other connectors make of "
            "observations: connectors.env_to_module is not the same there"
        )
    parts = "the weights" if whole else "weights"
    text = f"{parts} of update {checkpoint.version[1]} in {checkpoint.path}"
    return Beginning(weights, whole, learned, text, tuple(warnings))


def _same_observations(config: RunConfig, checkpoint: Checkpoint) -> bool:
    """Whether observations go through the same connectors as in the run of a checkpoint."""
    try:
        before = ConnectorsConfig.parse(checkpoint.config.get("connectors", {}))
        theirs = list(before.pipeline("env_to_module"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the connectors of {checkpoint.path}: {error}") from error
    return theirs == list(config.connectors.parsed().pipeline("env_to_module"))
