"""Serves a page that shows runs while they train."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from errno import EADDRINUSE
from http import HTTPStatus
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, Final
from urllib.parse import parse_qs
from wsgiref.util import FileWrapper

import grpc
import msgspec

from juggler.driver.agent_tables import LEAGUE
from juggler.driver.callbacks import Callback, MetricsLine, Run
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import LeagueState
from juggler.driver.league.ratings import elo
from juggler.driver.league.results import Payoffs
from juggler.driver.monitoring import ask_status
from juggler.driver.reporting.http_server import HttpServer
from juggler.driver.reporting.progress import EVENTS_FILE
from juggler.driver.reporting.run_directory import (
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
from juggler.driver.watching.overview import (
    RunReader,
    find_runs,
    names_of,
    read_config,
    text_of,
)
from juggler.runtime.actors.command_processes import CommandLine, CommandProcess
from juggler.runtime.actors.endpoints import EndpointError, dial, is_loopback, split_address
from juggler.runtime.actors.tls import TLS_VARIABLE, Tls
from juggler.runtime.checkpoints.checkpoint import (
    DIRECTORY,
    CheckpointError,
    newest_first,
    read_metadata,
)
from juggler.runtime.plain_files import open_plain

_MOST: Final = 60  # number of videos: the newest


@dataclass(frozen=True, slots=True)
class Video:
    """A video of a run."""

    name: str  # path within the run's directory
    written: float  # in seconds since 1970
    size: int  # in bytes


def find_videos(run_dir: Path) -> list[Video]:
    """Return the newest videos of a run, the newest first."""
    found = []
    with suppress(OSError):  # a directory may be deleted meanwhile
        for path in run_dir.rglob("*.mp4"):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode):
                name = str(path.relative_to(run_dir))
                found.append(Video(name, about.st_mtime, about.st_size))
    return sorted(found, key=lambda video: (-video.written, video.name))[:_MOST]


_MOST_PLAYERS: Final = 40  # in the matrix: learning players, then the newest frozen ones


def league_matrix(checkpoint: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return players and win rates between them.

    Returns:
        For JSON: `players`; `win_rates` and `games`, of the row against the column, null without
        games; and `min_games`, from which on a win rate counts. {} without a league.
    """
    state = read_metadata(checkpoint).get("counters", {}).get(LEAGUE)
    if state is None:
        return {}
    try:
        league = msgspec.convert(state, LeagueState)
    except msgspec.ValidationError as error:
        raise CheckpointError(checkpoint, f"its league is damaged: {error}") from error
    players = [each for each in league.players if each.plays]
    learning = [each for each in players if each.learning][:_MOST_PLAYERS]
    others = deque((each for each in players if not each.learning), _MOST_PLAYERS - len(learning))
    shown = [*learning, *others]
    # Ratings are of all players, even of players without room in the matrix.
    payoffs = Payoffs(1.0, 1, league.pairs, league.kinds, league.means)
    ratings = elo(payoffs, [each.player_id for each in players])
    ids = [each.player_id for each in shown]
    return {
        "checkpoint": checkpoint.name,
        "min_games": table.get("min_games", LeagueConfig.min_games),
        # The matrix is cut, and the page says by how much.
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
    points, played = payoffs.points(player, [other])
    return round(points / played, 4) if played else None


MOST_POINTS: Final = 1200  # above this number, every second point is removed
_MOST_KEYS: Final = 400  # columns of a run, which may have thousands of infos
#: Numbers of a line that the page draws, by their flat keys.
_DRAWN: Final = re.compile(
    rf"{STEPS}|{TIME}|env_steps_trained|(episode|evaluation)_return_mean|staleness_(mean|max)|"
    r"(modules|custom)/.+|by_(module|agent)/.+/episode_return_mean|league/learning/.+/elo|"
    r"info/.+/mean"
)


class Curves:
    """The curves of one run, read from its metrics file."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / METRICS_FILE)
        self._edition = -1  # incremented whenever earlier points change
        self._restart()

    def _restart(self) -> None:
        # The newest line of metrics, in full; {} before the first one
        self.newest: dict[str, Any] = {}
        self._course = MetricsCourse()
        self._every, self._skipped = 1, 0  # lines per point, and lines since the last point
        self._keys = dict.fromkeys((STEPS, TIME))
        self._edition += 1

    def read(self) -> None:
        """Read new lines."""
        for text in self._file.new_lines(self._restart):
            if (line := parse_line(text)) is None:
                self._course.broken += bool(text.strip())
                continue
            self.newest = line
            self._skipped += 1
            points = self._course.lines
            if self._skipped >= self._every or (points and line[STEPS] < points[-1][STEPS]):
                self._add(_point(line))

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
        # Infos come last, because they may be too many.
        for key in sorted(point, key=lambda key: key.startswith("info/")):
            if key not in self._keys and len(self._keys) < _MOST_KEYS:
                self._keys[key] = None
                self._edition += bool(course.lines)  # earlier rows have no such column
        course.add({key: point[key] for key in self._keys if key in point})
        if len(course.lines) > MOST_POINTS:
            course.lines[:] = course.lines[::2]
            self._every *= 2
            self._edition += 1
        self._edition += course.taken_back > taken_back


def _point(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line that are drawn."""
    point: dict[str, float] = {"env_steps_dropped": 0}
    for key, each in flat(line).items():
        if (value := _finite(each)) is None:
            continue
        if key.startswith("env_steps_dropped/"):
            point["env_steps_dropped"] += value
        elif _DRAWN.fullmatch(key):
            point[key.replace("league/learning/", "league/", 1)] = value
    return point


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
_EVENT_KEYS: Final = ("time", "level", "message")
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
        self._status: dict[str, Any] | None = None
        self._asked = float("-inf")
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
        """Return everything that the page shows except the curves."""
        with self._lock:
            self._read_events()
            summary, _ = last_summary(self._run_dir)
            state = state_of(self._run_dir, summary)
            config, _ = read_config(self._run_dir)
            # These take a walk through the directory and a checkpoint's metadata.
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
                "videos": [asdict(each) for each in self._videos],
            }

    def open_video(self, name: str) -> BinaryIO:
        """Open a video of the last reading, unless it is a link."""
        with self._lock:
            names = {each.name for each in self._videos}
        if name not in names:
            raise HttpError(HTTPStatus.NOT_FOUND, "this video no longer exists")
        path = self._run_dir.resolve() / name
        try:
            if path.resolve() != path:
                raise OSError(errno.ELOOP, "it is a link")
            return open_plain(path)
        except OSError as error:
            why = text_of(f"cannot read {name}: {error.strerror}")
            raise HttpError(HTTPStatus.NOT_FOUND, why) from error

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
            for text in self._events_file.new_lines(self._events.clear):
                with suppress(ValueError, RecursionError):
                    if isinstance(event := json.loads(text), dict):
                        shown = {key: str(event.get(key, ""))[:_LONG_TEXT] for key in _EVENT_KEYS}
                        self._events.append(shown)

    def _read_league(self, config: dict[str, Any]) -> None:
        table = config.get("league")
        with suppress(Exception):  # a later checkpoint may be good
            if isinstance(table, dict) and table:
                self._league = league_matrix(newest_first(self._run_dir / DIRECTORY)[0], table)

    def _ask(self) -> dict[str, Any] | None:
        """Ask the driver for its status; None: no answer."""
        if time.monotonic() - self._asked < _STATUS_SECONDS:
            return self._status
        self._status = None
        with suppress(RunDirectoryError, grpc.RpcError):
            if (address := find_driver(self._run_dir)).startswith("unix:"):
                with dial(address) as channel:
                    status = ask_status(channel, _ANSWER_SECONDS)
                del status["log_messages"], status["metrics"]  # these are read from files
                self._status = status
        self._asked = time.monotonic()
        return self._status


