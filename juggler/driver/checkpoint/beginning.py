"""What a run begins with that another one has learned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

from juggler.driver.checkpoint.parts_agree import different_parts
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.record.checkpoints import write
from juggler.runtime.checkpoints.checkpoint import CONNECTORS, Checkpoint, CheckpointError, read
from juggler.runtime.checkpoints.frozen import FROM, WEIGHTS, playing_tree, read_module
from juggler.runtime.checkpoints.weights import NoSuchWeights, Weights, weights_of
from juggler.runtime.connectors.built_in import Place
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.mergeable_state import State, connector_branch, connector_state
from juggler.runtime.connectors.pipeline import Piece
from juggler.runtime.nearest import listed

#: The directory in that of a run with a league which has what its players began with.
INITIAL: Final = "initial"
_WHOLE: Final = "whole"


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights are from.

    Attributes:
        words: for errors: a key with its value, or words.
        selectable: the key `from_parameters` can have only some of them taken.
    """

    words: str
    selectable: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """Weights of another run, and what goes with them.

    Attributes:
        weights: for the learners, by module id of the new run. Modules that are not there begin
            with what the seed gives.
        whole: the modules whose weights are all that a checkpoint has, and so all that they must
            have.
        connectors: by module id of the new run, what the other run's connectors had learned of
            observations; {}: nothing.
        text: for people, where all of it is from.
        warnings: for people.
        sources: where the weights are from, by module id of the new run.
    """

    weights: Weights
    whole: Collection[str]
    connectors: Mapping[str, State]
    text: str
    warnings: tuple[str, ...]
    sources: Mapping[str, Source]


#: Checkpoints from which the tables of modules have weights, each with the module's id in it.
Own: TypeAlias = "Mapping[str, tuple[Checkpoint, str]]"


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
        """What each module of a configuration begins with whose table has no `from`: the weights
        of the module with the same id, or those of the only module that there is.

        Raises:
            ConfigError: there are none for a module.
        """
        checkpoint, whole = self.checkpoint, not config.driver.from_parameters
        weights: Weights = {}
        learned: dict[str, State] = {}
        warnings = list(checkpoint.problems)
        for module_id in [each for each in config.module_ids if not _own_source(config, each)]:
            source = self.source(module_id)
            weights[module_id] = self.weights[source]
            changed = _changed(config.of(module_id), checkpoint, source)
            keeps = whole and "env_to_module" not in changed
            learned[module_id] = _learned(config, checkpoint, source) if keeps else {}
            which = "" if len(config.module_ids) == 1 else f" of module {source!r}"
            warnings += [_other_connectors(which, checkpoint, place) for place in changed]
        shared = config.agents.shared
        for name, one, other in islice(different_parts(weights, shared), 1):
            warnings.append(
                f"modules {one!r} and {other!r} share {name!r}, and have different values of it in "
                f"{checkpoint.path}: all who share parts begin with those of the module that the "
                "table agents names last"
            )
        parts = "the weights" if whole else "weights"
        text = f"{parts} of update {checkpoint.version[1]} in {checkpoint.path}"
        given = Source(f"from_checkpoint = {config.driver.from_checkpoint!r}", selectable=True)
        return Beginning(
            weights,
            weights.keys() if whole else (),
            learned,
            text,
            tuple(warnings),
            dict.fromkeys(weights, given),
        )

    def source(self, module_id: str) -> str:
        """Find the other run's module whose weights a module begins with.

        Returns:
            The id of that module in the other run.

        Raises:
            ConfigError: the other run has no such module.
        """
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


def own_checkpoints(config: RunConfig) -> Own:
    """Read the checkpoints from which modules begin by their own tables, by module id.

    Args:
        config: of the run, with its module ids.

    Raises:
        ConfigError: a checkpoint is missing or damaged.
    """
    sources = {module_id: _own_source(config, module_id) for module_id in config.module_ids}
    return {each: _own_checkpoint(each, source) for each, source in sources.items() if source}


def beginning_of(
    config: RunConfig, other: OtherRun | None = None, own: Own | None = None
) -> Beginning | None:
    """What a configuration whose modules are known begins with; None: with what the seed gives.

    Args:
        config: of the run.
        other: what `other_run` has found; None: it is still to be looked for.
        own: what `own_checkpoints` has read; None: it is still to be read.

    Raises:
        ConfigError: as `other_run` and `OtherRun.beginning`; or there are no weights where the
            table of a module has them from.
    """
    other = other or other_run(config)
    parts = [] if other is None else [other.beginning(config)]
    own = own_checkpoints(config) if own is None else own
    parts += [_own_beginning(config, module_id, *found) for module_id, found in own.items()]
    return _together(parts) if parts else None


