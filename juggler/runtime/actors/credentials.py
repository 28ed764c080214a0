"""The run's token, and a limit for calls without it."""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from juggler.runtime.actors.tls import TOKEN, Tls


class Strangers:
    """Limits how many calls without a token are open at once.

    One more call ends the oldest. So a call that sends its message at once is served, however many
    others only wait. Any thread may use it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._ends: dict[object, Callable[[], object]] = {}  # oldest first

    @contextmanager
    def visit(self, end: Callable[[], object]) -> Iterator[None]:
        """Occupy a place during the `with` block.

        Args:
            end: ends the call, from another call's thread. It must not wait.
        """
        visit, crowded_out = object(), None
        with self._lock:
            if len(self._ends) >= self._most:
                crowded_out = self._ends.pop(next(iter(self._ends)))
            self._ends[visit] = end
        if crowded_out is not None:
            crowded_out()
        try:
            yield
        finally:
            with self._lock:
                self._ends.pop(visit, None)


TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "JUGGLER_TOKEN", "JUGGLER_TOKEN_FILE"
_LONGEST_TOKEN = 4096  # has to fit into a call's 8 KiB of headers
_BEARER = "Bearer "
#: Why a caller is refused, in words for the caller.
WITHOUT_TOKEN = "the token is missing or wrong"

CallMetadata = tuple[tuple[str, str | bytes], ...]


def read_token(path: str | None, tls: Tls | None = None) -> str:
    """Read the run's token.

    It comes from the given file, else from the file in JUGGLER_TOKEN_FILE, else from the variable
    JUGGLER_TOKEN, else from the file `token` next to the certificates, else it is "". It is never
    an argument, because other users of a host can see arguments.

    Raises:
        ValueError: the file is empty or cannot be read, or the token is not a printable ASCII word.
    """
    path = path or os.environ.get(TOKEN_FILE_VARIABLE) or None
    if path is None and (token := os.environ.get(TOKEN_VARIABLE)):
        return _word(token, f"the variable {TOKEN_VARIABLE}")
    if path is None and tls is not None and Path(tls.directory, TOKEN).exists():
        path = str(Path(tls.directory, TOKEN))
    if path is None:
        return ""
    try:
        content = Path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"cannot read the token file {path}: {error.strerror}") from error
    if not content:
        raise ValueError(f"the token file {path} is empty")
    return _word(content.decode("ascii", "replace"), f"the token file {path}")


def _word(token: str, where: str) -> str:
    """Return the token if it fits into the header of a call."""
    if not (token.isascii() and token.isprintable()) or len(token) > _LONGEST_TOKEN:
        raise ValueError(
            f"{where} must hold one line of at most {_LONGEST_TOKEN} characters of ASCII, as "
            "`openssl rand -hex 32` makes"
        )
    return token


def same_token(given: str, expected: str) -> bool:
    """Compare tokens in constant time; an empty expected token admits everyone."""
    return not expected or hmac.compare_digest(given.encode(), expected.encode())


def call_metadata(token: str, run_id: str, incarnation: str) -> CallMetadata:
    """Make the metadata with which a data stream opens."""
    return (
        ("authorization", _BEARER + token),
        ("juggler-run", run_id),
        ("juggler-incarnation", incarnation),
    )


def why_refused(metadata: CallMetadata, token: str, run_id: str) -> str | None:
    """Return the reason to refuse a call; None: it is allowed.

    The reason may be sent to the caller.
    """
    if (reason := why_not_admitted(metadata, token)) is not None:
        return reason
    given = dict(metadata).get("juggler-run", "")
    return None if given == run_id else f"this is run {run_id!r}, not {given!r}"


def why_not_admitted(metadata: CallMetadata, token: str) -> str | None:
    """Return why a call that belongs to no run is refused.

    The call only needs the token.
    """
    given = dict(metadata).get("authorization", "")
    shown = given.removeprefix(_BEARER) if isinstance(given, str) else ""
    return None if same_token(shown, token) else WITHOUT_TOKEN


def bearer(token: str) -> CallMetadata:
    """Make a call's metadata with the token."""
    return (("authorization", _BEARER + token),)
