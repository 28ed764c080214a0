"""What people see of a run while it goes on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TextIO

from juggler.driver.record.wording import (
    Level,
    age,
    clock,
    conclude,
    describe,
    number,
    plain,
    quantity,
    time_left,
)
from juggler.runtime.actors.logs import log_record

#: Seconds between two plain lines.
_PLAIN_SECONDS = 2.0


class Progress(Protocol):
    """Shows a run to people. All calls come from one thread."""

    def waiting(self, text: str, wall_time: float) -> None:
        """What is done before the first update, said again and again; before `start`, too.

        `wall_time` is how long the run takes already, in seconds.
        """

    def waits_no_more(self) -> None:
        """What was waited for before `start` is there, or nobody waits for it any more."""

    def start(self, config: Mapping[str, Any]) -> None:
        """The run begins; `config` is its flat configuration."""

    def update(self, line: Mapping[str, Any]) -> None:
        """A new metrics line."""

    def message(self, text: str, level: Level = "info") -> None:
        """Something that happened, in one line or many, such as a worker's traceback."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is over; `summary` is what `summary.json` holds."""


def make_progress(kind: Literal["auto", "live", "plain", "json", "off"]) -> Progress:
    """The display of that kind; "auto" is live in a terminal that can show it, one line that is
    written anew in a notebook, else plain."""
    if kind == "off":
        return SilentProgress()
    if kind == "json":
        return JsonProgress()
    if kind == "live" or (kind == "auto" and _is_capable(sys.stdout)):
        from juggler.driver.record.live_progress import LiveProgress  # rich is for those who see it

        return LiveProgress()
    if kind == "auto" and _in_notebook():
        return NotebookProgress()
    return PlainProgress()


class SilentProgress:
    """Shows nothing."""

    def waiting(self, text: str, wall_time: float) -> None:
        pass

    def waits_no_more(self) -> None:
        pass

    def start(self, config: Mapping[str, Any]) -> None:
        pass

    def update(self, line: Mapping[str, Any]) -> None:
        pass

    def message(self, text: str, level: Level = "info") -> None:
        pass

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


class PlainProgress:
    """A line of plain text about every two seconds, for log files and pipes.

    Where nobody reads any more (a closed pipe, a lost terminal), the run goes on unseen.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._due = 0.0  # in the lines' wall time
        self._config: Mapping[str, Any] = {}

    def waiting(self, text: str, wall_time: float) -> None:
        if self._is_due(wall_time):
            self._print(f"{clock(wall_time):>7}  starting: {text}")

    def waits_no_more(self) -> None:
        pass

    def start(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._print(f"training {describe(config)}")

    def update(self, line: Mapping[str, Any]) -> None:
        if self._is_due(line["wall_time"]):
            old = f" ({age(line)} old)" if age(line) else ""
            left = time_left(self._config, line)
            self._print(
                f"{clock(line['wall_time']):>7}"
                f"  return {number(line['episode_return_mean']):>7}{old}"
                f"  steps {quantity(line['env_steps_trained']):>5}"
                f"  {quantity(line['steps_per_second']):>5} steps/s"
                f"  staleness {number(line['staleness_mean']):>4}"
                f"  updates {line['updates']}"
                f"  envrunners {line['num_env_runners']}"
                + ("" if left is None else f"  {clock(left)} left")
            )

    def message(self, text: str, level: Level = "info") -> None:
        self._print(text if level == "info" else f"{level}: {text}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._print(conclude(summary))

    def _is_due(self, wall_time: float) -> bool:
        due = wall_time >= self._due
        if due:
            self._due = wall_time + _PLAIN_SECONDS
        return due

    def _print(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        text = plain(text).encode(encoding, "backslashreplace").decode(encoding)
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            # What is still in the stream's buffer has to go somewhere when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class JsonProgress(PlainProgress):
    """The same lines as JSON objects, for machines that gather logs.

    Attributes:
        ids: in every line; the driver adds those of the run.
    """

    ids: Mapping[str, str] = {"worker": "driver"}

    def message(self, text: str, level: Level = "info") -> None:
        self._write(json.dumps(log_record(plain(text), level, self.ids)))

    def _print(self, text: str) -> None:
        self.message(text)


class NotebookProgress(PlainProgress):
    """Plain progress in a notebook: the newest line replaces the one before it; messages stay."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._what = ""

    def start(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._what = f"{describe(config)}\n"

    def message(self, text: str, level: Level = "info") -> None:
        self._write(text if level == "info" else f"{level}: {text}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        # The notebook shows the run's result as a table, which says where it is.
        self._print(conclude(summary).partition("\n")[0])

    def _print(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": plain(self._what + text.strip())}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows what is displayed."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _is_capable(stream: TextIO) -> bool:
    """A terminal that can move its cursor and show the bars' characters."""
    encoding = (stream.encoding or "").lower().replace("-", "")
    return stream.isatty() and encoding == "utf8" and os.environ.get("TERM", "dumb") != "dumb"
