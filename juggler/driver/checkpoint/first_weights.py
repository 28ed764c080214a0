"""Weights from other checkpoints, for learning modules and for opponents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from juggler.driver.agent_tables import FoundGroup
from juggler.driver.config import ConfigError, RunConfig
from juggler.envrunner.setup import ActingSetup
from juggler.runtime.checkpoints.checkpoint import (
    CONNECTORS,
    Checkpoint,
    CheckpointError,
    read,
    write,
)
from juggler.runtime.checkpoints.weights import (
    DIGEST,
    DIRECTORY,
    FROM,
    WEIGHTS,
    NoSuchWeights,
    Weights,
    is_frozen,
    is_named,
    playing_tree,
    read_module,
    tree_digest,
    weights_of,
)
from juggler.runtime.connectors.config import ConnectorsConfig, Place
from juggler.runtime.connectors.mergeable_state import State, connector_branch, connector_state
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.import_by_name import given_or_named
from juggler.runtime.near_matches import listed
from juggler.runtime.wire.trees import Tree

if TYPE_CHECKING:
    from gymnasium import Space

    from juggler.runtime.connectors.pipelines import EnvToModule, ModuleToEnv
    from juggler.runtime.modules.rl_module import RLModule

    Parts: TypeAlias = tuple[RLModule, EnvToModule, ModuleToEnv]


#: Directory within a league's run directory: the weights that its players began with.
INITIAL: Final = "initial"
_WHOLE: Final = "whole"
_PLAYING: Final[tuple[Place, ...]] = ("env_to_module", "module_to_env")  # pipelines of EnvRunners


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

    def connectors(self) -> ConnectorsConfig:
        """Return the connectors of the module."""
        try:
            before = self.checkpoint.config_of(self.module_id).get("connectors", {})
            return ConnectorsConfig.parse(before)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the connectors of {self.checkpoint.path}: {error}") from error


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
            # A table's `from` has precedence over `from_checkpoint`.
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
        """Return what modules begin with, by id, and warnings."""
        origins = self._by_module(config)
        found: dict[str, FirstWeights] = {}
        warnings = dict.fromkeys(self.other[0].problems if self.other else ())
        for module_id, each in origins.items():
            before, now = each.connectors(), config.of(module_id).connectors.parsed()
            changed = [
                place for place in _PLAYING if [*before.pipeline(place)] != [*now.pipeline(place)]
            ]
            found[module_id] = each.first
            # Statistics belong to the connectors that gathered them.
            if each.first.whole and "env_to_module" not in changed:
                try:
                    learned = connector_state(each.checkpoint, each.module_id)
                except CheckpointError as error:
                    raise ConfigError(f"{each.first.source}: {error}") from error
                found[module_id] = replace(each.first, learned=learned)
            alone = each.first.selectable and len(origins) == 1
            which = "" if alone else f" of module {each.module_id!r}"
            for place in changed:
                warnings[
                    f"the weights{which} of {each.checkpoint.path} were trained with other "
                    f"connectors: connectors.{place} differs there"
                ] = None
        # Shared parts begin with one value, so one warning is enough.
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
            module_id: any(
                piece.use == "rescale_actions"
                for piece in each.connectors().pipeline("module_to_env")
            )
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
            # A checkpoint's only module suits modules of any name.
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
        # From its table, a module takes the weights with which the other one acts.
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


def kept(config: RunConfig, run_dir: Path) -> tuple[dict[str, FirstWeights], str]:
    """Read what `keep` has written, and a warning if it is lost."""
    tables = config.agents.modules
    named = any(tables.get(module_id, {}).get(FROM) for module_id in config.module_ids)
    if config.driver.from_checkpoint is None and not named:
        return {}, ""
    # From elsewhere, so `keep` has written them.
    text = "the weights that the run began with"
    try:
        saved = read(run_dir / INITIAL)
        first = {
            module_id: FirstWeights(
                weights,
                bool(saved.modules[module_id]["extra"].get(_WHOLE)),
                text,
                text,
                learned=connector_state(saved, module_id),
            )
            for module_id, weights in weights_of(saved).items()
        }
    # They are needed only for later resets, so the run continues.
    except CheckpointError as error:
        lost = "the first weights of the players are lost, so a reset player begins with new"
        return {}, f"{lost} weights: {error}"
    return first, ""


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


@dataclass(frozen=True, slots=True, eq=False)
class FrozenModule:
    """A module that is not trained."""

    module_id: str  # in this run
    checkpoint: Checkpoint  # of it alone
    source: str  # its id there
    config: RunConfig  # as it was there
    tree: Mapping[str, Tree]  # weights and connectors' state
    digest: str

    def acting_setup(self) -> ActingSetup:
        """What an EnvRunner builds it from."""
        return ActingSetup(
            module=self.config.module,
            connectors=self.config.connectors.connectors,
            algorithm="",
            off_policy=False,
            row_age=0,
            digest=self.digest,
        )

    def parts(self, observed: Space[Any], acted: Space[Any], factory: Any, own: Any) -> Parts:
        """Build the parts of this module: see `parts_in`."""
        return parts_in(self.checkpoint, self.source, self.config, observed, acted, factory, own)

    @classmethod
    def copied(
        cls,
        copy_id: str,
        player_id: str,
        config: RunConfig,
        spaces: Mapping[str, Any],
        weights: Mapping[str, Tree],
        learned: State,
        version: Version,
        settings_of: str,
    ) -> FrozenModule:
        """Return a copy of a module of this run."""
        flat = config.flat()
        made = _checkpoint_of(player_id, weights, learned, version, spaces, flat, settings_of)
        playing: dict[str, Tree] = {WEIGHTS: dict(weights), CONNECTORS: made.learned_of(player_id)}
        return cls(copy_id, made, player_id, config.of(settings_of), playing, tree_digest(playing))

    def keep(self, run_dir: Path) -> None:
        """Write its checkpoint into the directory of a run."""
        write(run_dir / DIRECTORY / self.module_id, self.checkpoint, keep=1)


def frozen_modules(config: RunConfig, run_dir: Path | None = None) -> dict[str, FrozenModule]:
    """Read modules that are not trained; a resumed run has kept them.

    Raises:
        ConfigError: the weights are missing, or have changed.
    """
    tables = config.agents.modules
    return {
        module_id: _frozen_module(module_id, tables[module_id], run_dir)
        for module_id in tables
        if is_frozen(tables[module_id])
    }


def kept_modules(
    run_dir: Path, copies: Mapping[str, str], lost: Callable[[str], None]
) -> dict[str, FrozenModule]:
    """Read a run's copies of players; report lost or different ones."""
    found = {}
    for copy_id, digest in copies.items():
        kept = run_dir / DIRECTORY / copy_id
        try:
            module = _frozen_module(copy_id, {FROM: str(kept)}, run_dir)
            if digest not in ("", module.digest):
                raise ConfigError(f"{kept} has other weights than were copied")
            found[copy_id] = module
        except ConfigError as error:
            why = error.__cause__ or error
            lost(f"league: the copy {copy_id} is missing, so it does not play: {why}")
    return found


