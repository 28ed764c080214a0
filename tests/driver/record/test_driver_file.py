"""Workers of other hosts find a driver by the run's directory."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from juggler.driver.record.driver_file import announce, find_driver, find_driver_from_elsewhere
from juggler.driver.record.run_directory import CONFIG_FILE, RunDirectoryError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text("")
    return tmp_path


def test_a_driver_that_listens_everywhere_is_found_at_its_host(run_dir: Path) -> None:
    assert announce(run_dir, "run", ["unix:/x", "0.0.0.0:5005"]) == ""
    assert find_driver(run_dir) == "unix:/x"
    assert find_driver_from_elsewhere(run_dir, 0.0) == f"{socket.gethostname()}:5005"


def test_a_driver_that_listens_at_one_address_is_found_there(run_dir: Path) -> None:
    announce(run_dir, "run", ["unix:/x", "10.77.0.1:5005"])
    assert find_driver_from_elsewhere(run_dir, 0.0) == "10.77.0.1:5005"


def test_a_driver_that_takes_no_workers_is_told(run_dir: Path) -> None:
    announce(run_dir, "run", ["unix:/x"])
    with pytest.raises(RunDirectoryError, match="takes"):
        find_driver_from_elsewhere(run_dir, 0.0)


@pytest.mark.parametrize(
    ("summary", "how"),
    [
        (None, "it was killed, or starts now$"),
        ('{"solved": true, "reason_for_stop": "solved"}', "it is solved; .*summary.json says more"),
        ('{"solved": false, "reason_for_stop": "stop_steps"}', r"it ended \(stop_steps\); .*"),
        ("{", "summary.json says how it ended"),
    ],
)
def test_a_run_without_a_driver_is_told(run_dir: Path, summary: str | None, how: str) -> None:
    if summary:
        (run_dir / "summary.json").write_text(summary)
    with pytest.raises(RunDirectoryError, match=f"is not running: .*{how}"):
        find_driver_from_elsewhere(run_dir, 0.0)
