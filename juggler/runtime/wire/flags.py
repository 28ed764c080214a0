"""What environments and simulators say that is to be true or false."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class NoFlag(ValueError):
    """Something else than True and False. The message says what it is."""


def as_flag(name: str, said: Any) -> bool:
    """True or False, which 1 and 0 are, too.

    Args:
        name: of what was said, for the error.
        said: also as an array of one element.

    Raises:
        NoFlag: it is neither.
    """
    if said is True or said is False or type(said) is np.bool_:
        return bool(said)
    flags = np.asarray(said) if hasattr(said, "__array__") or np.isscalar(said) else None
    if flags is None or flags.size != 1 or not _are_flags(flags):
        raise NoFlag(f"{name} must be True or False, not {said!r:.100}")
    return bool(flags.item())


def as_flags(name: str, said: Any) -> NDArray[np.bool_]:
    """Bools [...], likewise.

    Args:
        name: of what was said, for the error.
        said: [...], arrays or sequences of them, too.

    Raises:
        NoFlag: one of them is neither true nor false.
    """
    flags = np.asarray(said)
    if flags.dtype != np.bool_ and not _are_flags(flags):
        raise NoFlag(f"{name} must be True or False, not {said!r:.100}")
    return flags.astype(np.bool_)


def _are_flags(flags: NDArray[Any]) -> bool:
    if flags.dtype.kind == "b":
        return True
    return flags.dtype.kind in "iuf" and bool(((flags == 0) | (flags == 1)).all())
