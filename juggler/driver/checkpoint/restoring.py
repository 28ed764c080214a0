"""What of a driver goes into a checkpoint, and how a run goes on from one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Any

from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.checkpoint.books import books_in, past_in
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.state import ModuleSettings, ModuleStart
from juggler.driver.hosting import Hosting
from juggler.driver.league_players import trained_now
from juggler.driver.record.candidates import Candidates
from juggler.driver.record.metrics import Metrics
from juggler.driver.workers.connector_state import ConnectorState
from juggler.runtime.checkpoints.checkpoint import (
    CONNECTORS,
    PIPELINES,
    Checkpoint,
)
from juggler.runtime.connectors.mergeable_state import State, connector_branch, connector_state
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import training_pb2


def core_of(config: RunConfig, resume: Checkpoint | None) -> DriverCore:
    """A new core, or one whose books continue those of a checkpoint, module by module."""
    trained = trained_now(config, resume.counters if resume else None)
    together = config.trained_together
    hosting = Hosting(config, trained)
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
    """What bounds the requests and updates of a module.

    Args:
        config: of the run.
        settings_of: the module of the configuration whose settings it has.
        num_learners: whom its first group waits for.
    """
    of_module = config.of(settings_of)
    return ModuleSettings(
        batch_size=of_module.learner.batch_size,
        max_open_updates=of_module.staleness.open_updates,
        weights_interval=of_module.learner.weights_interval,
        requests_per_runner=config.driver.requests_per_runner,
        max_updates_in_flight=config.driver.updates_in_flight,
        num_learners=num_learners,
        synchronous=config.driver.synchronous,
        num_runners=config.driver.num_env_runners,
        waited_for=config.waits_for(settings_of),
    )


def is_without(checkpoint: Checkpoint, module_id: str) -> bool:
    """Whether a checkpoint lacks a module, because that was added a moment before."""
    return bool(checkpoint.config.get("league")) and module_id not in checkpoint.module_ids


def _start_of(settings: ModuleSettings, module_id: str, resume: Checkpoint | None) -> ModuleStart:
    if resume is None or is_without(resume, module_id):
        return ModuleStart(settings)
    counters = books_in(resume, module_id)
    return ModuleStart(settings, *resume.version_of(module_id), counters)


def metrics_of(resume: Checkpoint | None) -> Metrics:
    """New metrics, or those of a checkpoint."""
    metrics = Metrics()
    if resume is not None:
        counters = resume.counters
        metrics.episodes_ended(counters["returns"], counters["lengths"])
        metrics.episodes = counters["episodes"]
        for module_id, ended in counters.get("by_module", {}).items():
            metrics.agents_ended(module_id, ended["returns"], ended["lengths"])
            metrics.of(module_id).episodes = ended["episodes"]
        for agent, ended in counters.get("by_agent", {}).items():
            metrics.agent_ended(agent, ended["returns"])
            metrics.of_agent(agent).episodes = ended["episodes"]
        metrics.candidates = Candidates(**counters.get("candidates", {}))
        for module_id, steps in counters.get("played", {}).items():
            metrics.of(module_id).played = steps
        trained_for = counters.get("training_time", counters["wall_time"])
        metrics.goes_on(trained_for, counters["trained"])
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
    extra = checkpoint.modules.get(module_id, {}).get("extra", {})
    return restores(module_id, learner_state(module_id, checkpoint), extra)


def learner_state(module_id: str, checkpoint: Checkpoint) -> dict[str, Tree]:
    """The arrays of a module's learner in a checkpoint, as `Learner.restore` takes them."""
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
    """What a learner is told to have a module begin with weights from elsewhere."""
    source = beginning.sources[module_id]
    return restores(
        module_id,
        {DEFAULT_MODULE: beginning.weights[module_id]},
        {},
        last=training_pb2.Restore(
            weights=True,
            whole=module_id in beginning.whole,
            source=source.words,
            selectable=source.selectable,
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
    # Arrays are aligned in the payload, so it is somewhat larger than their sum.
    state_bytes = sum(array.nbytes + 64 for _, array in flatten(tree))
    # One chunk at a time: a replay is large.
    for chunk, following in pairwise(chain(encode_frame(header, tree, digest=True), (None,))):
        part = training_pb2.Restore(module_id=module_id, chunk=chunk, state_bytes=state_bytes)
        state_bytes = 0  # the first command says it
        if following is None:
            part.MergeFrom(last or training_pb2.Restore())
            part.last = True
        yield part
