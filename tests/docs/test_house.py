"""The code may not become larger or harder to read."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from support.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from house import avoided_words, long_functions, long_heads, long_stretches, measures

#: The most that each may be. Lower a number with the change that lowers what it limits.
LIMITS: dict[str, int] = json.loads(Path(__file__).with_name("limits.json").read_text())

SOURCE = '''"""A module."""

# Nobody reads this.
TEXT = "such as a word, or such a word"


def whoever() -> str:
    """Answer with a text that is, for a first line of a docstring, too long by far."""
    return f"{TEXT} of those that are long"
'''


def test_nothing_grows() -> None:
    now = measures()
    grown = {name: now[name] for name, most in LIMITS.items() if now[name] > most}
    assert grown == {}, f"the limits are {LIMITS}"


def test_words_are_found_in_comments_and_texts_and_not_in_names(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    found = [(line, word) for _, line, word in avoided_words([path])]
    assert found == [(3, "Nobody"), (4, "such"), (9, "those that")]
    assert long_heads({path: ast.parse(SOURCE)}) == [(path, 7)]


def test_long_functions_and_those_without_comments_are_found(tmp_path: Path) -> None:
    steps = ["    x += 1"] * 15
    explained = ["def explained(x):", '    """Add."""', *steps, "    # Why.", *steps]
    silent = ["def silent(x):", *steps, "    x += 1"]
    endless = ["def endless(x):", *[*steps, "    # Why."] * 4]
    path = tmp_path / "module.py"
    path.write_text("\n".join([*explained, *silent, *endless]))
    files = {path: ast.parse(path.read_text())}
    assert long_stretches(files) == [(path, len(explained) + 1)]
    assert long_functions(files) == [(path, len(explained) + len(silent) + 1)]
