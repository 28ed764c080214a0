"""The part of an error about an unknown name that lists the known names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: object, known: Iterable[str]) -> str | None:
    """The name that was probably meant, if any is near."""
    wanted = str(name).replace("-", "_")
    return next(iter(difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)), None)


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of such an error: the closest name, or else all names."""
    known = list(known)
    close = closest(name, known)
    if close is not None:
        return f": did you mean {close!r}?"
    return f": known are {', '.join(sorted(known))}" if known else ": there are none"