_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = [
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; media-src blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
]
_OVERVIEW_SECONDS: Final = 1.0  # between two readings of all runs, for all viewers together
_SHARE: Final = 0.1  # maximum share of the time for these readings
_MOST_WATCHED: Final = 24  # runs whose curves are kept
_MOST_QUERY: Final = 2000  # characters
_PIECE: Final = 1 << 18  # bytes of a video sent at once
_MOST_VIDEO: Final = 1 << 28  # bytes, since a browser keeps the whole video in memory

StartResponse = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class HttpError(Exception):
    """An HTTP error: a status and a message."""

    status: HTTPStatus
    why: str


class PageApplication:
    """Answers the requests of the page, in any thread."""

    def __init__(self, directories: list[Path], *, named: bool) -> None:
        self._directories, self._named = directories, named
        # Served without the token, because they have nothing of any run
        self.files = page_files()
        self._lock = threading.Lock()
        self._readers: dict[str, RunReader] = {}  # by run id
        self._watched: dict[str, WatchedRun] = {}  # the most recently requested is last
        self._overview: dict[str, Any] = {}
        self._next_read = float("-inf")

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        is_head = environ.get("REQUEST_METHOD") == "HEAD"
        try:
            kind, size, content = self._answer(environ)
            status = HTTPStatus.OK
        except Exception as error:  # a damaged directory must still get an answer
            refused = error if isinstance(error, HttpError) else _broken(error)
            content = [(json.dumps({"error": refused.why}) + "\n").encode()]
            status, kind, size = refused.status, "application/json", len(content[0])
        headers = [("Content-Type", kind), ("Content-Length", str(size)), *_HEADERS]
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET, HEAD"))
        start_response(f"{status.value} {status.phrase}", headers)
        return [] if is_head else content

    def _answer(self, environ: dict[str, Any]) -> tuple[str, int, Iterable[bytes]]:
        """Return content type, size and content."""
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are allowed")
        # Only these names are served: no path of a request reaches the disk.
        path = str(environ.get("PATH_INFO", ""))
        if path in self.files:
            kind, content = self.files[path]
            return kind, len(content), [content]
        if len(text := str(environ.get("QUERY_STRING", ""))) > _MOST_QUERY:
            raise HttpError(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
        try:
            # Fields that this version does not know are ignored.
            query = {key: values[0] for key, values in parse_qs(text, max_num_fields=8).items()}
        except ValueError:
            raise HttpError(HTTPStatus.BAD_REQUEST, "the query has too many fields") from None
        match path:
            case "/api/runs":
                return _as_json(self._runs())
            case "/api/run":
                return _as_json(self._run(query))
            case "/api/video":
                return self._video(query)
        raise HttpError(HTTPStatus.NOT_FOUND, "there is no such page")

    def _runs(self) -> dict[str, Any]:
        with self._lock:
            if (before := time.monotonic()) >= self._next_read:
                self._overview = self._read_runs()
                after = time.monotonic()
                self._next_read = after + max(_OVERVIEW_SECONDS, (after - before) / _SHARE)
            return self._overview

    def _read_runs(self) -> dict[str, Any]:
        problems, run_dirs = [], []
        for directory in self._directories:
            try:
                run_dirs += [each for each in find_runs([directory]) if each not in run_dirs]
            except RunDirectoryError as error:
                problems.append(str(error))
        # Readers are kept: each reads only what its run has written since.
        self._readers = {
            (run_id := _id_of(run_dir)): self._readers.get(run_id) or RunReader(run_dir, name)
            for run_dir, name in zip(run_dirs, names_of(run_dirs), strict=True)
        }
        runs = [
            {"id": run_id, **msgspec.to_builtins(reader.read())}
            for run_id, reader in self._readers.items()
        ]
        return {
            "directories": [text_of(each) for each in self._directories],
            "named": self._named,
            "problem": text_of("; ".join(problems)),
            "runs": runs,
        }

    def _run(self, query: dict[str, str]) -> dict[str, Any]:
        watched = self._watched_run(query.get("id", ""))
        answer = watched.curves(query.get("seen", "")[:64])
        return answer | (watched.detail() if query.get("detail") == "1" else {})

    def _watched_run(self, run_id: str) -> WatchedRun:
        """Return a run by its id, or raise `HttpError`."""
        if run_id not in self._readers:
            self._runs()
        with self._lock:
            if (reader := self._readers.get(run_id)) is None:
                raise HttpError(HTTPStatus.NOT_FOUND, "this run no longer exists")
            watched = self._watched.pop(run_id, None) or WatchedRun(reader.run_dir)
            self._watched[run_id] = watched
            if len(self._watched) > _MOST_WATCHED:
                self._watched.pop(next(iter(self._watched)))
        return watched

    def _video(self, query: dict[str, str]) -> tuple[str, int, Iterable[bytes]]:
        file = self._watched_run(query.get("id", "")).open_video(query.get("video", ""))
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_VIDEO:
            file.close()
            raise HttpError(HTTPStatus.NOT_FOUND, "the video is too large to be shown here")
        return "video/mp4", size, FileWrapper(file, _PIECE)


def _broken(error: Exception) -> HttpError:
    why = text_of(f"the run cannot be read: {type(error).__name__}: {error}")
    return HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, why)


