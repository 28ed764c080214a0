"""Who may not write in the directory of a run hears so before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from juggler.driver import starting
from juggler.driver.config import RunConfig
from juggler.driver.record import directory_lock
from juggler.driver.record.run_directory import CONFIG_FILE, RunDirectoryError
from juggler.runtime.checkpoints.checkpoint import Checkpoint

BOOKS: dict[str, Any] = {
    "sampled": 100,
    "trained": 100,
    "dropped": {},
    "in_flight": 0,
    "lost_unreported": 0,
    "next_id": 12,
    "wall_time": 1.5,
    "episodes": 0,
    "returns": [],
    "lengths": [],
}


def _protected(**_: object) -> NoReturn:
    raise PermissionError(13, "Permission denied", "somewhere")


def _rehearsed(*_: object) -> NoReturn:
    raise AssertionError("the run was rehearsed first")


@pytest.mark.parametrize("how", ["resumed", "started over"])
def test_a_run_that_may_not_write_in_its_directory_is_told_so_before_its_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / CONFIG_FILE).write_text('env = "CartPole-v1"\n')
    monkeypatch.setattr(directory_lock, "TemporaryDirectory", _protected)  # root may do anything
    monkeypatch.setattr(starting, "rehearse", _rehearsed)
    config = RunConfig.from_flat({"env": "CartPole-v1", "run_dir": str(tmp_path)})
    checkpoint = Checkpoint((1, 7), {}, {}, BOOKS, config.flat(), {})
    go_on: dict[str, Callable[[], object]] = {
        "resumed": lambda: starting.resume_run(tmp_path, checkpoint, config, started=0.0),
        "started over": lambda: starting.start_run(config, [], started=0.0, over=True),
    }
    told = f"^cannot write in the run directory {tmp_path}: Permission denied$"
    with pytest.raises(RunDirectoryError, match=told):
        go_on[how]()
