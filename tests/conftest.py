"""What tests of several rooms share."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_PATIENCE = 30.0  # seconds until a test fails; nothing takes as long


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a Python program where it may leave what it likes -> what it prints."""

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def every_thread_ends() -> Iterator[None]:
    """Whatever threads a test starts are over soon after it."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(_PATIENCE)
        assert not thread.is_alive(), f"{thread.name} goes on"
