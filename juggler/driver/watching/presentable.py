"""Convert values from a run's directory to valid JSON for the page."""

from __future__ import annotations

import math
from typing import Any, Final

from juggler.driver.record.metrics_file import number

_DEEPEST: Final = 32  # tables within tables
_LONGEST: Final = 10_000  # characters of a text
_EXACT: Final = 1 << 53  # browsers round larger integers


def text_of(value: object) -> str:
    """Return a value as text. Non-UTF-8 bytes of file names become question marks."""
    return str(value)[:_LONGEST].encode(errors="replace").decode()


def plain_of(value: Any, depth: int = _DEEPEST) -> Any:
    """Convert a value of JSON or TOML. Parts that JSON cannot hold become text."""
    if isinstance(value, dict | list) and not depth:
        return "…"
    if isinstance(value, dict):
        return {text_of(key): plain_of(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [plain_of(each, depth - 1) for each in value]
    if isinstance(value, int | float):
        found = number(value)
        if math.isfinite(found):
            return value if abs(found) < _EXACT else found
        return str(value) if isinstance(value, float) else "a number too large"
    return None if value is None else text_of(value)
