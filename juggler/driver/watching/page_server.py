"""Serves the page about runs, also beside a run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from errno import EADDRINUSE
from http import HTTPStatus
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from juggler.driver.callbacks import Callback, MetricsLine, Run
from juggler.driver.record.http_server import HttpServer
from juggler.driver.record.run_directory import RunDirectoryError
from juggler.driver.watching.overview import RunReader, find_runs, names_of, text_of, to_plain
from juggler.driver.watching.watched_run import WatchedRun
from juggler.runtime.actors.command_processes import CommandLine, CommandProcess
from juggler.runtime.actors.endpoints import EndpointError, is_loopback, split_address
from juggler.runtime.actors.tls import TLS_VARIABLE, Tls

_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("page", "charts", "curves", "details", "server", "words")
    },
}
#: Served without the token: contains nothing of any run.
OPEN_PATHS: Final = frozenset(_FILES)

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
    """Answers the requests of the page, in any thread.

    Args:
        named: the page starts with the given runs; otherwise with the newest run.
    """

    def __init__(self, directories: list[Path], *, named: bool) -> None:
        self._directories, self._named = directories, named
        self._files = _files()
        self._lock = threading.Lock()
        self._run_dirs: dict[str, Path] = {}  # by id
        self._overseers: dict[str, RunReader] = {}
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

    def close(self) -> None:
        for watched in self._watched.values():
            watched.close()

    def _answer(self, environ: dict[str, Any]) -> tuple[str, int, Iterable[bytes]]:
        """Return content type, size and content."""
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are allowed")
        path = str(environ.get("PATH_INFO", ""))
        if path in self._files:
            kind, content = self._files[path]
            return kind, len(content), [content]
        if len(text := str(environ.get("QUERY_STRING", ""))) > _MOST_QUERY:
            raise HttpError(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
        try:
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
        self._run_dirs = {_id_of(each): each for each in run_dirs}
        names = dict(zip(self._run_dirs, names_of(run_dirs), strict=True))
        self._overseers = {
            run_id: self._overseers.get(run_id) or RunReader(run_dir, names[run_id])
            for run_id, run_dir in self._run_dirs.items()
        }
        runs = [
            {"id": run_id, **to_plain(reader.read())} for run_id, reader in self._overseers.items()
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
        if run_id not in self._run_dirs:
            self._runs()
        with self._lock:
            if (run_dir := self._run_dirs.get(run_id)) is None:
                raise HttpError(HTTPStatus.NOT_FOUND, "this run no longer exists")
            watched = self._watched.pop(run_id, None) or WatchedRun(run_dir)
            self._watched[run_id] = watched
            if len(self._watched) > _MOST_WATCHED:
                self._watched.pop(next(iter(self._watched))).close()
        return watched

    def _video(self, query: dict[str, str]) -> tuple[str, int, Iterable[bytes]]:
        video = self._watched_run(query.get("id", "")).video(query.get("video", ""))
        if video is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "this video no longer exists")
        try:
            file = video.open()
        except OSError as error:
            why = text_of(f"cannot read {video.name}: {error.strerror}")
            raise HttpError(HTTPStatus.NOT_FOUND, why) from error
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_VIDEO:
            file.close()
            raise HttpError(HTTPStatus.NOT_FOUND, f"{video.name} is too large to be shown here")
        return "video/mp4", size, _pieces(file, size)


def _broken(error: Exception) -> HttpError:
    why = text_of(f"the run cannot be read: {type(error).__name__}: {error}")
    return HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, why)


def _pieces(file: Any, size: int) -> Iterator[bytes]:
    with file:
        while size > 0 and (piece := file.read(min(_PIECE, size))):
            size -= len(piece)
            yield piece


def _as_json(value: Any) -> tuple[str, int, Iterable[bytes]]:
    content = msgspec.json.encode(value)  # infinity becomes null
    return "application/json", len(content), [content]


def _id_of(run_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]


def _files() -> dict[str, tuple[str, bytes]]:
    directory = Path(__file__).parent / "page"
    return {path: (kind, (directory / name).read_bytes()) for path, (name, kind) in _FILES.items()}


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

    Args:
        bind: "host:port"; None: only this host, at a free port.
        token: the token that the page asks for; "": none.
        tls: of this host; None: plain HTTP.
        insecure: allow other machines to read it without TLS.

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
    ports = [port] if bind else [*range(port, port + _MORE_PORTS), 0]
    server = _bound(host, ports, application, token, tls)
    shown = f"[{host}]" if ":" in host else host
    with closing(application), server.serving("page"):
        yield f"{'https' if tls else 'http'}://{shown}:{server.server_port}/"


def _bound(
    host: str, ports: list[int], application: PageApplication, token: str, tls: Tls | None
) -> HttpServer:
    """Bind the first of these ports that is free."""
    for port in ports:
        try:
            return HttpServer(
                host,
                port,
                application,
                token,
                tls,
                mutual=False,
                open_paths=OPEN_PATHS,
                any_host=bool(token),
            )
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