def _as_json(value: Any) -> tuple[str, int, Iterable[bytes]]:
    content = msgspec.json.encode(value)  # infinity becomes null
    return "application/json", len(content), [content]


def _id_of(run_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]


def page_files() -> dict[str, tuple[str, bytes]]:
    """Read the page's files: types and contents by the paths of requests."""
    files = (Path(__file__).parent / "page").iterdir()
    kinds = {each: _KINDS[each.suffix] for each in files if each.suffix in _KINDS}
    found = {f"/{each.name}": (kind, each.read_bytes()) for each, kind in kinds.items()}
    return {"/": found.pop("/index.html"), **found}


#: Default port of the page; if it is taken, the next free one.
DEFAULT_BIND: Final = "127.0.0.1:7070"
_MORE_PORTS: Final = 20


@contextmanager
def serve_page(
    directories: list[Path],
    bind: str | None = None,
    *,
    named: bool = False,
    token: str = "",
    tls: Tls | None = None,
    insecure: bool = False,
) -> Iterator[str]:
    """Serve the page, and yield its address.

    Raises:
        EndpointError: the address cannot be bound, or needs TLS and a token.
    """
    host, port = split_address(bind or DEFAULT_BIND)
    is_here = is_loopback(host)
    if not is_here and not (token and (tls or insecure)):
        missing = "nothing would be encrypted" if token else "there is no token to ask for"
        raise EndpointError(
            f"refusing to serve the page on {bind}: other machines could read it, and {missing}. "
            "Give --tls and a token, as `juggler certs` makes both; or --insecure and --token-file "
            "on a network that you trust; or bind to 127.0.0.1, and view it from elsewhere through "
            f"`ssh -L {port or 7070}:127.0.0.1:{port or 7070} HOST`"
        )
    application = PageApplication(directories, named=named)
    # With port 0 at the end: there is always a free one.
    ports = [port] if bind else [*range(port, port + _MORE_PORTS), 0]
    server = _bound(host, ports, application, token, tls)
    shown = f"[{host}]" if ":" in host else host
    with server.serving("page"):
        yield f"{'https' if tls else 'http'}://{shown}:{server.server_port}/"


