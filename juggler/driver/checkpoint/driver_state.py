"""Saves the driver's state in a checkpoint, and restores it."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from juggler.driver.checkpoint.first_weights import FirstWeights
from juggler.driver.config import RunConfig
from juggler.driver.core.core_state import ModuleSettings, ModuleStart, RemovedModules
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.ledger import Count, Counters, LedgerError
from juggler.driver.driver_config import REQUESTS_PER_RUNNER, UPDATES_IN_FLIGHT
from juggler.driver.league_players import trained_now
from juggler.driver.module_placement import ModulePlacement
from juggler.driver.record.metrics import (
    RETURN_WINDOW,
    AgentMetrics,
    Candidates,
    Metrics,
    ModuleMetrics,
)
from juggler.driver.result import Times
from juggler.driver.workers.command_sender import ConnectorState
from juggler.runtime.checkpoints.checkpoint import (
    CONNECTORS,
    PIPELINES,
    Checkpoint,
    CheckpointError,
)
from juggler.runtime.connectors.mergeable_state import State, connector_branch, connector_state
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import training_pb2


def core_of(config: RunConfig, resume: Checkpoint | None) -> DriverCore:
    """Make a core that continues a checkpoint's books."""
    trained = trained_now(config, resume.counters if resume else None)
    together = config.agents.trained_together
    hosting = ModulePlacement(config, trained)
    starts = {
        module_id: _start_of(
            settings_for(config, settings_of, hosting.processes_of(module_id)), module_id, resume
        )
        for module_id, settings_of in trained.items()
    }
    stop_steps = config.driver.stop_steps
    if resume is None:
        return DriverCore(starts, 1, together, stop_steps=stop_steps)
    there = [[each for each in ids if each in trained] for ids in together]
    past = past_in(resume, trained)
    next_id = resume.counters["next_id"]
    return DriverCore(starts, next_id, filter(None, there), past, stop_steps)


def settings_for(config: RunConfig, settings_of: str, num_learners: int) -> ModuleSettings:
    """Return the limits on requests and updates of a module.

    Args:
        settings_of: the module of the configuration whose settings it has.
    """
    of_module = config.of(settings_of)
    return ModuleSettings(
        batch_size=of_module.learner.batch_size,
        max_open_updates=of_module.staleness.open_updates,
        weights_interval=of_module.learner.weights_interval,
        requests_per_runner=REQUESTS_PER_RUNNER,
        max_updates_in_flight=UPDATES_IN_FLIGHT,
        num_learners=num_learners,
        synchronous=config.driver.synchronous,
        num_runners=config.driver.num_env_runners,
        waited_for=config.waits_for(settings_of),
    )


def is_without(checkpoint: Checkpoint, module_id: str) -> bool:
    """Return whether a checkpoint is older than a module."""
    return bool(checkpoint.config.get("league")) and module_id not in checkpoint.module_ids


def _start_of(settings: ModuleSettings, module_id: str, resume: Checkpoint | None) -> ModuleStart:
    if resume is None or is_without(resume, module_id):
        return ModuleStart(settings)
    counters = books_in(resume, module_id)
    return ModuleStart(settings, *resume.version_of(module_id), counters)


def metrics_of(resume: Checkpoint | None) -> Metrics:
    """New metrics, or a checkpoint's."""
    metrics = Metrics()
    if resume is not None:
        counters = resume.counters
        metrics.episodes_ended(counters["returns"], counters["lengths"])
        metrics.episodes = counters["episodes"]
        for module_id, ended in counters.get("by_module", {}).items():
            metrics.of(module_id).episodes_ended(ended["returns"], ended["lengths"])
            metrics.of(module_id).episodes = ended["episodes"]
        for agent, ended in counters.get("by_agent", {}).items():
            metrics.of_agent(agent).episodes_ended(ended["returns"])
            metrics.of_agent(agent).episodes = ended["episodes"]
        metrics.candidates = Candidates(**counters.get("candidates", {}))
        for module_id, steps in counters.get("played", {}).items():
            metrics.of(module_id).played = steps
        trained_for = counters.get("training_time", counters["wall_time"])
        metrics.continue_from(trained_for, counters["trained"])
    return metrics


