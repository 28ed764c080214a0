"""A run's events of TensorBoard."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

#: Prefixes of keys that TensorBoard shows in the section of times.
_OF_TIME: Final = ("seconds/", "inference/", "learner_steps/", "env_steps_")


class EventFile:
    """The scalars of lines of metrics, in a file `events.out.tfevents.*` that the first one makes.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: EventFileWriter | None = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Append the scalars of a line. Their step is `env_steps_sampled`.

        Raises:
            OSError: the disk refuses; the next line starts a new file.
        """
        try:
            self._append(line)
        except OSError:
            self.close()  # it may end in half a record
            raise

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):  # each line was flushed
                writer.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        # Imported here because it takes a tenth of a second, which would delay the start of a run.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        event = Event(wall_time=time.time(), step=line["env_steps_sampled"])
        for tag, value in flat(line).items():
            if isinstance(value, int | float):
                event.summary.value.add(tag=tag_of(tag), simple_value=float(value))
        if self._writer is None:
            self._writer = _event_file_writer(self._directory)
            # Makes TensorBoard forget what a resumed run wrote after this step.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(wall_time=event.wall_time, step=event.step, session_log=start)
            )
        self._writer.add_event(event)
        self._writer.flush()


def tag_of(key: str) -> str:
    """Return a number's TensorBoard tag, whose first part is its section."""
    name = key.removeprefix("modules/")
    if name != key or name.startswith(("staleness_", "updates", "weights_")):
        return f"train/{name}"
    if key.startswith(("episode", "evaluation_")):
        return f"rollout/{key}"
    is_of_a_table = "/" in key and not key.startswith(_OF_TIME)
    return key if is_of_a_table else f"time/{key}"


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a line of metrics: join nested tables' keys with "/"."""
    found: dict[str, Any] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": each for name, each in flat(value).items()}
        else:
            found[key] = value
    return found


def _event_file_writer(directory: Path) -> EventFileWriter:
    """Make TensorBoard's writer, looked up by the name that trackers patch to follow it."""
    from tensorboard.compat import tensorflow_stub
    from tensorboard.summary.writer import event_file_writer

    instead = {
        # Otherwise the writer imports TensorFlow, if installed, to create one file.
        "tf": tensorflow_stub,
        # Otherwise a thread writes, and a full disk shows only as its traceback.
        "_AsyncWriter": lambda records, *_: records,
    }
    names = vars(event_file_writer)
    before = {name: names[name] for name in instead if name in names}
    names.update(instead)
    try:
        return event_file_writer.EventFileWriter(str(directory))
    finally:
        names.update(before)
