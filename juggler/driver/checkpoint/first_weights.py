"""Weights and connectors' state that a new run starts with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from juggler.driver.config import ConfigError, RunConfig
from juggler.runtime.checkpoints.checkpoint import (
    CONNECTORS,
    Checkpoint,
    CheckpointError,
    read,
    write,
)
from juggler.runtime.checkpoints.weights import (
    FROM,
    WEIGHTS,
    NoSuchWeights,
    Weights,
    is_frozen,
    is_named,
    playing_tree,
    read_module,
    weights_of,
)
from juggler.runtime.connectors.config import ConnectorsConfig, Piece, Place
from juggler.runtime.connectors.mergeable_state import State, connector_branch, connector_state
from juggler.runtime.near_matches import listed

#: Directory within a league's run directory: the weights that its players began with.
INITIAL: Final = "initial"
_WHOLE: Final = "whole"
#: Pipelines of EnvRunners.
_PLAYING: Final[tuple[Place, ...]] = ("env_to_module", "module_to_env")


@dataclass(frozen=True, slots=True, eq=False)
class FirstWeights:
    """Weights from elsewhere that one module begins with."""

    # For its learner; parameters that are missing begin with weights from the seed
    weights: dict[str, NDArray[Any]]
    whole: bool  # they are all weights of a checkpoint; the learner requires that none is missing
    text: str  # their source, for people
    source: str  # for errors: a key with its value, or a description
    selectable: bool = False  # `from_parameters` can select some of the weights
    # State of the other run's connectors for observations; {}: none
    learned: State = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """The source of one module's weights."""

    checkpoint: Checkpoint  # of another run
    module_id: str  # of a module there
    first: FirstWeights  # without the state of connectors

    def pieces(self, place: Place) -> list[Piece]:
        """Return a pipeline of the module."""
        try:
            before = self.checkpoint.config_of(self.module_id).get("connectors", {})
            return list(ConnectorsConfig.parse(before).pipeline(place))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the connectors of {self.checkpoint.path}: {error}") from error

    def learned(self) -> State:
        """Return the learned state of its connectors."""
        try:
            return connector_state(self.checkpoint, self.module_id)
        except CheckpointError as error:
            raise ConfigError(f"{self.first.source}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class FirstCheckpoints:
    """The checkpoints that a new run begins with."""

    # The checkpoint of `from_checkpoint`, with the selected weights by module id there. None:
    # modules without `from` in their table begin with weights from the seed.
    other: tuple[Checkpoint, Weights] | None
    # By module id, the checkpoint that its table names, and its id there
    own: Mapping[str, tuple[Checkpoint, str]]

    @classmethod
    def of(cls, config: RunConfig) -> FirstCheckpoints:
        """Read the checkpoints that a configuration names.

        Raises:
            ConfigError: there is no such checkpoint, it is damaged, or no parameter in it has one
                of the names asked for.
        """
        driver, other = config.driver, None
        where = f"from_checkpoint = {driver.from_checkpoint!r}"
        try:
            if driver.from_checkpoint is not None:
                checkpoint = read(Path(driver.from_checkpoint))
                other = checkpoint, weights_of(checkpoint, driver.from_parameters)
            own = {}
            for module_id, table in config.agents.modules.items():
                if table.get(FROM) and not is_frozen(table):
                    where = _own(config, module_id)
                    own[module_id] = read_module(str(table[FROM]))
        except CheckpointError as error:
            raise ConfigError(f"{where}: {error}") from error
        except NoSuchWeights as error:
            raise ConfigError(f"from_parameters = {driver.from_parameters}: {error}") from None
        return cls(other, own)

    def beginning(self, config: RunConfig) -> tuple[dict[str, FirstWeights], list[str]]:
        """Return what modules begin with, by id, and warnings.

        A module begins with the weights that its table names. Without one, it takes the weights of
        the module with the same id, or of the checkpoint's only module. Other modules begin with
        new weights.
        """
        origins = self._by_module(config)
        found: dict[str, FirstWeights] = {}
        warnings = dict.fromkeys(self.other[0].problems if self.other else ())
        for module_id, each in origins.items():
            pipelines = config.of(module_id).connectors.parsed()
            changed = [
                place for place in _PLAYING if each.pieces(place) != list(pipelines.pipeline(place))
            ]
            keeps = each.first.whole and "env_to_module" not in changed
            found[module_id] = replace(each.first, learned=each.learned() if keeps else {})
            alone = each.first.selectable and len(origins) == 1
            which = "" if alone else f" of module {each.module_id!r}"
            for place in changed:
                warnings[
                    f"the weights{which} of {each.checkpoint.path} were trained with other "
                    f"connectors: connectors.{place} differs there"
                ] = None
        weights = {module_id: each.weights for module_id, each in found.items()}
        for name, one, two in islice(different_parts(weights, config.agents.shared), 1):
            warnings[
                f"modules {one!r} and {two!r} share {name!r}, and begin with different values of "
                "it: all sharing modules begin with the values of the module that the table agents "
                "names last"
            ] = None
        return found, [*warnings]

    def rescaled(self, config: RunConfig) -> dict[str, bool]:
        """Return by module id whether its source used rescale_actions."""
        return {
            module_id: any(piece.use == "rescale_actions" for piece in each.pieces("module_to_env"))
            for module_id, each in self._by_module(config).items()
        }

    def _by_module(self, config: RunConfig) -> dict[str, _Origin]:
        """Find each module's source: its own table, or else `from_checkpoint`."""
        found: dict[str, _Origin] = {}
        if self.other is not None:
            checkpoint, weights = self.other
            given = f"from_checkpoint = {config.driver.from_checkpoint!r}"
            whole = not config.driver.from_parameters
            parts = "the weights" if whole else "weights"
            text = f"{parts} of update {checkpoint.version[1]} in {checkpoint.path}"
            for module_id in [each for each in config.module_ids if each not in self.own]:
                there = next(iter(weights)) if len(weights) == 1 else module_id
                if there not in weights:
                    raise ConfigError(
                        f"from_checkpoint: {checkpoint.path} has weights of the modules "
                        f"{listed(weights)}, and none for module {module_id!r} of this run: give "
                        "modules the same ids as there"
                    )
                first = FirstWeights(weights[there], whole, text, given, selectable=True)
                found[module_id] = _Origin(checkpoint, there, first)
        for module_id, (checkpoint, there) in self.own.items():
            where = _own(config, module_id)
            try:
                acting: Any = playing_tree(checkpoint, there)[WEIGHTS]
            except CheckpointError as error:
                raise ConfigError(f"{where}: {error}") from error
            text = f"module {module_id!r} with the weights of module {there!r} in {checkpoint.path}"
            found[module_id] = _Origin(checkpoint, there, FirstWeights(acting, True, text, where))
        return found


def _own(config: RunConfig, module_id: str) -> str:
    return f"modules.{module_id}: from = {config.agents.modules[module_id][FROM]!r}"


def keep(beginning: Mapping[str, FirstWeights], config: RunConfig, run_dir: Path) -> None:
    """Write what modules begin with into a run's directory, for later resets."""
    tree: dict[str, Any] = {
        module_id: {"parameters": first.weights, "buffers": {}}
        for module_id, first in beginning.items()
    }
    learned = {module_id: first.learned for module_id, first in beginning.items()}
    if branch := connector_branch(learned):
        tree[CONNECTORS] = branch
    modules = {
        module_id: {"version": (0, 0), "extra": {_WHOLE: first.whole}}
        for module_id, first in beginning.items()
    }
    write(run_dir / INITIAL, Checkpoint((0, 0), tree, modules, {}, config.flat(), {}), keep=1)


def kept(config: RunConfig, run_dir: Path) -> dict[str, FirstWeights]:
    """Read what `keep` has written; {}: the run began with new weights."""
    tables = config.agents.modules
    named = any(tables.get(module_id, {}).get(FROM) for module_id in config.module_ids)
    if config.driver.from_checkpoint is None and not named:
        return {}
    saved, text = read(run_dir / INITIAL), "the weights that the run began with"
    return {
        module_id: FirstWeights(
            weights,
            bool(saved.modules[module_id]["extra"].get(_WHOLE)),
            text,
            text,
            learned=connector_state(saved, module_id),
        )
        for module_id, weights in weights_of(saved).items()
    }


def different_parts(
    weights: Weights, shared: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, str]]:
    """Yield shared parameters with different values, and two of their modules."""
    for pattern, module_ids in shared.items():
        first: dict[str, str] = {}
        for module_id in module_ids:
            for name, array in weights.get(module_id, {}).items():
                if not is_named(pattern, f"{module_id}:{name}"):
                    continue
                before = first.setdefault(name, module_id)
                if not np.array_equal(weights[before][name], array):
                    yield name, before, module_id


def shared_parts_must_agree(checkpoint: Checkpoint, shared: Mapping[str, Sequence[str]]) -> None:
    """Check that modules which share parts have the same values of them.

    Raises:
        CheckpointError: they have not; names the parameter and two modules.
    """
    if not shared:
        return
    for name, one, other in different_parts(weights_of(checkpoint), shared):
        raise CheckpointError(
            checkpoint.path or Path("in memory"),
            f"has different values of {name!r} for modules {one!r} and {other!r}, which share it: "
            "resume from an earlier checkpoint",
        )
