"""Serves the page."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EADDRINUSE
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from juggler.driver.record.http_server import HttpServer
from juggler.driver.record.run_directory import RunDirectoryError
from juggler.driver.watching.overview import Overseer, find_runs, names_of, to_plain
from juggler.driver.watching.presentable import text_of
from juggler.driver.watching.watched_run import WatchedRun
from juggler.runtime.actors.endpoints import EndpointError, is_loopback, split_address
from juggler.runtime.actors.tls import Tls

_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("page", "charts", "curves", "details", "server", "words")
    },
}
#: What is served without the token: it says nothing of any run.
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
_OVERVIEW_SECONDS: Final = 1.0  # between two looks at all runs, whoever asks
_SHARE: Final = 0.1  # of the time, that these may take
_MOST_WATCHED: Final = 24  # runs whose curves are kept
_MOST_QUERY: Final = 2000  # characters
_PIECE: Final = 1 << 18  # bytes of a video at once
_MOST_VIDEO: Final = 1 << 28  # bytes, since a browser holds all of it

StartResponse = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Refused(Exception):
    """An answer that is none."""

    status: HTTPStatus
    why: str


class PageApplication:
    """Answers each request. For any thread.

    Args:
        directories: of runs, or runs.
        named: the runs to begin with are those that are named; else the newest one.
    """

    def __init__(self, directories: list[Path], *, named: bool) -> None:
        self._directories, self._named = directories, named
        self._files = _files()
        self._lock = threading.Lock()
        self._run_dirs: dict[str, Path] = {}  # by id
        self._overseers: dict[str, Overseer] = {}
        self._watched: dict[str, WatchedRun] = {}  # the one that was asked for last is last
        self._overview: dict[str, Any] = {}
        self._next_look = float("-inf")

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        is_head = environ.get("REQUEST_METHOD") == "HEAD"
        try:
            kind, size, content = self._answer(environ)
            status = HTTPStatus.OK
        except Exception as error:  # a damaged directory must still get an answer
            refused = error if isinstance(error, Refused) else _broken(error)
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
        """The kind of the content, its size, and the content.

        Raises:
            Refused: there is nothing to answer with.
        """
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
        path = str(environ.get("PATH_INFO", ""))
        if path in self._files:
            kind, content = self._files[path]
            return kind, len(content), [content]
        if len(text := str(environ.get("QUERY_STRING", ""))) > _MOST_QUERY:
            raise Refused(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
        try:
            query = {key: values[0] for key, values in parse_qs(text, max_num_fields=8).items()}
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST, "the query has too many fields") from None
        match path:
            case "/api/runs":
                return _as_json(self._runs())
            case "/api/run":
                return _as_json(self._run(query))
            case "/api/video":
                return self._video(query)
        raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def _runs(self) -> dict[str, Any]:
        with self._lock:
            if (before := time.monotonic()) >= self._next_look:
                self._overview = self._look()
                after = time.monotonic()
                self._next_look = after + max(_OVERVIEW_SECONDS, (after - before) / _SHARE)
            return self._overview

    def _look(self) -> dict[str, Any]:
        problems, run_dirs = [], []
        for directory in self._directories:
            try:
                run_dirs += [each for each in find_runs([directory]) if each not in run_dirs]
            except RunDirectoryError as error:
                problems.append(str(error))
        self._run_dirs = {_id_of(each): each for each in run_dirs}
        names = dict(zip(self._run_dirs, names_of(run_dirs), strict=True))
        self._overseers = {
            run_id: self._overseers.get(run_id) or Overseer(run_dir, names[run_id])
            for run_id, run_dir in self._run_dirs.items()
        }
        runs = [
            {"id": run_id, **to_plain(overseer.look())}
            for run_id, overseer in self._overseers.items()
        ]
        return {
            "directories": [text_of(each) for each in self._directories],
            "named": self._named,
            "problem": text_of("; ".join(problems)),
            "runs": runs,
        }

    def _run(self, query: dict[str, str]) -> dict[str, Any]:
        watched = self._watched_run(query.get("id", ""))
        told = watched.curves(query.get("seen", "")[:64])
        return told | (watched.detail() if query.get("detail") == "1" else {})

    def _watched_run(self, run_id: str) -> WatchedRun:
        """
        Raises:
            Refused: there is no such run.
        """
        if run_id not in self._run_dirs:
            self._runs()
        with self._lock:
            if (run_dir := self._run_dirs.get(run_id)) is None:
                raise Refused(HTTPStatus.NOT_FOUND, "this run is not here any more")
            watched = self._watched.pop(run_id, None) or WatchedRun(run_dir)
            self._watched[run_id] = watched
            if len(self._watched) > _MOST_WATCHED:
                self._watched.pop(next(iter(self._watched))).close()
        return watched

    def _video(self, query: dict[str, str]) -> tuple[str, int, Iterable[bytes]]:
        video = self._watched_run(query.get("id", "")).video(query.get("video", ""))
        if video is None:
            raise Refused(HTTPStatus.NOT_FOUND, "this video is not here any more")
        try:
            file = video.open()
        except OSError as error:
            why = text_of(f"cannot read {video.name}: {error.strerror}")
            raise Refused(HTTPStatus.NOT_FOUND, why) from error
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_VIDEO:
            file.close()
            raise Refused(HTTPStatus.NOT_FOUND, f"{video.name} is too large to be shown here")
        return "video/mp4", size, _pieces(file, size)


def _broken(error: Exception) -> Refused:
    why = text_of(f"the run cannot be read: {type(error).__name__}: {error}")
    return Refused(HTTPStatus.INTERNAL_SERVER_ERROR, why)


def _pieces(file: Any, size: int) -> Iterator[bytes]:
    with file:
        while size > 0 and (piece := file.read(min(_PIECE, size))):
            size -= len(piece)
            yield piece


def _as_json(value: Any) -> tuple[str, int, Iterable[bytes]]:
    content = msgspec.json.encode(value)  # infinity, which JSON lacks, as null
    return "application/json", len(content), [content]


def _id_of(run_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]


def _files() -> dict[str, tuple[str, bytes]]:
    directory = Path(__file__).parent / "page"
    return {path: (kind, (directory / name).read_bytes()) for path, (name, kind) in _FILES.items()}


#: Where the page is, or at the first port after that which is free.
DEFAULT_BIND: Final = "127.0.0.1:7070"
_MORE_PORTS: Final = 20
_LOOK_SECONDS: Final = 0.1  # between two looks whether to end


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
        directories: of runs, or runs.
        bind: "host:port"; None: this host alone, at a port that is free.
        named: see `PageApplication`.
        token: which the page asks for; "": none.
        tls: of this host; None: plain HTTP.
        insecure: allow other machines to read it without TLS.

    Raises:
        EndpointError: the address cannot be bound, or must not be.
    """
    host, port = split_address(bind or DEFAULT_BIND)
    is_here = is_loopback(host)
    if not is_here and not (token and (tls or insecure)):
        lacking = "nothing would be encrypted" if token else "there is no token to ask for"
        raise EndpointError(
            f"refusing to serve the page on {bind}: other machines could read it, and {lacking}. "
            "Give --tls and a token, as `juggler certs` makes both; or --insecure and --token-file "
            "on a network that you trust; or bind to 127.0.0.1, and look from elsewhere through "
            f"`ssh -L {port or 7070}:127.0.0.1:{port or 7070} HOST`"
        )
    application = PageApplication(directories, named=named)
    ports = [port] if bind else [*range(port, port + _MORE_PORTS), 0]
    server = _bound(host, ports, application, token, tls)
    thread = threading.Thread(
        target=server.serve_forever, args=(_LOOK_SECONDS,), name="page", daemon=True
    )
    thread.start()
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"{'https' if tls else 'http'}://{shown}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
        application.close()


def _bound(
    host: str, ports: list[int], application: PageApplication, token: str, tls: Tls | None
) -> HttpServer:
    """
    Raises:
        EndpointError: none of the ports can be bound.
    """
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
                    "another --bind, or leave it out for a port that is free"
                ) from error
    raise AssertionError("there is a last port")
