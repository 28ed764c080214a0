"""The list of what users name: it changes only together with `interface.txt`."""

from __future__ import annotations

import importlib
from pathlib import Path

from support.pages import ROOT

from juggler.cli import COMMANDS

LISTED = Path(__file__).with_name("interface.txt")


def interface() -> list[str]:
    """Public names, commands and keys, one a line."""
    modules = ("juggler", "juggler.client", "juggler.testing")
    names = [f"{each}.{name}" for each in modules for name in importlib.import_module(each).__all__]
    rows = (ROOT / "docs/configuration.md").read_text().splitlines()
    keys = {f"key {row.split('`')[1]}" for row in rows if row.startswith("| `")}
    return sorted({*names, *keys, *(f"command {name}" for name in COMMANDS)})


def test_nothing_is_added_or_removed_by_accident() -> None:
    listed, now = LISTED.read_text().splitlines(), interface()
    added, removed = set(now) - set(listed), set(listed) - set(now)
    assert added == set(), f"add them to {LISTED.name}"
    assert removed == set(), f"remove them from {LISTED.name}"
