"""The run's secret, and how a call shows it."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from juggler.runtime.actors.tls import TOKEN, Tls

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "JUGGLER_TOKEN", "JUGGLER_TOKEN_FILE"
_LONGEST_TOKEN = 4096  # must fit into a call's 8 KiB of headers
_BEARER = "Bearer "
#: Why somebody is not let in, for whoever it is.
WITHOUT_TOKEN = "the token is missing or wrong"

CallMetadata = tuple[tuple[str, str | bytes], ...]


def read_token(path: str | None, tls: Tls | None = None) -> str:
    """The run's secret: from the given file, else from the file in JUGGLER_TOKEN_FILE, else from
    the variable JUGGLER_TOKEN, else from the file `token` beside certificates, else "" (none). It
    is never an argument, because other users of a host can see arguments.

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
    """The token, checked to fit into the header of a call."""
    if not (token.isascii() and token.isprintable()) or len(token) > _LONGEST_TOKEN:
        raise ValueError(
            f"{where} must hold one line of at most {_LONGEST_TOKEN} characters of ASCII, as "
            "`openssl rand -hex 32` makes"
        )
    return token


def same_token(given: str, expected: str) -> bool:
    """Compares in constant time. An empty expected token admits everybody."""
    return not expected or hmac.compare_digest(given.encode(), expected.encode())


def call_metadata(token: str, run_id: str, incarnation: str) -> CallMetadata:
    """The metadata that a data stream shows when it opens."""
    return (
        ("authorization", _BEARER + token),
        ("juggler-run", run_id),
        ("juggler-incarnation", incarnation),
    )


def why_refused(metadata: CallMetadata, token: str, run_id: str) -> str | None:
    """The reason to refuse a call, fit for its sender, or None if it is allowed."""
    if (reason := why_not_admitted(metadata, token)) is not None:
        return reason
    given = dict(metadata).get("juggler-run", "")
    return None if given == run_id else f"this is run {run_id}, not {given!r}"


def why_not_admitted(metadata: CallMetadata, token: str) -> str | None:
    """The same for a call that belongs to no run and has to show only the token."""
    given = dict(metadata).get("authorization", "")
    shown = given.removeprefix(_BEARER) if isinstance(given, str) else ""
    return None if same_token(shown, token) else WITHOUT_TOKEN


def bearer(token: str) -> CallMetadata:
    """The metadata of such a call."""
    return (("authorization", _BEARER + token),)
