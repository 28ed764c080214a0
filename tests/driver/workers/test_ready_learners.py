"""What is said of the weights of learners that get ready."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from google.protobuf import any_pb2
from support.worker_events_world import WorkersWorld

from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import training_pb2


def test_a_learner_that_gets_ready_before_its_group_has_formed_has_lost_nothing(
    tmp_path: Path,
) -> None:
    before = WorkersWorld(tmp_path)
    assert before.parts.checkpointing.begin()
    ((command_id, asked),) = before.asked(before.learner, training_pb2.Snapshot)
    header = training_pb2.StateHeader(
        module_id=asked.module_id, version=Version(3, 7).message(), extra="{}"
    )
    for chunk in encode_frame(header, {"default": {"x": np.ones(3)}}, digest=True):
        before.reply(before.learner, command_id, any_pb2.Any(value=chunk))
    (written,) = before.written.gather(timeout=30)
    saved = read(written.path)

    class Resumed(WorkersWorld):
        """The second learner is set up when the first one is ready."""

        def get_ready(self, worker: Worker, *module_ids: str) -> None:
            if worker.role != "learner":
                return super().get_ready(worker, *module_ids)
            if worker.worker_id == "learner-1":
                self.snapshots.newest = saved.path
                assert not self.core.members
                (_, *restored) = self.parts.learners["default"].begin(worker, 0)
                assert restored, "from the checkpoint on the disk"
            (*_, (command_id, _)) = self.asked(worker, training_pb2.AddModule)
            point = f"127.0.0.1:{1000 + worker.index}"
            ready = training_pb2.ModuleReady(module_id="default", meeting_point=point)
            self.reply(worker, command_id, ready)

    world = Resumed(tmp_path, resume=saved, num_learners=2, devices="cpu")
    assert world.parts.core.modules["default"].weights_version.update == 7
    assert world.core.members == ("learner-0", "learner-1")
    assert not [text for text in world.told.messages if "lost" in text]
