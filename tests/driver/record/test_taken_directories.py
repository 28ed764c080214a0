"""What is said of a directory that a new run cannot have."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from support.disk import Disk

from juggler.driver.record.run_directory import RunDirectoryError, must_be_free


@pytest.mark.parametrize("command", ["train", "driver"])
def test_a_directory_with_a_checkpoint_says_how_its_run_goes_on(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "checkpoints" / "000000001").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match=f"not empty; .*juggler {command} --resume "):
        must_be_free(tmp_path, command)


def test_the_directory_of_a_live_run_is_not_offered_for_resuming(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "000000001").mkdir(parents=True)
    with (tmp_path / "metrics.jsonl").open("wb") as metrics:
        fcntl.flock(metrics, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match=r"still be writing") as wrong:
            must_be_free(tmp_path)
    assert "--resume" not in str(wrong.value)


def test_a_directory_of_other_things_is_not_called_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunDirectoryError, match=r"go on from; name another$"):
        must_be_free(tmp_path)


def test_a_directory_that_cannot_be_made_is_told_before_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "runs" / "one", Path("/proc/self/one"), None):
        with pytest.raises(RunDirectoryError, match=f"cannot make the run directory {path or ''}"):
            must_be_free(path)


def test_a_disk_that_is_full_is_told_before_all_else_and_nothing_is_left_there(
    tmp_path: Path,
) -> None:
    disk = Disk(tmp_path / "disk")
    run_dir = disk.path / "run"
    try:
        disk.fill(os.getpid())
        with pytest.raises(RunDirectoryError, match=r"the run directory .*/run: [^\[]+$"):
            must_be_free(run_dir)
        disk.empty(os.getpid())
        must_be_free(run_dir)
        assert list(disk.path.iterdir()) == []
    finally:
        disk.close()


def test_to_look_whether_a_directory_can_be_made_leaves_nothing(tmp_path: Path) -> None:
    must_be_free(tmp_path / "a" / "b")
    must_be_free(tmp_path)
    assert not list(tmp_path.iterdir())
