"""What of a driver goes into a checkpoint, and how a run goes on from one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import DROP_REASONS
from juggler.driver.core.ledger import Counters, LedgerError
from juggler.driver.core.module_core import ModuleStart
from juggler.driver.core.state import ModuleSettings
from juggler.driver.learner_group.placement import processes_of_module
from juggler.driver.record.candidates import RETURN_WINDOW, Candidates
from juggler.driver.record.metrics import Metrics
from juggler.driver.run_clock import Times
from juggler.driver.workers.connector_state import ConnectorState
from juggler.runtime.checkpoints.checkpoint import (
    CONNECTORS,
    PIPELINES,
    Checkpoint,
    CheckpointError,
)
from juggler.runtime.connectors.mergeable_state import State, connector_branch, connector_state
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import training_pb2

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True, slots=True)
class _SavedCandidates:
    """What `Candidates` has; older checkpoints have none."""

    refused: _Count = 0
    not_before: _Count = 0


@dataclass(frozen=True, slots=True)
class _Books:
    """The books of a module, or of all of them together."""

    sampled: _Count
    trained: _Count
    dropped: dict[Literal[*DROP_REASONS], _Count]  # type: ignore[valid-type]
    in_flight: _Count
    lost_unreported: _Count

    @property
    def counters(self) -> Counters:
        return Counters(
            self.sampled, self.trained, self.dropped, self.in_flight, self.lost_unreported
        )


@dataclass(frozen=True, slots=True)
class _Saved(_Books):
    """The driver's share of a checkpoint, as `counters_of` makes it."""

    next_id: _Count
    wall_time: Annotated[float, msgspec.Meta(ge=0)]
    episodes: _Count
    returns: Annotated[list[float], msgspec.Meta(max_length=RETURN_WINDOW)]
    lengths: Annotated[list[_Count], msgspec.Meta(max_length=RETURN_WINDOW)]
    training_time: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # older ones have none
    candidates: _SavedCandidates = field(default_factory=_SavedCandidates)
    played: dict[str, _Count] = field(default_factory=dict)  # by modules that are not trained
    league: dict[str, Any] = field(default_factory=dict)  # see `League.to_state`


def must_be_sound(checkpoint: Checkpoint) -> None:
    """Check that a run can continue from what a driver, or somebody else, has written there.

    Raises:
        CheckpointError: it cannot; says why.
    """
    path = checkpoint.path or Path()
    try:
        saved = msgspec.convert(checkpoint.counters, _Saved)
        saved.counters.check()
    except (msgspec.ValidationError, LedgerError) as error:
        raise CheckpointError(path, f"its counters cannot be those of a run: {error}") from None
    _modules_must_be_sound(checkpoint, saved.counters)
    for key in ("wall_time", "training_time"):
        if not math.isfinite(value := getattr(saved, key)):
            raise CheckpointError(path, f"its counters have {key} = {value}")
    if len(saved.returns) != len(saved.lengths) or len(saved.returns) > saved.episodes:
        raise CheckpointError(
            path,
            f"its counters have {len(saved.returns)} returns and {len(saved.lengths)} lengths of "
            f"{saved.episodes} episodes",
        )


def _modules_must_be_sound(checkpoint: Checkpoint, together: Counters) -> None:
    """
    Raises:
        CheckpointError: the books of a module are not sound, or those of all do not add up.
    """
    path, books = checkpoint.path or Path(), []
    for module_id in checkpoint.module_ids:
        try:
            books.append(msgspec.convert(checkpoint.counters_of(module_id), _Books).counters)
            books[-1].check()
        except (msgspec.ValidationError, LedgerError) as error:
            raise CheckpointError(
                path, f"the counters of module {module_id!r} cannot be those of a run: {error}"
            ) from None
    added = Counters.sum(books)
    if added != Counters.sum([together]):
        raise CheckpointError(
            path, f"the counters of its modules add up to {added}, and its own are {together}"
        )


def books_of(counters: Counters) -> dict[str, Any]:
    """Books as a checkpoint has them."""
    return {**asdict(counters), "dropped": dict(counters.dropped)}


def counters_of(
    counters: Counters, core: DriverCore, metrics: Metrics, times: Times
) -> dict[str, Any]:
    """The driver's share of a checkpoint.

    Args:
        counters: the books of all modules together, each as it was when its state was cut.
        core: of the run.
        metrics: of the run.
        times: of the run.
    """
    return {
        **books_of(counters),
        "next_id": core.next_id,
        "wall_time": times.wall,
        "training_time": times.training,
        "episodes": metrics.episodes,
        "returns": list(metrics.returns),
        "lengths": list(metrics.lengths),
        "candidates": asdict(metrics.candidates),
        "played": {name: each.played for name, each in metrics.by_module.items() if each.played},
    }


def core_of(config: RunConfig, resume: Checkpoint | None) -> DriverCore:
    """A new core, or one whose books continue those of a checkpoint, module by module."""
    starts = {module_id: _start_of(config, module_id, resume) for module_id in config.module_ids}
    first_id = 1 if resume is None else resume.counters["next_id"]
    return DriverCore(starts, first_id, config.trained_together)


def _start_of(config: RunConfig, module_id: str, resume: Checkpoint | None) -> ModuleStart:
    of_module = config.of(module_id)
    settings = ModuleSettings(
        batch_size=of_module.learner.batch_size,
        max_open_updates=of_module.staleness.open_updates,
        weights_interval=of_module.learner.weights_interval,
        requests_per_runner=config.driver.requests_per_runner,
        max_updates_in_flight=config.driver.updates_in_flight,
        num_learners=processes_of_module(
            module_id, config.driver.learners, config.trained_together
        ),
        synchronous=config.driver.synchronous,
        num_runners=config.driver.num_env_runners,
        waited_for=config.waits_for(module_id),
    )
    if resume is None:
        return ModuleStart(settings)
    counters = msgspec.convert(resume.counters_of(module_id), _Books).counters
    return ModuleStart(settings, *resume.version_of(module_id), counters)