def _bound(
    host: str, ports: list[int], application: PageApplication, token: str, tls: Tls | None
) -> HttpServer:
    """Bind the first of these ports that is free."""
    # Browsers have no certificate of the run, and a token is what admits them.
    how: dict[str, Any] = {"mutual": False, "open_paths": [*application.files]}
    for port in ports:
        try:
            return HttpServer(host, port, application, token, tls, any_host=bool(token), **how)
        except OSError as error:
            if error.errno != EADDRINUSE or port == ports[-1]:
                raise EndpointError(
                    f"cannot serve the page on {host}:{port}: {error.strerror or error}. Choose "
                    "another --bind, or leave it out for a free port"
                ) from error
    raise AssertionError("the last port raises above")


_NICER = "5"  # lower priority than the run
_ADDRESS = re.compile(r"https?://\S+/(, which asks for the token)?")


class PageProcess(Callback):
    """Runs `juggler watch` for a run; the run continues if it fails."""

    def __init__(self) -> None:
        self._process: CommandProcess | None = None
        self._output = NamedTemporaryFile(prefix="juggler-page-")  # noqa: SIM115  # deleted with this
        self._address_shown = False

    def on_start(self, run: Run) -> None:
        # The same import path as this process; and HTTP, since only this host is served.
        path = os.pathsep.join(filter(None, sys.path))
        environment = {"PYTHONPATH": path, TLS_VARIABLE: None}
        python = ["nice", "-n", _NICER, sys.executable, "-P", "-m"]
        words = [*python, "juggler", "watch", str(run.run_dir)]
        try:
            self._process = CommandLine(words, Path(self._output.name), environment).start()
        except OSError as error:
            run.message(f"the page cannot be served: {error}", "warning")

    def on_metrics(self, run: Run, metrics: MetricsLine) -> None:
        if self._process is None:
            return
        is_alive, said = self._process.is_alive(), self._process.last_lines()
        if not self._address_shown and (found := _ADDRESS.search(said)):
            self._address_shown = True
            run.message(f"page: {found[0]}")
        if not is_alive:
            run.message(f"the page is no longer served: {said}", "warning")
            self._process = None

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
