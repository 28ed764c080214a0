"""What the page and its scripts ask for, over HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from juggler.driver.record.run_directory import RunDirectoryError
from juggler.driver.watching.overview import Overseer, find_runs, names_of, to_plain
from juggler.driver.watching.presentable import text_of
from juggler.driver.watching.watched_run import WatchedRun

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
