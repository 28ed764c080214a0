"""State hand-over: a learner that lost its driver passes its modules' states to the next program.

A learner on another host that loses its driver replaces itself by a new program (`exec`), which
dials the driver again. The states pass from one to the other in a file without a name, in memory
where the system has such files.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from io import BufferedRandom

from juggler.learner.learner import Learner
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.shared_memory import memory_file
from juggler.runtime.wire.frames import Frame, FrameReader, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import training_pb2

#: Holds the descriptor of the file, which stays open across `exec`.
_VARIABLE = "JUGGLER_STATE_HANDOVER"
_SIZE = struct.Struct("<Q")  # before each chunk

HandoverFrame = Frame[training_pb2.HandoverHeader]


class StateHandover:
    """The hand-over of one module: from the previous program, and to the next one.

    Attributes:
        weights_known: whether the driver knows of this module's weights. Only then is its state
            handed over.
    """

    def __init__(self, received: HandoverFrame | None = None) -> None:
        """Args:
        received: the module's state from the previous program, see `receive`; None: there is none.
        """
        self.weights_known = False
        self._received = received
        self._last_updates: deque[training_pb2.UpdateDone] = deque()

    def updated(self, done: training_pb2.UpdateDone, most_in_flight: int) -> None:
        """Remember an update. The driver may miss the answers to the last `most_in_flight`."""
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

    def take_over(
        self,
        learner: Learner,
        run_id: str,
        command: training_pb2.AddModule,
        ready: training_pb2.ModuleReady,
    ) -> Version | None:
        """Restore the received state if it is new enough for the command; reports it in `ready`.

        Returns:
            The version of the restored weights; None if nothing was restored.

        Raises:
            StateMismatch: the state belongs to another module, optimizer or algorithm.
        """
        received, self._received = self._received, None
        if received is None or received.header.run_id != run_id:
            return None
        if not command.HasField("oldest_handover"):
            return None
        version = Version.of(received.header.version)
        if version < Version.of(command.oldest_handover):
            return None
        learner.restore(received.tree, json.loads(received.header.extra))
        self.weights_known = True
        self._last_updates.extend(received.header.last_updates)
        ready.handed_over.CopyFrom(received.header.version)
        ready.last_updates.extend(received.header.last_updates)
        return version

    def chunks(
        self, module_id: str, learner: Learner, run_id: str, version: Version
    ) -> Iterator[bytes]:
        """The module's state as a frame for `hand_over`; `run_id` is of the driver that is lost."""
        tree, extra = learner.save()
        header = training_pb2.HandoverHeader(
            module_id=module_id,
            run_id=run_id,
            version=version.message(),
            extra=json.dumps(extra),
            last_updates=self._last_updates,
        )
        return encode_frame(header, tree, digest=True)


def hand_over(frames: Iterable[Iterator[bytes]]) -> None:
    """Write modules' states, as frames in chunks, for the program that replaces this one."""
    number = _file()
    with os.fdopen(number, "wb", closefd=False) as file:
        for frame in frames:
            for chunk in frame:
                file.write(_SIZE.pack(len(chunk)) + chunk)
    os.environ[_VARIABLE] = str(number)


def receive() -> dict[str, HandoverFrame]:
    """The states that the previous program handed over, by module id; a second call finds none.

    Raises:
        ValueError: the file ends in the middle of a state.
    """
    number = os.environ.pop(_VARIABLE, "")
    if not number:
        return {}
    frames: dict[str, HandoverFrame] = {}
    with os.fdopen(int(number), "w+b") as file:
        limits = Limits(payload_bytes=os.fstat(file.fileno()).st_size)
        file.seek(0)
        reader, frame = FrameReader(training_pb2.HandoverHeader, limits, digests=True), None
        for chunk in _chunks(file):
            frame = reader.feed(chunk)
            if frame is not None:
                frames[frame.header.module_id] = frame
        if frame is None:
            raise ValueError(f"the state in {_VARIABLE} ends in the middle")
    return frames


def _file() -> int:
    """The descriptor of a file without a name, which stays open across `exec`."""
    try:
        return memory_file("juggler-state-handover")
    except OSError:  # there are none in memory
        with tempfile.TemporaryFile() as on_disk:
            number = os.dup(on_disk.fileno())
        os.set_inheritable(number, True)
        return number


def _chunks(file: BufferedRandom) -> Iterator[bytes]:
    while size := file.read(_SIZE.size):
        yield file.read(*_SIZE.unpack(size))
