"""Help texts of options, in whole paragraphs."""

from __future__ import annotations

from dataclasses import dataclass

import docstring_parser
import pytest

from juggler.cli.arguments import parse


@dataclass
class Options:
    """Of a command."""

    pace: int = 1
    """How many steps go by at once:
    `pace` of them, or
    (rarely) more.

    Ways to say it:
    - in words,
    - in numbers.
    """


def test_lines_of_a_paragraph_are_joined_and_items_of_a_list_stay_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        parse(Options, ["--help"], "walk")
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("--pace"))
    assert lines[at].endswith("How many steps go by at once: `pace` of them, or (rarely) more.")
    assert lines[at + 2 : at + 5] == [
        "Ways to say it:",
        "- in words,",
        "- in numbers. (default: 1)",
    ]


def test_others_read_docstrings_as_they_are() -> None:
    before = docstring_parser.parse_from_object
    parse(Options, ["--pace", "3"], "walk")
    assert docstring_parser.parse_from_object is before
