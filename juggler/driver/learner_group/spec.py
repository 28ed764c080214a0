"""What a LearnerGroup is told of one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import gymnasium

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_keys import must_suit
from juggler.driver.workers.module_setups import add_module
from juggler.driver.workers.module_spaces import Spaces
from juggler.learner.algorithms.registry import find_algorithm
from juggler.runtime.elsewhere import called_here
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import training_pb2

Space = gymnasium.Space[Any]


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """A module, and how it is trained. Everything is named, not sent: see `juggler.RunConfig`."""

    observation_space: Space
    """Of what its batches hold."""

    action_space: Space
    """What it acts in."""

    learner: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the algorithm: `algorithm`, `lr`, …; those left out have its defaults."""

    module: str | None = None
    """The RLModule, or the Catalog that builds it, as "package.module:Class"; none: the default."""

    model: Mapping[str, Any] = field(default_factory=dict)
    """What the module is built with."""

    distribution: str | None = None
    """What makes the distribution of actions, as "package.module:function"."""

    connectors: Mapping[str, Any] = field(default_factory=dict)
    """The table `connectors` of a run; its part `learner` is what counts here."""

    seed: int | None = None
    """Of its first parameters; none: drawn from the group's seed and the module's id."""

    @classmethod
    def of(cls, given: LearnerSpec | Mapping[str, Any], where: str) -> LearnerSpec:
        """A spec, or one whose fields are given by name.

        Raises:
            ConfigError: a field is missing or unknown.
        """
        if isinstance(given, LearnerSpec):
            return given
        known = [each.name for each in fields(cls)]
        for key in given:
            if key not in known:
                raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, known)}")
        for key in ("observation_space", "action_space"):
            if key not in given:
                raise ConfigError(f"{where}: {key} is missing")
        return cls(**given)

    def command(self, module_id: str, seed: int) -> training_pb2.AddModule:
        """What a shard is told.

        Args:
            module_id: of the module.
            seed: of its first parameters, where the spec has none.

        Raises:
            ConfigError: something in it cannot be; names the module, the key and the nearest one.
        """
        where = f"module {module_id!r}"
        config = self._checked(where)
        try:
            spaces = Spaces(
                space_to_message(self.observation_space), space_to_message(self.action_space)
            )
            return add_module(config, module_id, spaces, seed if self.seed is None else self.seed)
        except (TypeError, ValueError) as error:  # what JSON, or a message, cannot hold
            raise ConfigError(f"{where}: {error}") from error

    def _checked(self, where: str) -> RunConfig:
        for key in ("learner", "model", "connectors"):
            if not isinstance(table := getattr(self, key), Mapping):
                raise ConfigError(f"{where}: {key} = {table!r}: expected a table of keys")
        algorithm = self.learner.get("algorithm", "impala")
        try:
            known = [each.name for each in fields(find_algorithm(algorithm).config)]
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        for key in self.learner:
            if key not in known:
                must_suit(key, algorithm, where)
                instead = called_here(key) or nearest(key, known)
                raise ConfigError(f"{where}: learner has no key {key!r}{instead}")
        own: dict[str, Any] = {
            "module": self.module,
            "model": dict(self.model),
            "distribution": self.distribution,
            "connectors": dict(self.connectors),
        }
        burn_in = self.learner.get("burn_in")
        if isinstance(burn_in, int):  # nothing is sampled here: fragments may be longer
            own["fragment_steps"] = max(burn_in, 0) + 1
        try:
            return RunConfig.from_flat({**self.learner, **own}, where)
        except ConfigError as error:
            if str(error).startswith(where):
                raise
            raise ConfigError(f"{where}: {error}") from error
