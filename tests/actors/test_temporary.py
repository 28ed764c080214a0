"""What killed processes leave in the directory for temporary files goes with the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from juggler.runtime.actors.temporary import make_directory

_NO_PROCESS = 1 << 30  # above what any kernel gives


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp" if len(str(tmp_path)) > 60 else str(tmp_path))
    return Path(tempfile.gettempdir())


def test_processes_that_start_together_remove_what_a_dead_one_left(place: Path) -> None:
    left = [place / f"juggler-{_NO_PROCESS}-{number}" for number in range(200)]
    for path in left:
        path.mkdir()
    with ThreadPoolExecutor(8) as starting:
        made = list(starting.map(lambda _: make_directory(), range(8)))
    assert not any(path.exists() for path in left)
    for directory in made:
        Path(directory).rmdir()


def test_multiprocessings_directory_is_such_a_one_too() -> None:
    program = """
import multiprocessing.util, os, signal, sys
from juggler.runtime.actors.temporary import claim_multiprocessings
claim_multiprocessings()
claim_multiprocessings()
print(multiprocessing.util.get_temp_dir(), flush=True)
os.kill(os.getpid(), int(sys.argv[1])) if len(sys.argv) > 1 else None
"""

    def run(*arguments: str) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return Path(done.stdout.strip())

    assert not run().exists(), "who ends by itself removes it"
    left = run(str(int(signal.SIGKILL)))
    assert left.exists()
    assert left.stat().st_uid == os.getuid()
    run()
    assert not left.exists(), "who was killed had no time to"
