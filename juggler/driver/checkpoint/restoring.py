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
from juggler.runtime.connectors.mergeable_state import State, connector_state
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
class _Saved:
    """The driver's share of a checkpoint, as `counters_of` makes it."""

    sampled: _Count
    trained: _Count
    dropped: dict[Literal[*DROP_REASONS], _Count]  # type: ignore[valid-type]
    in_flight: _Count
    lost_unreported: _Count
    next_id: _Count
    wall_time: Annotated[float, msgspec.Meta(ge=0)]
    episodes: _Count
    returns: Annotated[list[float], msgspec.Meta(max_length=RETURN_WINDOW)]
    lengths: Annotated[list[_Count], msgspec.Meta(max_length=RETURN_WINDOW)]
    training_time: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # older ones have none
    candidates: _SavedCandidates = field(default_factory=_SavedCandidates)


def must_be_sound(checkpoint: Checkpoint) -> None:
    """Whether a run can go on from what a driver has written there, or somebody else.

    Raises:
        CheckpointError: it cannot, and why.
    """
    path = checkpoint.path or Path()
    try:
        saved = msgspec.convert(checkpoint.counters, _Saved)
        counted = (saved.sampled, saved.trained, saved.dropped, saved.in_flight)
        Counters(*counted, saved.lost_unreported).check()
    except (msgspec.ValidationError, LedgerError) as error:
        raise CheckpointError(path, f"its counters cannot be those of a run: {error}") from None
    for key in ("wall_time", "training_time"):
        if not math.isfinite(value := getattr(saved, key)):
            raise CheckpointError(path, f"its counters have {key} = {value}")
    if len(saved.returns) != len(saved.lengths) or len(saved.returns) > saved.episodes:
        raise CheckpointError(
            path,
            f"its counters have {len(saved.returns)} returns and {len(saved.lengths)} lengths of "
            f"{saved.episodes} episodes",
        )


def counters_of(core: DriverCore, metrics: Metrics, times: Times) -> dict[str, Any]:
    """The driver's share of a checkpoint."""
    counters = core.counters()
    return {
        "sampled": counters.sampled,
        "trained": counters.trained,
        "dropped": dict(counters.dropped),
        "in_flight": counters.in_flight,
        "lost_unreported": counters.lost_unreported,
        "next_id": core.next_id,
        "wall_time": times.wall,
        "training_time": times.training,
        "episodes": metrics.episodes,
        "returns": list(metrics.returns),
        "lengths": list(metrics.lengths),
        "candidates": asdict(metrics.candidates),
    }


def core_of(config: RunConfig, resume: Checkpoint | None) -> DriverCore:
    """A new core, or one whose books go on from a checkpoint. A run trains one module."""
    settings = ModuleSettings(
        batch_size=config.learner.batch_size,
        max_open_updates=config.staleness.open_updates,
        weights_interval=config.learner.weights_interval,
        requests_per_runner=config.driver.requests_per_runner,
        max_updates_in_flight=config.driver.updates_in_flight,
        num_learners=config.driver.learners,
        synchronous=config.driver.synchronous,
        num_runners=config.driver.num_env_runners,
    )
    if resume is None:
        return DriverCore({DEFAULT_MODULE: ModuleStart(settings)})
    saved = resume.counters
    counters = Counters(
        saved["sampled"],
        saved["trained"],
        saved["dropped"],
        saved["in_flight"],
        saved["lost_unreported"],
    )
    start = ModuleStart(settings, *resume.version, counters)
    return DriverCore({DEFAULT_MODULE: start}, saved["next_id"])


def metrics_of(resume: Checkpoint | None) -> Metrics:
    """New metrics, or those of a checkpoint."""
    metrics = Metrics()
    if resume is not None:
        metrics.episodes_ended(resume.counters["returns"], resume.counters["lengths"])
        metrics.episodes = resume.counters["episodes"]
        metrics.candidates = Candidates(**resume.counters.get("candidates", {}))
        metrics.goes_on(resume.counters["wall_time"], resume.counters["trained"])
    return metrics


def with_connectors(tree: Mapping[str, Tree], state: State) -> Mapping[str, Tree]:
    """A learner's state with what the connectors of EnvRunners have learned, if they have."""
    return {**tree, CONNECTORS: state} if state else tree


def connectors_of(resume: Checkpoint | None, beginning: Beginning | None = None) -> ConnectorState:
    """What connectors have learned so far: nothing, or what is in a checkpoint."""
    if resume is not None:
        return ConnectorState(connector_state(resume))
    return ConnectorState({} if beginning is None else beginning.connectors)


def module_tree(module_id: str, state: Mapping[str, Tree]) -> dict[str, Tree]:
    """A learner's state, which calls its module "default", as the tree of a checkpoint has it.

    Raises:
        ValueError: no state is like that.
    """
    return _renamed(state, DEFAULT_MODULE, module_id)


def restore_commands(module_id: str, checkpoint: Checkpoint) -> Iterator[training_pb2.Restore]:
    """What a learner is told to have a module go on from a checkpoint.

    Raises:
        CheckpointError: the checkpoint has no such module.
    """
    if module_id not in checkpoint.modules:
        known = ", ".join(map(repr, checkpoint.modules))
        where = checkpoint.path or Path("in memory")
        raise CheckpointError(where, f"has no module {module_id!r}: there are {known}")
    others = {CONNECTORS, *checkpoint.modules} - {module_id}
    tree = {key: branch for key, branch in checkpoint.tree.items() if key not in others}
    pipelines = tree.pop(PIPELINES, {})
    if isinstance(pipelines, Mapping) and module_id in pipelines:
        tree[PIPELINES] = {module_id: pipelines[module_id]}
    state = _renamed(tree, module_id, DEFAULT_MODULE)
    return restores(module_id, state, checkpoint.modules[module_id]["extra"])


def _renamed(tree: Mapping[str, Tree], before: str, after: str) -> dict[str, Tree]:
    """A state under another module id."""
    renamed = {after if key == before else key: branch for key, branch in tree.items()}
    pipelines = renamed.get(PIPELINES)
    if isinstance(pipelines, Mapping):
        renamed[PIPELINES] = {after if key == before else key: x for key, x in pipelines.items()}
    return renamed


def begin_commands(module_id: str, beginning: Beginning) -> Iterator[training_pb2.Restore]:
    """What a learner is told to have a module begin with weights of another run."""
    return restores(
        module_id,
        beginning.weights,
        {},
        last=training_pb2.Restore(weights=True, whole=beginning.whole, source="from_checkpoint"),
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
