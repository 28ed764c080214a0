"""What is raised where learners lose each other."""

from __future__ import annotations

import re


class PeerLost(RuntimeError):
    """What several learners do together failed: one of them is gone, hangs or is out of reach."""


def said(error: BaseException) -> str:
    """What torch says, without where in its sources, hints, and the stack of C++ calls."""
    line = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.c(?:c|pp):\d+\] ", "", line).strip()
