"""What an error about an unknown name says of the names that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: object, known: Iterable[str]) -> str | None:
    """The one that was probably meant, if any is near."""
    wanted = str(name).replace("-", "_")
    return next(iter(difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)), None)


def nearest(name: object, known: Iterable[str]) -> str:
    """How such an error ends: with the closest name, or else with all of them."""
    known = list(known)
    close = closest(name, known)
    if close is not None:
        return f": did you mean {close!r}?"
    return f": known are {', '.join(sorted(known))}" if known else ": there are none"
