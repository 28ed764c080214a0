"""Temporary files of killed processes go with the next start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.made_files import without_locks

from juggler.runtime.actors import temporary
from juggler.runtime.actors.processes import WorkerProgram, cool_down
from juggler.runtime.actors.temporary import HeldDirectory

_HOLDS = """
import os, signal, sys
from juggler.runtime.actors.temporary import HeldDirectory
print(HeldDirectory().path, flush=True)
"""
_IN_ANOTHER_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Path:
    path = Path(tempfile.mkdtemp(prefix="jt-"))  # short: Unix sockets have a limit
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    return path


@pytest.fixture(autouse=True)
def _the_place_goes(place: Path) -> Iterator[None]:
    yield
    shutil.rmtree(place)


@pytest.mark.parametrize("name", ["t%2Ft", "a,b", "a#b", "a?b", "дом", "a" * 60])
def test_sockets_are_elsewhere_if_the_place_does_not_suit_them(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (place / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place / name))
    directory = HeldDirectory()
    directory.remove()
    assert directory.path.parent == Path("/tmp")


def _left_by_a_killed_process() -> Path:
    program = f"{_HOLDS}os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return Path(done.stdout.strip())


@pytest.mark.slow
def test_processes_that_start_together_remove_what_dead_ones_left() -> None:
    left = [_left_by_a_killed_process()]
    boot = temporary.boot_id()
    for number in range(200):
        left.append(left[0].with_name(f"juggler-1-{number}-{boot}"))
        left[-1].mkdir(exist_ok=True)
    with ThreadPoolExecutor(8) as starting:
        made = list(starting.map(lambda _: HeldDirectory(), range(8)))
    assert not any(path.exists() for path in left)
    assert all(each.is_there() for each in made), "they leave each other alone"
    for each in made:
        each.remove()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="making a namespace takes root")
def test_a_process_of_another_namespace_is_not_taken_for_dead() -> None:
    program = f"{_HOLDS}sys.stdin.read()"
    with subprocess.Popen(
        [*_IN_ANOTHER_NAMESPACE, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        directory = Path(other.stdout.readline().strip())
        own_id = directory.name.split("-")[1]
        assert own_id != str(other.pid), "it has another one here"
        HeldDirectory().remove()
        assert directory.is_dir()
        other.communicate("")
    HeldDirectory().remove()
    assert not directory.exists()


def test_what_nobody_can_know_to_be_abandoned_stays(place: Path) -> None:
    """Directories of older versions, young ones, and other hosts' ones."""
    names = ["juggler-1-abcdefgh", "juggler-1-abcdefgh-00000000", "juggler-1"]
    for name in names:
        (place / name).mkdir()
    HeldDirectory().remove()
    assert sorted(path.name for path in place.iterdir()) == sorted(names)


@pytest.mark.slow
def test_no_process_that_this_one_starts_holds_its_directory(place: Path) -> None:
    """Otherwise a killed process's files would stay with its children."""
    directory = HeldDirectory()
    sleeper = subprocess.Popen(["sleep", "60"], close_fds=False)
    worker = WorkerProgram("time:sleep", 60).start("worker 0")
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(1)
    try:
        for pid in (sleeper.pid, worker.pid, forked):
            deadline = time.monotonic() + 30  # it closes what it need not have
            while str(directory.path) in _opened(pid) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert str(directory.path) not in _opened(pid)
    finally:
        for process in (sleeper, worker):
            process.kill()
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
        sleeper.wait()
        worker.join()
        cool_down()
        directory.remove()


def _opened(pid: int | None) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in this moment
            found.append(os.readlink(path))
    return found


def test_a_file_system_without_locks_keeps_what_is_there(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    first, second = HeldDirectory(), HeldDirectory()
    assert first.is_there()
    assert second.is_there()
    first.remove()
    second.remove()
    assert list(place.iterdir()) == []


@pytest.mark.slow
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

    assert not run().exists(), "a run that ends by itself removes it"
    left = run(str(int(signal.SIGKILL)))
    assert left.exists()
    assert left.stat().st_uid == os.getuid()
    run()
    assert not left.exists(), "a killed run had no time to"


@pytest.mark.slow
def test_a_forkserver_starts_again_after_its_socket_was_removed() -> None:
    """In its own program: another test's forkserver must not be lost."""
    done = subprocess.run(
        [sys.executable, "-c", STARTS_TWICE], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


STARTS_TWICE = """
import multiprocessing.util, shutil
from juggler.runtime.actors.processes import WorkerProgram, cool_down

for _ in range(2):
    process = WorkerProgram("time:sleep", 0).start("worker 0")
    process.join()
    assert process.exitcode == 0
    shutil.rmtree(multiprocessing.util.get_temp_dir())
    cool_down()
"""
