"""`juggler doctor`: says what works on this machine, and what to do where something does not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from juggler.cli.arguments import Flag, parse, report_errors
from juggler.cli.checks import Finding, findings

_MARKS = {"ok": "ok", "absent": "-", "warning": "warning", "problem": "problem"}
_COLOURS = {"ok": "32", "absent": "2", "warning": "33", "problem": "31"}


@dataclass(kw_only=True)
class Arguments:
    """Say what works on this machine, and what to do where something does not. A dash marks what is
    only needed by who wants it. Exits with 1 if there is a problem."""

    json: Flag = False
    """Print a list of objects for programs, with `name`, `state`, `said` and `advice`."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "doctor")
    return report_errors("doctor", lambda: _look(given))


def _look(given: Arguments) -> int:
    found: list[Finding] = []
    for each in findings():
        found.append(each)
        if not given.json:
            _print(each)
    if given.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return _status(found)
    counts = {state: sum(each.state == state for each in found) for state in _MARKS}
    print()
    if not counts["problem"]:
        said = "To begin: juggler train cartpole"
        print(said if not counts["warning"] else f"{said} (see the warnings above)")
    else:
        print("Runs may not work here: see the problems above.")
    return _status(found)


def _status(found: Sequence[Finding]) -> int:
    return 1 if any(each.state == "problem" for each in found) else 0


def _print(found: Finding) -> None:
    mark = f"{_MARKS[found.state]:<8}"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        mark = f"\x1b[{_COLOURS[found.state]}m{mark}\x1b[0m"
    print(f"{mark} {found.name:<16} {found.said}", flush=True)
    if found.advice:
        print(f"{'':<25} → {found.advice}")