def connectors_of(
    resume: Checkpoint | None, first: FirstWeights | None = None, module_id: str = DEFAULT_MODULE
) -> ConnectorState:
    """Return what a module's connectors have learned so far."""
    if resume is not None:
        return ConnectorState(connector_state(resume, module_id))
    return ConnectorState(first.learned if first else {})


def checkpoint_tree(
    states: Mapping[str, Mapping[str, Tree]], connectors: Mapping[str, State]
) -> dict[str, Tree]:
    """Build the tree of a checkpoint.

    A learner calls its module "default"; in the checkpoint it has its id. Other branches of its
    state, as a user's own core may have, are named "module:name" there, unless the module is
    itself called "default".

    Args:
        states: by module id, what its learner saved.
        connectors: by module id, what its connectors in EnvRunners have learned.
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
    """Make the commands that restore a module from a checkpoint."""
    checkpoint.module_id(module_id)
    extra = checkpoint.modules.get(module_id, {}).get("extra", {})
    return restores(module_id, learner_state(module_id, checkpoint), extra)


def learner_state(module_id: str, checkpoint: Checkpoint) -> dict[str, Tree]:
    """Return a module's state as `Learner.restore` takes it."""
    state: dict[str, Tree] = {}
    for name, branch in checkpoint.tree.items():
        key = _key_of_learner(name, module_id, checkpoint)
        if key == PIPELINES and isinstance(branch, Mapping):
            if module_id in branch:
                state[key] = {DEFAULT_MODULE: branch[module_id]}
        elif key is not None:
            state[key] = branch
    return state


def _key_of_learner(name: str, module_id: str, checkpoint: Checkpoint) -> str | None:
    """Return a branch's name at the learner, or None for other modules."""
    if name in (module_id, PIPELINES):
        return DEFAULT_MODULE if name == module_id else name
    if name == CONNECTORS or name in checkpoint.module_ids:
        return None
    owner, colon, key = name.partition(":")
    if colon and owner in checkpoint.module_ids and owner != DEFAULT_MODULE:
        return key if owner == module_id else None
    return name if module_id == DEFAULT_MODULE else None


def begin_commands(module_id: str, first: FirstWeights) -> Iterator[training_pb2.Restore]:
    """Make the commands that give a module weights from elsewhere."""
    return restores(
        module_id,
        {DEFAULT_MODULE: first.weights},
        {},
        last=training_pb2.Restore(
            weights=True,
            whole=first.whole,
            source=first.source,
            selectable=first.selectable,
        ),
    )


def restores(
    module_id: str,
    tree: Mapping[str, Tree],
    extra: Mapping[str, Any],
    last: training_pb2.Restore | None = None,
) -> Iterator[training_pb2.Restore]:
    """Make commands that carry a module's state or weights.

    Args:
        extra: the part of a state that is not arrays.
        last: additional fields of the last command.
    """
    header = training_pb2.StateHeader(module_id=module_id, extra=json.dumps(dict(extra)))
    # Arrays are aligned in the payload, which makes it larger than their sum.
    state_bytes = sum(array.nbytes + 64 for _, array in flatten(tree))
    # One chunk at a time: a replay is large.
    for chunk, following in pairwise(chain(encode_frame(header, tree, digest=True), (None,))):
        part = training_pb2.Restore(module_id=module_id, chunk=chunk, state_bytes=state_bytes)
        state_bytes = 0  # only the first command has the size
        if following is None:
            part.MergeFrom(last or training_pb2.Restore())
            part.last = True
        yield part


_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Returns = Annotated[list[float], msgspec.Meta(max_length=RETURN_WINDOW)]
_Lengths = Annotated[list[Count], msgspec.Meta(max_length=RETURN_WINDOW)]


@dataclass(frozen=True, slots=True)
class _SavedCandidates:
    """The state of `Candidates`; older checkpoints have none."""

    refused: Count = 0
    not_before: Count = 0


@dataclass(frozen=True)
class _SavedRemovedModules(Counters):
    """Books of removed modules, and the sums of their versions."""

    version: tuple[Count, Count]


@dataclass(frozen=True)
class _OfAgent:
    """The episodes in which an agent acted."""

    episodes: Count
    returns: _Returns

    def __post_init__(self) -> None:
        if len(self.returns) > self.episodes:
            raise ValueError(f"has {len(self.returns)} returns of {self.episodes} episodes")