def metrics_of(resume: Checkpoint | None) -> Metrics:
    """New metrics, or those of a checkpoint."""
    metrics = Metrics()
    if resume is not None:
        metrics.episodes_ended(resume.counters["returns"], resume.counters["lengths"])
        metrics.episodes = resume.counters["episodes"]
        metrics.candidates = Candidates(**resume.counters.get("candidates", {}))
        for module_id, steps in resume.counters.get("played", {}).items():
            metrics.of(module_id).played = steps
        metrics.goes_on(resume.counters["wall_time"], resume.counters["trained"])
    return metrics


def connectors_of(
    resume: Checkpoint | None,
    beginning: Beginning | None = None,
    module_id: str = DEFAULT_MODULE,
) -> ConnectorState:
    """What a module's connectors have learned so far: nothing, or what is in a checkpoint."""
    if resume is not None:
        return ConnectorState(connector_state(resume, module_id))
    return ConnectorState({} if beginning is None else beginning.connectors.get(module_id, {}))


def checkpoint_tree(
    states: Mapping[str, Mapping[str, Tree]], connectors: Mapping[str, State]
) -> dict[str, Tree]:
    """The tree of a checkpoint.

    A learner calls its module "default"; in the checkpoint it goes by its id. What its state has
    beside that and pipelines, as a core of somebody's own may, is named "module:name" there, unless
    the module is itself called "default".

    Args:
        states: by module id, what its learner saved.
        connectors: by module id, what its connectors in EnvRunners have learned.

    Raises:
        ValueError: no learner's state is like that.
    """
    tree: dict[str, Tree] = {}
    pipelines: dict[str, Tree] = {}
    for module_id, state in states.items():
        for key, branch in state.items():
            if key == PIPELINES and isinstance(branch, Mapping):
                pipelines[module_id] = branch.get(DEFAULT_MODULE, {})
                continue
            name = _name_in_checkpoint(module_id, key)
            if name in tree:
                raise ValueError(f"the states of two modules have a branch {name!r}")
            tree[name] = branch
    if pipelines:
        tree[PIPELINES] = pipelines
    if learned := connector_branch(connectors):
        tree[CONNECTORS] = learned
    return tree


def _name_in_checkpoint(module_id: str, key: str) -> str:
    if key == DEFAULT_MODULE:
        return module_id
    return key if module_id == DEFAULT_MODULE else f"{module_id}:{key}"


def restore_commands(module_id: str, checkpoint: Checkpoint) -> Iterator[training_pb2.Restore]:
    """What a learner is told to have a module go on from a checkpoint.

    Raises:
        CheckpointError: the checkpoint has no such module.
    """
    checkpoint.module_id(module_id)
    state: dict[str, Tree] = {}
    for name, branch in checkpoint.tree.items():
        key = _key_of_learner(name, module_id, checkpoint)
        if key == PIPELINES and isinstance(branch, Mapping):
            if module_id in branch:
                state[key] = {DEFAULT_MODULE: branch[module_id]}
        elif key is not None:
            state[key] = branch
    extra = checkpoint.modules.get(module_id, {}).get("extra", {})
    return restores(module_id, state, extra)


def _key_of_learner(name: str, module_id: str, checkpoint: Checkpoint) -> str | None:
    """What a learner's state calls a branch of a checkpoint; None: the branch is not its."""
    if name in (module_id, PIPELINES):
        return DEFAULT_MODULE if name == module_id else name
    if name == CONNECTORS or name in checkpoint.module_ids:
        return None
    owner, colon, key = name.partition(":")
    if colon and owner in checkpoint.module_ids and owner != DEFAULT_MODULE:
        return key if owner == module_id else None
    return name if module_id == DEFAULT_MODULE else None


def begin_commands(module_id: str, beginning: Beginning) -> Iterator[training_pb2.Restore]:
    """What a learner is told to have a module begin with weights of another run."""
    return restores(
        module_id,
        {DEFAULT_MODULE: beginning.weights[module_id]},
        {},
        last=training_pb2.Restore(
            weights=True, whole=module_id in beginning.whole, source="from_checkpoint"
        ),
    )


def restores(
    module_id: str,
    tree: Mapping[str, Tree],
    extra: Mapping[str, Any],
    last: training_pb2.Restore | None = None,
) -> Iterator[training_pb2.Restore]:
    """A state, or weights, as commands to the learner process that hosts a module.

    Args:
        module_id: of the module that is to go on from it.
        tree: arrays, as `Learner.save` or `Learner.get_weights` gives them.
        extra: what of a state is not an array.
        last: what the last command says beside its chunk.
    """
    header = training_pb2.StateHeader(module_id=module_id, extra=json.dumps(dict(extra)))
    chunks = list(encode_frame(header, tree, digest=True))
    for chunk in chunks:
        part = training_pb2.Restore(module_id=module_id, chunk=chunk)
        if chunk is chunks[0]:
            # Arrays are aligned in the payload, so it is somewhat larger than their sum.
            part.state_bytes = sum(map(len, chunks)) + 64 * len(flatten(tree))
        if chunk is chunks[-1]:
            part.MergeFrom(last or training_pb2.Restore())
            part.last = True
        yield part