def rescaled_before(config: RunConfig, other: OtherRun | None, own: Own) -> dict[str, bool]:
    """Check for each reused module whether its old run had rescale_actions.

    Args:
        config: of the run, with its module ids.
        other: the result of `other_run`.
        own: the result of `own_checkpoints`.

    Returns:
        By module id, for modules that begin with weights of another run.

    Raises:
        ConfigError: as `beginning_of`.
    """
    found = {}
    for module_id in config.module_ids:
        if module_id in own:
            before, own_id = own[module_id]
        elif other is not None:
            before, own_id = other.checkpoint, other.source(module_id)
        else:
            continue
        pieces = _pieces(before, own_id, "module_to_env")
        found[module_id] = any(piece.use == "rescale_actions" for piece in pieces)
    return found


def keep(beginning: Beginning, config: RunConfig, run_dir: Path) -> None:
    """Write what a run begins with into its directory: players of a league may be reset to it,
    also after the run was resumed.

    Raises:
        CheckpointError: the disk refuses.
    """
    tree: dict[str, Any] = {
        module_id: {"parameters": weights, "buffers": {}}
        for module_id, weights in beginning.weights.items()
    }
    if learned := connector_branch(beginning.connectors):
        tree[CONNECTORS] = learned
    modules = {
        module_id: {"version": (0, 0), "extra": {_WHOLE: module_id in beginning.whole}}
        for module_id in beginning.weights
    }
    write(run_dir / INITIAL, Checkpoint((0, 0), tree, modules, {}, config.flat(), {}), keep=1)


def kept(config: RunConfig, run_dir: Path) -> Beginning | None:
    """What `keep` has written for a run that is resumed; None: it began with what the seed gives.

    Raises:
        CheckpointError: it is gone or damaged.
    """
    driver = config.driver
    if driver.from_checkpoint is None and not any(
        _own_source(config, m) for m in config.module_ids
    ):
        return None
    found = read(run_dir / INITIAL)
    weights = weights_of(found)
    whole = [each for each in weights if found.modules[each]["extra"].get(_WHOLE)]
    learned = {module_id: connector_state(found, module_id) for module_id in weights}
    text = "the weights that the run began with"
    return Beginning(weights, whole, learned, text, (), dict.fromkeys(weights, Source(text)))


def _own_source(config: RunConfig, module_id: str) -> str:
    """What the table of a module says that it begins with; "": nothing."""
    return str(config.agents.modules.get(module_id, {}).get(FROM, ""))


def _own_checkpoint(module_id: str, source: str) -> tuple[Checkpoint, str]:
    """Read a module's first checkpoint, and find the module's id in it.

    Raises:
        ConfigError: the checkpoint is missing or damaged.
    """
    try:
        return read_module(source)
    except CheckpointError as error:
        raise ConfigError(f"modules.{module_id}: from = {source!r}: {error}") from error


def _own_beginning(
    config: RunConfig, module_id: str, checkpoint: Checkpoint, own_id: str
) -> Beginning:
    """What one module begins with.

    Raises:
        ConfigError: there are no such weights.
    """
    where = f"modules.{module_id}: from = {_own_source(config, module_id)!r}"
    try:
        weights: Any = playing_tree(checkpoint, own_id)[WEIGHTS]
        learned = connector_state(checkpoint, own_id)
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from error
    changed = _changed(config.of(module_id), checkpoint, own_id)
    which = f" of module {own_id!r}"
    warnings = tuple(_other_connectors(which, checkpoint, place) for place in changed)
    text = f"module {module_id!r} with those of module {own_id!r} in {checkpoint.path}"
    return Beginning(
        {module_id: weights},
        (module_id,),
        {module_id: {} if "env_to_module" in changed else learned},
        text,
        warnings,
        {module_id: Source(where)},
    )


def _together(parts: Sequence[Beginning]) -> Beginning:
    return Beginning(
        {key: weights for part in parts for key, weights in part.weights.items()},
        frozenset(module_id for part in parts for module_id in part.whole),
        {key: learned for part in parts for key, learned in part.connectors.items()},
        ", ".join(part.text for part in parts),
        tuple(warning for part in parts for warning in part.warnings),
        {key: source for part in parts for key, source in part.sources.items()},
    )


def _other_connectors(which: str, checkpoint: Checkpoint, place: Place) -> str:
    return (
        f"the weights{which} of {checkpoint.path} were trained with other connectors: "
        f"connectors.{place} is not the same there"
    )


def _learned(config: RunConfig, checkpoint: Checkpoint, source: str) -> State:
    try:
        return connector_state(checkpoint, source)
    except CheckpointError as error:
        where = f"from_checkpoint = {config.driver.from_checkpoint!r}"
        raise ConfigError(f"{where}: {error}") from error


def _changed(config: RunConfig, checkpoint: Checkpoint, source: str) -> list[Place]:
    """List a module's EnvRunner pipelines that differ from the other run's."""
    own = config.connectors.parsed()
    places: tuple[Place, ...] = ("env_to_module", "module_to_env")
    return [
        place for place in places if _pieces(checkpoint, source, place) != list(own.pipeline(place))
    ]


def _pieces(checkpoint: Checkpoint, source: str, place: Place) -> list[Piece]:
    """Return a pipeline of a module in another run."""
    try:
        before = ConnectorsConfig.parse(checkpoint.config_of(source).get("connectors", {}))
        return list(before.pipeline(place))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the connectors of {checkpoint.path}: {error}") from error
