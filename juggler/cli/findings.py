"""Findings of `juggler doctor` and `juggler check-simulator`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "warning", "problem"]
_COLOURS = {"ok": "32", "absent": "2", "warning": "33", "problem": "31"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of a report."""

    name: str  # what was checked
    state: State  # "absent": optional, no fault
    said: str  # the finding
    advice: str = ""  # what to do, or ""


def judged(name: str, is_good: bool, said: str, advice: str, state: State = "warning") -> Finding:
    """Make a finding; the advice counts only if it is not good."""
    return Finding(name, "ok", said) if is_good else Finding(name, state, said, advice)


def status_of(found: Sequence[Finding]) -> int:
    """Return the exit status for these findings."""
    return 1 if any(each.state == "problem" for each in found) else 0


def print_finding(found: Finding) -> None:
    """Print a finding and its advice."""
    mark = f"{'-' if found.state == 'absent' else found.state:<8}"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        mark = f"\x1b[{_COLOURS[found.state]}m{mark}\x1b[0m"
    print(f"{mark} {found.name:<16} {found.said}", flush=True)
    if found.advice:
        print(f"{'':<25} → {found.advice}")