@dataclass(frozen=True)
class _OfModule(_OfAgent):
    """Episodes of a module's agents, or of the run."""

    lengths: _Lengths

    def __post_init__(self) -> None:
        if len(self.returns) != len(self.lengths) or len(self.returns) > self.episodes:
            raise ValueError(
                f"has {len(self.returns)} returns and {len(self.lengths)} lengths of "
                f"{self.episodes} episodes"
            )


@dataclass(frozen=True)
class _Saved(_OfModule, Counters):
    """The driver's share of a checkpoint, made by `counters_of`."""

    next_id: Count
    wall_time: _Seconds
    training_time: _Seconds = 0.0  # older ones have none
    candidates: _SavedCandidates = field(default_factory=_SavedCandidates)
    by_module: dict[str, _OfModule] = field(default_factory=dict)  # with several agents
    by_agent: dict[str, _OfAgent] = field(default_factory=dict)  # also with several agents
    played: dict[str, Count] = field(default_factory=dict)  # steps by modules that are not trained
    league: dict[str, Any] = field(default_factory=dict)  # see `League.to_state`
    copies: dict[str, str] = field(default_factory=dict)  # digests of the league's copies, by id
    resets: dict[str, Count] = field(default_factory=dict)  # see `league_players.RESETS`
    values: dict[str, dict[str, float | None]] = field(default_factory=dict)  # see `ChangedValues`
    past: _SavedRemovedModules | None = None  # if modules have come and gone


def must_be_sound(checkpoint: Checkpoint) -> None:
    """Check that a run can continue from a checkpoint's counters."""
    path, what = checkpoint.path or Path(), "its counters"
    try:
        saved = msgspec.convert(checkpoint.counters, _Saved)
        saved.check()
        books: list[Counters] = [saved.past] if saved.past else []
        for each in books:
            each.check()
        for module_id in checkpoint.module_ids:
            what = f"the counters of module {module_id!r}"
            books.append(books_in(checkpoint, module_id))
            books[-1].check()
    except (msgspec.ValidationError, LedgerError) as error:
        raise CheckpointError(path, f"{what} are invalid: {error}") from None
    added, together = Counters.sum(books), Counters.sum([saved])
    if added != together:
        raise CheckpointError(
            path, f"the counters of its modules add up to {added}, and its own are {together}"
        )


def books_of(counters: Counters) -> dict[str, Any]:
    """Return books in a checkpoint's format."""
    return {**asdict(counters), "dropped": dict(counters.dropped)}


def counters_of(
    books: Iterable[Counters], past: RemovedModules, next_id: int, metrics: Metrics, times: Times
) -> dict[str, Any]:
    """Make the driver's share of a checkpoint.

    Args:
        books: of each module, at the moment of its snapshot.
        past: of modules whose states are not in the checkpoint.
    """
    before = {**books_of(past.counters), "version": past.version}
    return {
        **books_of(Counters.sum([*books, past.counters])),
        **({"past": before} if past != RemovedModules() else {}),
        "next_id": next_id,
        "wall_time": times.wall,
        "training_time": times.training,
        **_ended(metrics),
        "lengths": list(metrics.lengths),
        "by_module": {
            name: {**_ended(each), "lengths": list(each.lengths)}
            for name, each in metrics.by_module.items()
            if each.episodes
        },
        "by_agent": {name: _ended(each) for name, each in metrics.by_agent.items()},
        "candidates": asdict(metrics.candidates),
        "played": {name: each.played for name, each in metrics.by_module.items() if each.played},
    }


def _ended(of: Metrics | ModuleMetrics | AgentMetrics) -> dict[str, Any]:
    return {"episodes": of.episodes, "returns": list(of.returns)}


def books_in(checkpoint: Checkpoint, module_id: str) -> Counters:
    """Return a module's books in a sound checkpoint."""
    return msgspec.convert(checkpoint.counters_of(module_id), Counters)


def past_in(checkpoint: Checkpoint, trained: Container[str]) -> RemovedModules:
    """Return the books of modules that are no longer trained."""
    saved = msgspec.convert(checkpoint.counters, _Saved).past
    past = (
        RemovedModules(Counters.sum([saved]), Version(*saved.version))
        if saved
        else RemovedModules()
    )
    for module_id in checkpoint.modules:
        if module_id not in trained:
            version = Version(*checkpoint.version_of(module_id))
            past = past.and_of(books_in(checkpoint, module_id), version)
    return past
