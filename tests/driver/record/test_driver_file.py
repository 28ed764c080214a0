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
    with pytest.raises(RunDirectoryError, match="takes no workers of other hosts"):
        find_driver_from_elsewhere(run_dir, 0.0)


def test_a_run_without_a_driver_is_told(run_dir: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not running"):
        find_driver_from_elsewhere(run_dir, 0.0)
