"""Modules of a run that play and are not trained: what they play with, and where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from juggler.driver.agents_found import FoundGroup
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.record.checkpoints import write
from juggler.envrunner.setup import ActingSetup
from juggler.runtime.checkpoints.checkpoint import CONNECTORS, Checkpoint, CheckpointError
from juggler.runtime.checkpoints.frozen import (
    DIGEST,
    DIRECTORY,
    FROM,
    WEIGHTS,
    is_frozen,
    playing_tree,
    read_module,
    tree_digest,
)
from juggler.runtime.connectors.mergeable_state import State, connector_branch, connector_state
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree


@dataclass(frozen=True, slots=True, eq=False)
class FrozenModule:
    """A module that is not trained.

    Attributes:
        module_id: in this run.
        checkpoint: has its weights.
        source: its id there.
        config: as the module had it there.
        tree: all that it plays with.
        digest: of the tree.
    """

    module_id: str
    checkpoint: Checkpoint
    source: str
    config: RunConfig
    tree: Mapping[str, Tree]
    digest: str

    @property
    def where(self) -> str:
        """For people: where its weights are."""
        return f"module {self.source!r} of {self.checkpoint.path}"

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
        """A copy of a module of this run.

        Args:
            copy_id: its id.
            player_id: of the module.
            config: of the run.
            spaces: of its agents, as a checkpoint has them.
            weights: its parameters.
            learned: by its connectors.
            version: of the weights.
            settings_of: the module of the configuration whose settings the player has.
        """
        flat = config.flat()
        made = _checkpoint_of(player_id, weights, learned, version, spaces, flat, settings_of)
        playing: dict[str, Tree] = {
            WEIGHTS: dict(weights),
            CONNECTORS: made.learned_of(player_id),
        }
        return cls(copy_id, made, player_id, config.of(settings_of), playing, tree_digest(playing))

    def keep(self, run_dir: Path) -> None:
        """Write what it plays with into the directory of a run, as a checkpoint of this module.

        Raises:
            CheckpointError: the disk refuses.
        """
        before, source = self.checkpoint, self.source
        copy = _checkpoint_of(
            source,
            self.tree[WEIGHTS],
            connector_state(before, source),
            before.version_of(source),
            before.spaces_of(source),
            before.config,
            before.settings_of(source),
        )
        write(run_dir / DIRECTORY / self.module_id, copy, keep=1)

    def must_fit(self, agent: str, group: FoundGroup) -> None:
        """
        Raises:
            ConfigError: the spaces of an agent are not those that it knows.
        """
        other = group.other_space(self.checkpoint.spaces_of(self.source))
        if other is not None:
            side, needs, has = other
            raise ConfigError(
                f"modules.{self.module_id}: {self.where} cannot play agent {agent!r}: its {side} "
                f"space is {needs}, and the agent's is {has}"
            )


def frozen_modules(config: RunConfig, run_dir: Path | None = None) -> dict[str, FrozenModule]:
    """The modules of a configuration that are not trained, by id.

    Args:
        config: of the run.
        run_dir: of a run that goes on, which has kept what they play with.

    Raises:
        ConfigError: there are no such weights, or other ones than there were.
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
    """The copies of players that a run has kept, by id.

    Args:
        run_dir: of the run.
        copies: by id, the digest of what it plays with; "": nobody knows it.
        lost: is told why a copy is gone, damaged or another one; it is left out.
    """
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
            lost(f"league: there is no copy {copy_id} any more, and nobody plays it: {why}")
    return found


def with_digests(config: RunConfig, frozen: Mapping[str, FrozenModule]) -> RunConfig:
    """A configuration that says what its modules that are not trained play with."""
    if not frozen:
        return config
    tables = dict(config.agents.modules)
    for module_id, module in frozen.items():
        tables[module_id] = {**tables[module_id], DIGEST: module.digest}
    return replace(config, agents=replace(config.agents, modules=tables))


def must_fit(
    config: RunConfig, frozen: Mapping[str, FrozenModule], groups: Sequence[FoundGroup]
) -> None:
    """
    Args:
        config: `with_agents` has made it.
        frozen: its modules that are not trained.
        groups: the agents of the environment and their spaces; (): nobody here knows them.

    Raises:
        ConfigError: the agents have other spaces than a module knows that is to play them.
    """
    for group in groups:
        for agent in group.agents:
            for module_id in config.played_by[agent]:
                if module_id in frozen:
                    frozen[module_id].must_fit(agent, group)


def _frozen_module(module_id: str, table: Mapping[str, Any], run_dir: Path | None) -> FrozenModule:
    kept = None if run_dir is None else run_dir / DIRECTORY / module_id
    source = str(kept) if kept is not None and kept.is_dir() else table[FROM]
    where = f"modules.{module_id}: from = {source!r}"
    try:
        checkpoint, own_id = read_module(source)
        tree = playing_tree(checkpoint, own_id)
        connector_state(checkpoint, own_id)  # raises if it is damaged
        config = RunConfig.to_act(checkpoint.config, where=str(checkpoint.path))
        config = config.of(checkpoint.settings_of(own_id))
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error
    digest = tree_digest(tree)
    if digest != table.get(DIGEST, digest):
        raise ConfigError(
            f"{where}: its weights have the digest {digest}, and digest = {table[DIGEST]!r}: they "
            "are not those that were meant"
        )
    return FrozenModule(module_id, checkpoint, own_id, config, tree, digest)


def _checkpoint_of(
    module_id: str,
    weights: Tree,
    learned: State,
    version: tuple[int, int],
    spaces: Mapping[str, Any],
    config: dict[str, Any],
    settings_of: str,
) -> Checkpoint:
    """One that has what a single module plays with, and nothing to train it."""
    tree: dict[str, Tree] = {module_id: {"parameters": weights, "buffers": {}}}
    if learned:
        tree[CONNECTORS] = connector_branch({module_id: learned})
    module: dict[str, Any] = {"version": version, "extra": {}, "spaces": dict(spaces)}
    if settings_of != module_id:
        module["settings_of"] = settings_of
    return Checkpoint(version, tree, {module_id: module}, {}, config, dict(spaces))
