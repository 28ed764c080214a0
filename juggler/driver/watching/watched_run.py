"""Reads a run for its page, from its directory and its driver."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import grpc
import msgspec

from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import LeagueState
from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.ratings import elo
from juggler.driver.league_players import LEAGUE
from juggler.driver.monitoring import ask_status, to_plain
from juggler.driver.record.progress import EVENTS_FILE
from juggler.driver.record.run_directory import (
    METRICS_FILE,
    STEPS,
    TIME,
    LineFile,
    MetricsCourse,
    RunDirectoryError,
    find_driver,
    flat,
    last_summary,
    number,
    parse_line,
    state_of,
)
from juggler.driver.watching.overview import is_checkpoint, read_config, text_of
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.checkpoints.checkpoint import DIRECTORY, CheckpointError, read_record
from juggler.runtime.plain_files import open_plain

_SUFFIX: Final = ".mp4"
_MOST: Final = 60  # number of videos: the newest


@dataclass(frozen=True, slots=True)
class Video:
    """A video of a run."""

    video_id: str  # its id in requests, which never contain paths
    run_dir: Path
    name: str  # path within the run's directory
    written: float  # in seconds since 1970
    size: int  # in bytes

    def open(self) -> BinaryIO:
        """Open the video, unless its path has become a link."""
        path = self.run_dir.resolve() / self.name
        if path.resolve() != path:
            raise OSError(errno.ELOOP, "it is a link")
        return open_plain(path)

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        return {"id": self.video_id, "name": self.name, "written": self.written, "size": self.size}


def find_videos(run_dir: Path) -> list[Video]:
    """Return the newest videos of a run, the newest first."""
    found = []
    walked = os.walk(run_dir)  # without linked directories
    paths = (Path(directory, name) for directory, _, files in walked for name in files)
    for path in (each for each in paths if each.suffix == _SUFFIX):
        with suppress(OSError):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode):
                name = str(path.relative_to(run_dir))
                video_id = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:16]
                found.append(Video(video_id, run_dir, name, about.st_mtime, about.st_size))
    return sorted(found, key=lambda video: (-video.written, video.name))[:_MOST]


_MOST_PLAYERS: Final = 40  # in the matrix: learning players, then the newest frozen ones


def league_matrix(checkpoint: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return players and win rates between them.

    Returns:
        For JSON: `players`; `win_rates` and `games`, of the row against the column, null without
        games; and `min_games`, from which on a win rate counts. {} without a league.
    """
    state = read_record(checkpoint).get("counters", {}).get(LEAGUE)
    if state is None:
        return {}
    try:
        league = msgspec.convert(state, LeagueState)
    except msgspec.ValidationError as error:
        raise CheckpointError(checkpoint, f"its league is damaged: {error}") from error
    players = [each for each in league.players if each.plays]
    others = [each for each in players if not each.learning]
    learning = [each for each in players if each.learning][:_MOST_PLAYERS]
    room = max(0, _MOST_PLAYERS - len(learning))
    shown = [*learning, *others[len(others) - min(room, len(others)) :]]
    payoffs = Payoffs(1.0, 1, league.pairs, league.kinds, league.means)
    ratings = elo(payoffs, [each.player_id for each in players])
    ids = [each.player_id for each in shown]
    return {
        "checkpoint": checkpoint.name,
        "min_games": table.get("min_games", LeagueConfig.min_games),
        "left_out": len(players) - len(shown),
        "players": [
            {
                "id": each.player_id,
                "role": each.role,
                "learning": each.learning,
                "parent": each.parent,
                "steps": each.steps if each.learning else each.born_at,
                "elo": round(ratings[each.player_id], 1),
            }
            for each in shown
        ],
        "win_rates": [[_rate(payoffs, row, column) for column in ids] for row in ids],
        "games": [[payoffs.games(row, column) for column in ids] for row in ids],
    }


def _rate(payoffs: Payoffs, player: str, other: str) -> float | None:
    wins, draws, losses = payoffs.counts(player, other) if player != other else (0.0, 0.0, 0.0)
    played = wins + draws + losses
    return round((wins + draws / 2) / played, 4) if played else None


#: Above this number, every second point is removed.
MOST_POINTS: Final = 1200
_MOST_KEYS: Final = 400  # of a line
_MOST_NAMES: Final = 32  # modules, agents, players
_MOST_NUMBERS: Final = 128  # in infos, of all agents

_ALONE: Final = (
    STEPS,
    TIME,
    "env_steps_trained",
    "episode_return_mean",
    "evaluation_return_mean",
    "staleness_mean",
    "staleness_max",
)


