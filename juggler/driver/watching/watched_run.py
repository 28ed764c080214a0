"""One run as a page shows it: read from its directory, and asked of its driver if it goes on."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc

from juggler.driver.asking import ask_status, to_plain
from juggler.driver.record.driver_file import find_driver
from juggler.driver.record.journal import EVENTS_FILE
from juggler.driver.record.line_file import LineFile
from juggler.driver.record.run_directory import METRICS_FILE, RunDirectoryError
from juggler.driver.record.run_state import last_summary, state_of
from juggler.driver.watching.curves import Curves
from juggler.driver.watching.league_matrix import league_matrix
from juggler.driver.watching.overview import is_checkpoint, read_config
from juggler.driver.watching.presentable import plain_of, text_of
from juggler.driver.watching.videos import Video, find_videos
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.checkpoints.checkpoint import DIRECTORY

_MOST_EVENTS: Final = 200
_LONG_TEXT: Final = 2000  # characters of an event
_STATUS_SECONDS: Final = 1.0  # between two questions to a driver, whoever asks
_ANSWER_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 5.0  # between two looks for what changes seldom


class WatchedRun:
    """For any thread; one at a time reads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._curves = Curves(run_dir)
        self._events_file = LineFile(run_dir / EVENTS_FILE)
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._channel: grpc.Channel | None = None
        self._status: dict[str, Any] | None = None
        self._asked = float("-inf")
        self._league_of: tuple[str, float] | None = None  # name and time of a checkpoint
        self._league: dict[str, Any] = {}
        self._videos: tuple[Video, ...] = ()
        self._looked = float("-inf")

    def curves(self, seen: str) -> dict[str, Any]:
        """What is drawn of its metrics, beyond what somebody has seen; see `Curves.since`."""
        with self._lock:
            problem = self._read_metrics()
            return {
                "curves": self._curves.since(seen),
                "broken": self._curves.broken,
                "problem": problem,
            }

    def detail(self) -> dict[str, Any]:
        """All else."""
        with self._lock:
            self._read_events()
            summary, _ = last_summary(self._run_dir)
            state = state_of(self._run_dir, summary)
            config, _ = read_config(self._run_dir)
            if time.monotonic() - self._looked >= _LOOK_SECONDS:
                self._looked = time.monotonic()
                self._videos = tuple(find_videos(self._run_dir))
                self._read_league(config)
            return {
                "state": state,
                "config": plain_of(config),
                "newest": plain_of(self._curves.newest),
                "summary": plain_of(summary),
                "events": plain_of(list(self._events)),
                "status": self._ask() if state == "running" else None,
                "league": plain_of(self._league),
                "videos": plain_of([each.told() for each in self._videos]),
            }

    def video(self, video_id: str) -> Video | None:
        """One of those that it was told to have."""
        with self._lock:
            return next((each for each in self._videos if each.video_id == video_id), None)

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _read_metrics(self) -> str:
        try:
            self._curves.read()
        except FileNotFoundError:
            return text_of(f"there is no {METRICS_FILE} in {self._run_dir}")
        except OSError as error:
            return text_of(f"cannot read {self._run_dir / METRICS_FILE}: {error.strerror}")
        return ""

    def _read_events(self) -> None:
        with suppress(OSError):  # it has said nothing yet
            if self._events_file.begins_anew():
                self._events.clear()
            for text in self._events_file.new_lines():
                self._take_event(text)

    def _take_event(self, text: bytes) -> None:
        with suppress(ValueError, RecursionError):
            event = json.loads(text)
            if isinstance(event, dict):
                keys = ("time", "level", "message")
                self._events.append({key: str(event.get(key, ""))[:_LONG_TEXT] for key in keys})

    def _read_league(self, config: dict[str, Any]) -> None:
        table = config.get("league")
        if not isinstance(table, dict) or not table:
            return
        directory = self._run_dir / DIRECTORY
        with suppress(Exception):  # a later checkpoint may be good
            newest = max(
                (each for each in directory.iterdir() if is_checkpoint(each.name)),
                key=lambda path: path.stat().st_mtime,
            )
            place = (newest.name, newest.stat().st_mtime)
            if place != self._league_of:
                self._league_of = place
                self._league = league_matrix(newest, table)

    def _ask(self) -> dict[str, Any] | None:
        """The status that the driver gives; None: it gives none."""
        if time.monotonic() - self._asked < _STATUS_SECONDS:
            return self._status
        try:
            address = find_driver(self._run_dir)
            if not address.startswith("unix:"):
                return None
            if self._channel is None:
                self._channel = dial(address)
            status = to_plain(ask_status(self._channel, _ANSWER_SECONDS))
            del status["log_messages"]  # which are events
            self._status = status
        except (RunDirectoryError, grpc.RpcError):
            self._hang_up()
        self._asked = time.monotonic()
        return self._status

    def _hang_up(self) -> None:
        channel, self._channel, self._status = self._channel, None, None
        if channel is not None:
            channel.close()
