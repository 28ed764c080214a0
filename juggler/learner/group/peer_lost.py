"""PeerLost: the error of a learner that lost another one of its group."""

from __future__ import annotations

import re


class PeerLost(RuntimeError):
    """A collective operation failed: a learner of the group is gone, hangs or is out of reach."""


def said(error: BaseException) -> str:
    """Torch's message, without the place in its sources, hints and the stack of C++ calls."""
    line = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.c(?:c|pp):\d+\] ", "", line).strip()