def with_digests(config: RunConfig, frozen: Mapping[str, FrozenModule]) -> RunConfig:
    """Add the digests of its frozen modules to a configuration."""
    if not frozen:
        return config
    tables = dict(config.agents.modules)
    for module_id, module in frozen.items():
        tables[module_id] = {**tables[module_id], DIGEST: module.digest}
    return replace(config, agents=replace(config.agents, modules=tables))


def must_fit(
    config: RunConfig, frozen: Mapping[str, FrozenModule], groups: Sequence[FoundGroup]
) -> None:
    """Check that modules know the spaces of their agents."""
    group_of = {agent: group for group in groups for agent in group.agents}
    for agent, group in group_of.items():
        for module in (frozen[each] for each in config.played_by[agent] if each in frozen):
            other = group.other_space(module.checkpoint.spaces_of(module.source))
            if other is not None:
                side, needs, has = other
                where = f"module {module.source!r} of {module.checkpoint.path}"
                raise ConfigError(
                    f"modules.{module.module_id}: {where} cannot play agent {agent!r}: its {side} "
                    f"space is {needs}, and the agent's is {has}"
                )


def parts_in(
    checkpoint: Checkpoint,
    module_id: str,
    config: RunConfig,
    observation_space: Space[Any],
    action_space: Space[Any],
    factory: Callable[..., Any] | None,
    own: Mapping[str, type[Any]],
) -> Parts:
    """Build a checkpoint's module and its connectors.

    Raises:
        CheckpointError: the weights are another module's.
        ValueError: a part cannot be built; names it.
    """
    from juggler.policies.policy import restore_parts  # imports torch

    given = given_or_named(config.module.module, factory, own)
    made_by = given if callable(given) else None
    parts, spaces = (config.module, config.connectors.parsed()), (observation_space, action_space)
    return restore_parts(checkpoint, *parts, *spaces, module_id, made_by, own)


def _frozen_module(module_id: str, table: Mapping[str, Any], run_dir: Path | None) -> FrozenModule:
    kept = None if run_dir is None else run_dir / DIRECTORY / module_id
    source = str(kept) if kept is not None and kept.is_dir() else table[FROM]
    where = f"modules.{module_id}: from = {source!r}"
    try:
        checkpoint, own_id = read_module(source)
        tree = playing_tree(checkpoint, own_id)
        learned = connector_state(checkpoint, own_id)
        config = RunConfig.to_act(checkpoint.config, where=str(checkpoint.path))
        config = config.of(checkpoint.settings_of(own_id))
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error
    digest = tree_digest(tree)
    # The weights at a path may change, so a digest can fix them.
    if digest != table.get(DIGEST, digest):
        raise ConfigError(
            f"{where}: its weights have the digest {digest}, and digest = {table[DIGEST]!r}: "
            "other weights were meant"
        )
    # A run keeps its own copy, so that it can resume without the other run.
    alone = _checkpoint_of(
        own_id,
        tree[WEIGHTS],
        learned,
        checkpoint.version_of(own_id),
        checkpoint.spaces_of(own_id),
        checkpoint.config,
        checkpoint.settings_of(own_id),
    )
    alone = replace(alone, path=checkpoint.path)
    return FrozenModule(module_id, alone, own_id, config, tree, digest)


def _checkpoint_of(
    module_id: str,
    weights: Tree,
    learned: State,
    version: tuple[int, int],
    spaces: Mapping[str, Any],
    config: dict[str, Any],
    settings_of: str,
) -> Checkpoint:
    """Make a checkpoint of a single module's weights and connectors."""
    tree: dict[str, Tree] = {module_id: {"parameters": weights, "buffers": {}}}
    if learned:
        tree[CONNECTORS] = connector_branch({module_id: learned})
    module: dict[str, Any] = {"version": version, "extra": {}, "spaces": dict(spaces)}
    if settings_of != module_id:
        module["settings_of"] = settings_of
    return Checkpoint(version, tree, {module_id: module}, {}, config, dict(spaces))
