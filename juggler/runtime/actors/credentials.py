"""The run's secret, and how a call shows it."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from juggler.runtime.actors.tls import TOKEN, Tls

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "JUGGLER_TOKEN", "JUGGLER_TOKEN_FILE"
_LONGEST_TOKEN = 4096  # with the rest of a call's headers, which have 8 KiB
_BEARER = "Bearer "

CallMetadata = tuple[tuple[str, str | bytes], ...]


def read_token(path: str | None, tls: Tls | None = None) -> str:
    """The run's secret: in the file given, else in that of JUGGLER_TOKEN_FILE, else in the variable
    JUGGLER_TOKEN, else in the file `token` beside certificates, else "" (none). Never in an
    argument, which other users of a host can see.

    Raises:
        ValueError: the file is empty or cannot be read, or the token is no word of ASCII.
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
    """What the header of a call can carry, however long it is."""
    if not (token.isascii() and token.isprintable()) or len(token) > _LONGEST_TOKEN:
        raise ValueError(
            f"{where} must hold one line of at most {_LONGEST_TOKEN} characters of ASCII, as "
            "`openssl rand -hex 32` makes"
        )
    return token


def same_token(given: str, expected: str) -> bool:
    """Compared in constant time. An empty expected token admits everybody."""
    return not expected or hmac.compare_digest(given.encode(), expected.encode())


def call_metadata(token: str, run_id: str, incarnation: str) -> CallMetadata:
    """What a data stream shows when it opens."""
    return (
        ("authorization", _BEARER + token),
        ("juggler-run", run_id),
        ("juggler-incarnation", incarnation),
    )


def why_refused(metadata: CallMetadata, token: str, run_id: str) -> str | None:
    """None where the call may go on, else the reason to refuse it, fit for its sender."""
    if (reason := why_not_admitted(metadata, token)) is not None:
        return reason
    given = dict(metadata).get("juggler-run", "")
    return None if given == run_id else f"this is run {run_id}, not {given!r}"


def why_not_admitted(metadata: CallMetadata, token: str) -> str | None:
    """The same for a call that is of no run: it has to show the token alone."""
    given = dict(metadata).get("authorization", "")
    shown = given.removeprefix(_BEARER) if isinstance(given, str) else ""
    return None if same_token(shown, token) else "the token is missing or wrong"


def bearer(token: str) -> CallMetadata:
    """What such a call shows."""
    return (("authorization", _BEARER + token),)
