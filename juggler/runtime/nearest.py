"""Names in errors: near matches and lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import SequenceMatcher
from itertools import islice
from typing import Final

#: So few known names are all listed, also where one of them is near.
_FEW: Final = 10
#: No list of names that may be many has more.
_MOST_LISTED: Final = 20
#: What two names must have in common, of 1, and by how much another may be behind the nearest one.
_NEAR, _AS_NEAR = 0.58, 0.05


def one_of(words: Iterable[str]) -> str:
    """Words for a sentence, one of them meant: a, b or c."""
    return _joined(words, "or")


def all_of(words: Iterable[str]) -> str:
    """Words for a sentence, all of them meant: a, b and c."""
    return _joined(words, "and")


def listed(names: Collection[str], joined: Callable[[Iterable[str]], str] = all_of) -> str:
    """Names for a sentence, shortened if there are many."""
    shown = [repr(name) for name in islice(names, _MOST_LISTED)]
    more = len(names) - len(shown)
    return joined([*shown, f"{more} more"] if more else shown)


def _joined(words: Iterable[str], last_but: str) -> str:
    *others, last = [*words] or [""]
    return f"{', '.join(others)} {last_but} {last}" if others else last


def closest(name: object, known: Iterable[str]) -> str | None:
    """The name that was probably meant, if any is near."""
    return next(iter(_near(name, known)), None)


def nearest(name: object, known: Iterable[str], *, listed_by: str = "", own: str = "") -> str:
    """The end of an error about an unknown name.

    It has the names that were probably meant, or else all names; with few names, all of them.

    Args:
        name: that was given.
        known: the names that it could have been.
        listed_by: what lists all names, where an error cannot; "": an error can.
        own: what can be said instead of a known name; "": nothing.
    """
    known = sorted(known)
    near = _near(name, known)
    if not known:
        text = ": there are none"
    elif near:
        text = f": did you mean {one_of(map(repr, near))}?"
        if len(near) < len(known) <= _FEW:
            text += f" Known are {', '.join(known)}"
    else:
        text = f": {listed_by} lists the known ones" if listed_by else ""
        text = text or f": known are {', '.join(known)}"
    if not own:
        return text
    return f"{text} {own[0].upper()}{own[1:]}" if text.endswith("?") else f"{text}; {own}"


def _near(name: object, known: Iterable[str]) -> list[str]:
    """The nearest name, and at most two as near."""
    likeness = {each: _likeness(_plain(str(name)), _plain(each)) for each in known}
    best = max(likeness.values(), default=0.0)
    if best < _NEAR:
        return []
    found = [each for each in likeness if likeness[each] >= best - _AS_NEAR]
    return sorted(found, key=likeness.__getitem__, reverse=True)[:3]


def _plain(name: str) -> str:
    return name.replace("-", "_").lower()


def _likeness(wanted: str, known: str) -> float:
    """Similarity of two names, from 0 to 1."""
    matcher = SequenceMatcher(None, wanted, known, autojunk=False)
    in_order = matcher.ratio()
    if in_order >= _NEAR:
        return (in_order + 2 * matcher.quick_ratio()) / 3  # which takes letters in any order
    shorter, longer = sorted((wanted, known), key=len)
    return _NEAR if len(shorter) > 2 and longer.startswith(shorter) else 0.0
