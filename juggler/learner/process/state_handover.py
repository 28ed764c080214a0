"""Modules' states, kept for the program that replaces this one when it has lost its driver."""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from io import BufferedRandom

from juggler.learner.learner import Learner
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import Frame, FrameReader, Limits, encode_frame
from juggler.runtime.wire.v1 import training_pb2

#: Names a file in this process's memory, which a program that replaces it by `exec` still has.
_VARIABLE = "JUGGLER_KEPT_STATE"
_SIZE = struct.Struct("<Q")  # before each chunk

KeptFrame = Frame[training_pb2.KeptState]


class KeptState:
    """What the program before this one kept of a module, and what this one would keep of it.

    Attributes:
        worth_keeping: whether the module has weights that a driver knows of.
    """

    def __init__(self, before: KeptFrame | None = None) -> None:
        """Args:
        before: of the program before this one, see `kept_before`; None: it kept nothing.
        """
        self.worth_keeping = False
        self._before = before
        self._last_updates: deque[training_pb2.UpdateDone] = deque()

    def updated(self, done: training_pb2.UpdateDone, most_in_flight: int) -> None:
        """An update is made. The driver may miss the answers to so many."""
        self._last_updates.append(
            training_pb2.UpdateDone(
                module_id=done.module_id,
                update_id=done.update_id,
                version=done.version,
                batches=done.batches,
            )
        )
        while len(self._last_updates) > most_in_flight:
            self._last_updates.popleft()

    def go_on(
        self,
        learner: Learner,
        run_id: str,
        command: training_pb2.AddModule,
        ready: training_pb2.ModuleReady,
    ) -> Version | None:
        """Give the learner what was kept, if its driver has a use for that, and say so.

        Args:
            learner: of the module.
            run_id: of its driver.
            command: says what that driver has a use for.
            ready: the answer.

        Returns:
            The version of the learner's weights; None where there is nothing to go on from.

        Raises:
            StateMismatch: what was kept is of another module, optimizer or algorithm.
        """
        kept, self._before = self._before, None
        if kept is None or kept.header.run_id != run_id or not command.HasField("kept"):
            return None
        version = Version.of(kept.header.version)
        if version < Version.of(command.kept):
            return None
        learner.restore(kept.tree, json.loads(kept.header.extra))
        self.worth_keeping = True
        self._last_updates.extend(kept.header.last_updates)
        ready.kept.CopyFrom(kept.header.version)
        ready.last_updates.extend(kept.header.last_updates)
        return version

    def chunks(
        self, module_id: str, learner: Learner, run_id: str, version: Version
    ) -> Iterator[bytes]:
        """The module's state as a frame for `keep`.

        Args:
            module_id: of the module.
            learner: of the module.
            run_id: of the driver that is lost.
            version: of the learner's weights.
        """
        tree, extra = learner.save()
        header = training_pb2.KeptState(
            module_id=module_id,
            run_id=run_id,
            version=version.message(),
            extra=json.dumps(extra),
            last_updates=self._last_updates,
        )
        return encode_frame(header, tree, digest=True)


def keep(frames: Iterable[Iterator[bytes]]) -> None:
    """Keep the states of modules, as frames in chunks, in memory of this process."""
    number = os.memfd_create("juggler-kept-state", 0)  # 0: open in what replaces this program
    with os.fdopen(number, "wb", closefd=False) as file:
        for frame in frames:
            for chunk in frame:
                file.write(_SIZE.pack(len(chunk)) + chunk)
    os.environ[_VARIABLE] = str(number)


def kept_before() -> dict[str, KeptFrame]:
    """What the program before this one kept, by module id; it is there once.

    Raises:
        ValueError: it ends in the middle.
    """
    number = os.environ.pop(_VARIABLE, "")
    if not number:
        return {}
    frames: dict[str, KeptFrame] = {}
    with os.fdopen(int(number), "w+b") as file:
        limits = Limits(payload_bytes=os.fstat(file.fileno()).st_size)
        file.seek(0)
        reader, frame = FrameReader(training_pb2.KeptState, limits, digests=True), None
        for chunk in _chunks(file):
            frame = reader.feed(chunk)
            if frame is not None:
                frames[frame.header.module_id] = frame
        if frame is None:
            raise ValueError(f"the state that {_VARIABLE} names ends in the middle")
    return frames


def _chunks(file: BufferedRandom) -> Iterator[bytes]:
    while size := file.read(_SIZE.size):
        yield file.read(*_SIZE.unpack(size))
