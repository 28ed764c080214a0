"""Converts flags of environments and simulators to bools."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class NoFlag(ValueError):
    """A flag that is neither True nor False."""


def as_flag(name: str, flag: Any) -> bool:
    """Convert a flag, also 1 and 0, to a bool.

    Args:
        name: of the flag, for the error.
        flag: the flag, or an array with one element.

    Raises:
        NoFlag: the value is not a flag.
    """
    if flag is True or flag is False or type(flag) is np.bool_:
        return bool(flag)
    flags = np.asarray(flag) if hasattr(flag, "__array__") or np.isscalar(flag) else None
    if flags is None or flags.size != 1 or not _are_flags(flags):
        raise NoFlag(f"{name} must be True or False, not {flag!r:.100}")
    return bool(flags.item())


def as_flags(name: str, values: Any) -> NDArray[np.bool_]:
    """Convert flags [...] to bools, like `as_flag`.

    Args:
        name: of the flags, for the error.
        values: [...], an array, or sequences of flags or arrays.

    Raises:
        NoFlag: a value is not a flag.
    """
    flags = np.asarray(values)
    if flags.dtype != np.bool_ and not _are_flags(flags):
        raise NoFlag(f"{name} must be True or False, not {values!r:.100}")
    return flags.astype(np.bool_)


def _are_flags(flags: NDArray[Any]) -> bool:
    if flags.dtype.kind == "b":
        return True
    return flags.dtype.kind in "iuf" and bool(((flags == 0) | (flags == 1)).all())
