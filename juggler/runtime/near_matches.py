"""Names in errors: near matches and lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import SequenceMatcher
from itertools import islice
from typing import Final

#: Up to this number, all known names are listed, even if one is near.
_FEW: Final = 10
#: Maximum length of a list of names.
_MOST_LISTED: Final = 20
#: Minimum similarity of two names, and the maximum distance of further names from the nearest one.
_NEAR, _AS_NEAR = 0.58, 0.05


def one_of(words: Iterable[str]) -> str:
    """Join alternatives for a sentence: a, b or c."""
    return _joined(words, "or")


def all_of(words: Iterable[str]) -> str:
    """Join words for a sentence: a, b and c."""
    return _joined(words, "and")


def listed(names: Collection[str], joined: Callable[[Iterable[str]], str] = all_of) -> str:
    """Join names for a sentence, shortened if there are many."""
    shown = [repr(name) for name in islice(names, _MOST_LISTED)]
    more = len(names) - len(shown)
    return joined([*shown, f"{more} more"] if more else shown)


def difference(given: Iterable[str], expected: Iterable[str]) -> str:
    """Describe names by what they lack, and what they have besides."""
    lacking, others = sorted({*expected} - {*given}), sorted({*given} - {*expected})
    parts = ("without", lacking), ("with", others)
    return all_of(f"{word} {listed(names)}" for word, names in parts if names)


def _joined(words: Iterable[str], last_but: str) -> str:
    *others, last = [*words] or [""]
    return f"{', '.join(others)} {last_but} {last}" if others else last


def closest(name: object, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, if any is near."""
    return next(iter(_near(name, known)), None)


def nearest(name: object, known: Iterable[str], *, listed_by: str = "", own: str = "") -> str:
    """Return the end of an error about an unknown name.

    It has the names that were probably meant; otherwise, or if there are few, all names.

    Args:
        name: the unknown name.
        known: the known names.
        listed_by: where all names are listed, if they are too many for an error; "": in the error.
        own: alternative to a known name; "": none.
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
    """Return the nearest name, and at most two that are equally near."""
    likeness = {each: _likeness(_plain(str(name)), _plain(each)) for each in known}
    best = max(likeness.values(), default=0.0)
    if best < _NEAR:
        return []
    found = [each for each in likeness if likeness[each] >= best - _AS_NEAR]
    return sorted(found, key=likeness.__getitem__, reverse=True)[:3]


def _plain(name: str) -> str:
    return name.replace("-", "_").lower()


def _likeness(wanted: str, known: str) -> float:
    """Return the similarity of two names, from 0 to 1."""
    matcher = SequenceMatcher(None, wanted, known, autojunk=False)
    in_order = matcher.ratio()
    if in_order >= _NEAR:
        return (in_order + 2 * matcher.quick_ratio()) / 3  # ignores the order of letters
    shorter, longer = sorted((wanted, known), key=len)
    return _NEAR if len(shorter) > 2 and longer.startswith(shorter) else 0.0
