"""A synchronous run of `WorkersWorld`, round by round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import any_pb2

from juggler.driver.checkpoint.snapshots import SnapshotWritten
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2
from support.worker_events_world import WorkersWorld


def synchronous(directory: Path, **keys: Any) -> WorkersWorld:
    """A round is two requests, of which the runner may have both at once."""
    return WorkersWorld(directory, synchronous=True, batch_size=40, checkpoint_updates=2, **keys)


def requests(world: WorkersWorld) -> list[tuple[int, training_pb2.SampleRequest]]:
    return world.asked(world.runner, training_pb2.SampleRequest)


def answer_requests(world: WorkersWorld, **said: Any) -> None:
    for command_id, request in requests(world)[-2:]:
        receipt = {"batch_id": request.batch_id, "learner": "learner-0", "live_steps": 20, **said}
        world.reply(world.runner, command_id, training_pb2.Receipt(**receipt))


def play_a_round(world: WorkersWorld, **said: Any) -> None:
    """Both requests and the update are answered."""
    answer_requests(world, **said)
    command_id, update = world.asked(world.learner, training_pb2.Update)[-1]
    version = {"generation": update.generation, "update": world.parts.core.updates + 1}
    used = [{"batch_id": batch_id, "live_steps": 20} for batch_id in update.batch_ids]
    done = training_pb2.UpdateDone(update_id=update.update_id, version=version, batches=used)
    world.reply(world.learner, command_id, done)


def answer_the_snapshot(
    world: WorkersWorld, module_id: str = "default", state: Mapping[str, Tree] | None = None
) -> None:
    command_id, _ = world.asked(world.learner, training_pb2.Snapshot)[-1]
    update = world.parts.core.updates
    header = training_pb2.StateHeader(
        module_id=module_id, version={"generation": 1, "update": update}, extra="{}"
    )
    (chunk,) = encode_frame(header, state or {"a": np.zeros(3)}, digest=True)
    world.reply(world.learner, command_id, any_pb2.Any(value=chunk))


def begin_an_evaluation(
    world: WorkersWorld, module_id: str = "default", state: Mapping[str, Tree] | None = None
) -> SnapshotWritten:
    """One is due, and an evaluator, who is there, has the checkpoint to play."""
    evaluations = world.parts.evaluations
    evaluations.want()
    evaluations.begin()
    answer_the_snapshot(world, module_id, state)
    (written,) = world.written.gather(timeout=30)
    world.snapshots.done(written)
    evaluations.written(written)
    return written
