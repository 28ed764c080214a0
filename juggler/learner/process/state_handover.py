"""A learner's state, kept for the program that takes its place once it has lost its driver."""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Iterator
from io import BufferedRandom

from juggler.learner.learner import Learner
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import Frame, FrameReader, Limits, encode_frame
from juggler.runtime.wire.v1 import training_pb2

#: Names a file of this process in memory, which a program that replaces it by `exec` still has.
_VARIABLE = "JUGGLER_KEPT_STATE"
_SIZE = struct.Struct("<Q")  # before each chunk


class KeptState:
    """What the program before this one kept, and what this one would keep.

    Attributes:
        worth_keeping: whether there are weights that a driver knows of.
    """

    def __init__(self) -> None:
        self.worth_keeping = False
        self._before = _take()
        self._last_updates: deque[training_pb2.UpdateDone] = deque()

    def updated(self, done: training_pb2.UpdateDone, most_in_flight: int) -> None:
        """An update is made; so many may be without an answer that the driver has heard."""
        self._last_updates.append(
            training_pb2.UpdateDone(
                update_id=done.update_id, version=done.version, batches=done.batches
            )
        )
        while len(self._last_updates) > most_in_flight:
            self._last_updates.popleft()

    def go_on(
        self, learner: Learner, run_id: str, setup: training_pb2.Setup, ready: training_pb2.Ready
    ) -> Version | None:
        """Give the learner what was kept, if its driver has a use for that, and say so.

        Args:
            learner: of this process.
            run_id: of its driver.
            setup: says what that driver has a use for.
            ready: the answer.

        Returns:
            The version of the learner's weights; None where there is nothing to go on from.

        Raises:
            StateMismatch: it is of another module, optimizer or algorithm.
        """
        kept, self._before = self._before, None
        if kept is None or kept.header.run_id != run_id or not setup.HasField("kept"):
            return None
        version = Version.of(kept.header.version)
        if version < Version.of(setup.kept):
            return None
        learner.restore(kept.tree, json.loads(kept.header.extra))
        self.worth_keeping = True
        self._last_updates.extend(kept.header.last_updates)
        ready.kept.CopyFrom(kept.header.version)
        ready.last_updates.extend(kept.header.last_updates)
        return version

    def keep(self, learner: Learner, run_id: str, version: Version) -> None:
        """Keep what the learner has, in memory of this process.

        Args:
            learner: of this process.
            run_id: of the driver that is lost.
            version: of the learner's weights.
        """
        tree, extra = learner.save()
        header = training_pb2.KeptState(
            run_id=run_id,
            version=version.message(),
            extra=json.dumps(extra),
            last_updates=self._last_updates,
        )
        number = os.memfd_create("juggler-kept-state", 0)  # 0: open in what replaces this program
        with os.fdopen(number, "wb", closefd=False) as file:
            for chunk in encode_frame(header, tree, digest=True):
                file.write(_SIZE.pack(len(chunk)) + chunk)
        os.environ[_VARIABLE] = str(number)


def _take() -> Frame[training_pb2.KeptState] | None:
    number = os.environ.pop(_VARIABLE, "")
    if not number:
        return None
    with os.fdopen(int(number), "w+b") as file:
        limits = Limits(payload_bytes=os.fstat(file.fileno()).st_size)
        file.seek(0)
        reader = FrameReader(training_pb2.KeptState, limits, digests=True)
        for chunk in _chunks(file):
            if (frame := reader.feed(chunk)) is not None:
                return frame
    raise ValueError(f"the state that {_VARIABLE} names ends in the middle")


def _chunks(file: BufferedRandom) -> Iterator[bytes]:
    while size := file.read(_SIZE.size):
        yield file.read(*_SIZE.unpack(size))
