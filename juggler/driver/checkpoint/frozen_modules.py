"""Keeps the modules of a run that play and are not trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from juggler.driver.agent_tables import FoundGroup
from juggler.driver.config import ConfigError, RunConfig
from juggler.envrunner.setup import ActingSetup
from juggler.runtime.checkpoints.checkpoint import CONNECTORS, Checkpoint, CheckpointError, write
from juggler.runtime.checkpoints.weights import (
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
from juggler.runtime.modules.import_by_name import given_or_named
from juggler.runtime.wire.trees import Tree

if TYPE_CHECKING:
    from gymnasium import Space

    from juggler.runtime.connectors.pipelines import EnvToModule, ModuleToEnv
    from juggler.runtime.modules.rl_module import RLModule

    Parts: TypeAlias = tuple[RLModule, EnvToModule, ModuleToEnv]


@dataclass(frozen=True, slots=True, eq=False)
class FrozenModule:
    """A module that is not trained."""

    module_id: str  # in this run
    checkpoint: Checkpoint  # of it alone
    source: str  # its id there
    config: RunConfig  # as it was there
    tree: Mapping[str, Tree]  # weights and connectors' state
    digest: str

    @property
    def where(self) -> str:
        """Describe for people where the weights are."""
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
        """Return a copy of a module of this run.

        Args:
            settings_of: the module of the configuration whose settings the player has.
        """
        flat = config.flat()
        made = _checkpoint_of(player_id, weights, learned, version, spaces, flat, settings_of)
        playing: dict[str, Tree] = {WEIGHTS: dict(weights), CONNECTORS: made.learned_of(player_id)}
        return cls(copy_id, made, player_id, config.of(settings_of), playing, tree_digest(playing))

    def keep(self, run_dir: Path) -> None:
        """Write its checkpoint into the directory of a run."""
        write(run_dir / DIRECTORY / self.module_id, self.checkpoint, keep=1)

    def must_fit(self, agent: str, group: FoundGroup) -> None:
        """Check that the module knows the spaces of an agent."""
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
        run_dir: of a resumed run, which has kept their checkpoints.

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
    """Read the copies of players that a run has kept, by id.

    Args:
        copies: by id, the digest of its weights and connectors; "": unknown.
        lost: called with the reason when a copy is missing, damaged or different; it is left out.
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
    """Check that modules know the spaces of their agents.

    Args:
        config: `with_agents` has made it.
        groups: the agents of the environment and their spaces; (): unknown here.
    """
    for group in groups:
        for agent in group.agents:
            for module_id in config.played_by[agent]:
                if module_id in frozen:
                    frozen[module_id].must_fit(agent, group)


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

    Args:
        factory: the value of the key `module`, if a script passed a class.
        own: other classes of a script, by their names in the configuration.

    Raises:
        CheckpointError: the weights are another module's.
        ValueError: a part cannot be built; names it.
    """
    from juggler.policies.policy import PolicyConfig, restore_parts  # imports torch

    given = given_or_named(config.module.module, factory, own)
    made_by = given if callable(given) else None
    policy = PolicyConfig(config.module, config.connectors.parsed(), made_by, own)
    return restore_parts(checkpoint, policy, observation_space, action_space, module_id)


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
    if digest != table.get(DIGEST, digest):
        raise ConfigError(
            f"{where}: its weights have the digest {digest}, and digest = {table[DIGEST]!r}: "
            "other weights were meant"
        )
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
