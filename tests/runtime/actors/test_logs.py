"""A worker's own lines say whose they are."""

from __future__ import annotations

import json
import os
from datetime import datetime

import pytest

from juggler.runtime.actors.logs import WorkerLog


def test_a_line_for_people_has_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog("envrunner")
    log.error("no driver answers")
    log.identify("run1", "envrunner-3", "abc")
    log.info("attached")
    assert capsys.readouterr().err.splitlines() == [
        "juggler envrunner: no driver answers",
        "juggler envrunner-3 (run run1, incarnation abc): attached",
    ]


def test_a_line_for_machines_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog("envrunner", "json")
    log.identify("run1", "envrunner-3", "abc")
    log.error("two\nlines of 100 % trouble")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert datetime.fromisoformat(record.pop("time")).tzinfo is not None
    assert record == {
        "level": "error",
        "run": "run1",
        "worker": "envrunner-3",
        "incarnation": "abc",
        "pid": os.getpid(),
        "message": "two\nlines of 100 % trouble",
    }