class Curves:
    """The curves of one run, read from its metrics file.

    Attributes:
        newest: the newest line of metrics, in full; {} before the first one.
    """

    def __init__(self, run_dir: Path) -> None:
        self.newest: dict[str, Any] = {}
        self._file = LineFile(run_dir / METRICS_FILE)
        self._course = MetricsCourse()
        self._every, self._skipped = 1, 0  # lines per point, and lines since the last point
        # Incremented whenever earlier points change.
        self._edition = 0
        self._keys: dict[str, None] = {}

    def read(self) -> None:
        """Read new lines."""
        if self._file.was_replaced():
            self._restart()
        for text in self._file.new_lines():
            if (line := parse_line(text)) is None:
                self._course.broken += bool(text.strip())
                continue
            self.newest = line
            self._skipped += 1
            if self._skipped >= self._every or line[STEPS] < self._newest_steps():
                self._add(dict(_points(line)))

    @property
    def broken(self) -> int:
        """Number of lines of the file that are not metrics."""
        return self._course.broken

    def since(self, seen: str) -> dict[str, Any]:
        """Return the points that a viewer has not seen.

        Args:
            seen: the `seen` of the viewer's last answer; "": nothing.

        Returns:
            For JSON: `seen` for the next call, `keys`, `rows` of numbers in that order, and `all`:
            whether these points replace the viewer's earlier ones.
        """
        lines = self._course.lines
        edition, _, count = seen.partition(".")
        is_known = edition == str(self._edition) and count.isdecimal() and int(count) <= len(lines)
        first = int(count) if is_known else 0
        keys = list(self._keys)
        return {
            "seen": f"{self._edition}.{len(lines)}",
            "all": first == 0,
            "keys": [text_of(key) for key in keys],
            "rows": [[line.get(key) for key in keys] for line in lines[first:]],
        }

    def _add(self, point: dict[str, Any]) -> None:
        course, self._skipped = self._course, 0
        taken_back = course.taken_back
        course.add(point)
        for key in point:
            if key not in self._keys and len(self._keys) < _MOST_KEYS:
                self._keys[key] = None
                self._edition += len(course.lines) > 1  # earlier rows have no such column
        if len(course.lines) > MOST_POINTS:
            course.lines[:] = course.lines[::2]
            self._every *= 2
            self._edition += 1
        self._edition += course.taken_back > taken_back

    def _newest_steps(self) -> float:
        lines = self._course.lines
        return number(lines[-1][STEPS]) if lines else 0.0

    def _restart(self) -> None:
        self.newest = {}
        self._course, self._every, self._skipped = MetricsCourse(), 1, 0
        self._keys, self._edition = {}, self._edition + 1


def _points(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the points of a line."""
    for key in _ALONE:
        if (value := _finite(line.get(key))) is not None:
            yield key, value
    yield "env_steps_dropped", sum(_numbers(_table(line, "env_steps_dropped")).values())
    for table, wanted, most in (
        ("modules", None, _MOST_NAMES),
        ("by_module", "episode_return_mean", _MOST_NAMES),
        ("by_agent", "episode_return_mean", _MOST_NAMES),
        ("info", "mean", _MOST_NUMBERS),
    ):
        for name, values in list(_table(line, table).items())[:most]:
            for key, value in _numbers(values).items():
                if wanted in (None, key):
                    yield f"{table}/{name}/{key}", value
    for key, value in list(_numbers(line.get("custom")).items())[:_MOST_NUMBERS]:
        yield f"custom/{key}", value
    for name, values in list(_table(_table(line, "league"), "learning").items())[:_MOST_NAMES]:
        if (value := _numbers(values).get("elo")) is not None:
            yield f"league/{name}/elo", value


def _table(line: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = line.get(key)
    return found if isinstance(found, Mapping) else {}


def _numbers(table: Any) -> dict[str, float]:
    plain = flat(table) if isinstance(table, Mapping) else {}
    return {key: found for key, each in plain.items() if (found := _finite(each)) is not None}


def _finite(value: Any) -> float | None:
    """Return a finite number with the digits that are drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    found = number(value)
    if found != found:
        return None
    return int(found) if found.is_integer() and abs(found) < 1e15 else float(f"{found:.6g}")


_MOST_EVENTS: Final = 200
_LONG_TEXT: Final = 2000  # characters of an event
_STATUS_SECONDS: Final = 1.0  # between two requests to a driver, for all viewers together
_ANSWER_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 5.0  # between two readings of what seldom changes


class WatchedRun:
    """One run as the page shows it; thread-safe."""

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
        """Return the points that a viewer has not seen."""
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
                "config": config,
                "newest": self._curves.newest,
                "summary": summary,
                "events": list(self._events),
                "status": self._ask() if state == "running" else None,
                "league": self._league,
                "videos": [each.to_json() for each in self._videos],
            }

    def video(self, video_id: str) -> Video | None:
        """Return a video of the last reading by its id."""
        with self._lock:
            return next((each for each in self._videos if each.video_id == video_id), None)

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _read_metrics(self) -> str:
        try:
            self._curves.read()
        except FileNotFoundError:
            return text_of(f"there is no {METRICS_FILE} in {self._run_dir}")
        except OSError as error:
            return text_of(f"cannot read {self._run_dir / METRICS_FILE}: {error.strerror}")
        return ""

    def _read_events(self) -> None:
        with suppress(OSError):  # the run has no messages yet
            if self._events_file.was_replaced():
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
        """Ask the driver for its status; None: no answer."""
        if time.monotonic() - self._asked < _STATUS_SECONDS:
            return self._status
        try:
            address = find_driver(self._run_dir)
            if not address.startswith("unix:"):
                return None
            if self._channel is None:
                self._channel = dial(address)
            status = to_plain(ask_status(self._channel, _ANSWER_SECONDS))
            del status["log_messages"]  # these are events
            self._status = status
        except (RunDirectoryError, grpc.RpcError):
            self._disconnect()
        self._asked = time.monotonic()
        return self._status

    def _disconnect(self) -> None:
        channel, self._channel, self._status = self._channel, None, None
        if channel is not None:
            channel.close()
