"""What happened is written down, whatever becomes of the disk."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

from juggler.driver.record.journal import EVENTS_FILE, Journal
from juggler.driver.record.progress import JsonProgress, PlainProgress


def test_messages_are_shown_and_written(tmp_path: Path) -> None:
    shown = StringIO()
    journal = Journal(PlainProgress(shown), tmp_path, "run1")
    journal.message("envrunner-0 left: \x1b[31mgone\x1b[0m\nTraceback", "error")
    journal.message("and so on")
    assert shown.getvalue().startswith("error: envrunner-0 left: gone\nTraceback\n")
    first, second = (tmp_path / EVENTS_FILE).read_text().splitlines()
    record = json.loads(first)
    assert record["message"] == "envrunner-0 left: gone\nTraceback"
    assert (record["level"], record["run"], record["worker"]) == ("error", "run1", "driver")
    assert json.loads(second)["level"] == "info"
    assert [each[1:] for each in journal.newest] == [
        ("error", "envrunner-0 left: gone"),
        ("info", "and so on"),
    ]


def test_where_nothing_can_be_written_it_says_so_once(tmp_path: Path) -> None:
    shown = StringIO()
    journal = Journal(PlainProgress(shown), tmp_path / "missing", "run1")
    journal.message("one")
    journal.message("two")
    lines = shown.getvalue().splitlines()
    assert [line for line in lines if "cannot write" in line] == [lines[1]]
    assert (lines[0], lines[2]) == ("one", "two")


def test_json_lines_have_the_runs_id(tmp_path: Path) -> None:
    shown = StringIO()
    journal = Journal(JsonProgress(shown), tmp_path, "run1")
    journal.start({"env": "CartPole-v1", "algorithm": "impala"})
    journal.message("trouble", "warning")
    first, second = map(json.loads, shown.getvalue().splitlines())
    assert (first["run"], first["message"]) == (
        "run1",
        "training CartPole-v1 with impala until it is interrupted",
    )
    assert (second["level"], second["message"]) == ("warning", "trouble")


def test_a_run_of_which_nothing_was_told_has_an_empty_file(tmp_path: Path) -> None:
    journal = Journal(PlainProgress(StringIO()), tmp_path, "run1")
    journal.start({"env": "CartPole-v1", "algorithm": "impala"})
    assert (tmp_path / EVENTS_FILE).read_text() == ""
