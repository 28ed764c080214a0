"""The run's secret, and how a call shows it."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

TOKEN_VARIABLE = "JUGGLER_TOKEN"
_BEARER = "Bearer "

CallMetadata = tuple[tuple[str, str | bytes], ...]


def read_token(path: str | None) -> str:
    """The token in the file, else in the environment variable JUGGLER_TOKEN, else "" (none).

    Raises:
        ValueError: the file is empty or cannot be read.
    """
    if path is None:
        return os.environ.get(TOKEN_VARIABLE, "")
    try:
        token = Path(path).read_text().strip()
    except OSError as error:
        raise ValueError(f"cannot read the token file {path}: {error.strerror}") from error
    if not token:
        raise ValueError(f"the token file {path} is empty")
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
    given = {key: value if isinstance(value, str) else "" for key, value in metadata}
    if not same_token(given.get("authorization", "").removeprefix(_BEARER), token):
        return "the token is missing or wrong"
    if given.get("juggler-run", "") != run_id:
        return f"this is run {run_id}, not {given.get('juggler-run', '')!r}"
    return None
