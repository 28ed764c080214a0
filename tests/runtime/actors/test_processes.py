"""Real processes: killed, stopped, orphaned."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import NEVER, QUICK, Exits, eventually, sleeper

from juggler.runtime.actors import supervisor
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.actors.processes import WorkerProgram, cool_down, must_end, warm_up
from juggler.runtime.actors.supervisor import Supervisor

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _no_forkserver_is_left() -> Iterator[None]:
    yield
    cool_down()


def test_workers_look_for_garbage_but_not_in_what_the_forkserver_imported(tmp_path: Path) -> None:
    told, script = tmp_path / "told", tmp_path / "asking.py"
    script.write_text(
        "import gc, pathlib\n"
        f"pathlib.Path({str(told)!r}).write_text(f'{{gc.isenabled()}} {{gc.get_freeze_count()}}')\n"
    )
    # In a process of its own: the forkserver of this one may have begun with other imports.
    code = (
        "from juggler.runtime.actors.processes import WorkerProgram\n"
        f"WorkerProgram('runpy:run_path', {str(script)!r}).start('asking').join(60)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    is_enabled, frozen = told.read_text().split()
    assert is_enabled == "True"
    assert int(frozen) > 100_000


def test_a_process_that_fails_says_why_and_ends_whatever_its_threads_do(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "raise MemoryError('no room for the replay')\n"
    )
    warm_up()  # a forkserver ends with the thread that starts it
    exits = Exits()
    supervisor = Supervisor(exits.events.put)
    supervisor.add("worker-0", WorkerProgram("runpy:run_path", str(script)), NEVER)
    try:
        assert exits.next(60).how == "killed by SIGALRM, MemoryError: no room for the replay"
    finally:
        supervisor.close(grace=0.0)


def _stopped_forkserver() -> psutil.Process:
    cool_down()
    warm_up()
    # By its id: it may not have the title, nor even its own command line, yet.
    server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    server.suspend()
    return server


def test_an_end_may_be_as_far_away_as_one_likes() -> None:
    """Workers with --reattach-seconds inf wait for a driver forever."""
    try:
        must_end(math.inf)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 1e8
    finally:
        must_end(0)


def test_a_start_that_fails_is_told_and_tried_again() -> None:
    server = _stopped_forkserver()
    events: Mailbox[Any] = Mailbox()
    supervisor = Supervisor(events.put)
    supervisor.add("worker-0", sleeper(), QUICK)
    time.sleep(0.2)  # it waits for an answer by now; if not yet, the new forkserver gives one
    try:
        server.kill()
        pid = eventually(lambda: supervisor.pids().get("worker-0"))
        assert psutil.pid_exists(pid)
        for exited in events.gather():
            assert "could not be started" in exited.how
            assert exited.restart_in is not None
    finally:
        supervisor.close(grace=0.0)
        cool_down()


def test_a_forkserver_that_does_not_answer_holds_nobody_up() -> None:
    server = _stopped_forkserver()
    supervisor = Supervisor(Mailbox().put)
    supervisor.add("worker-0", sleeper(), QUICK)
    time.sleep(0.2)  # in the midst of starting it
    supervisor.add("worker-1", sleeper(), QUICK)
    supervisor.kill("worker-0", pid=1)
    supervisor.close(grace=0.0)
    cool_down()
    assert not server.is_running()


def test_a_kill_for_want_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_oom_kills", 3)
    monkeypatch.setattr(supervisor, "oom_kills", lambda: 4)
    assert "memory" in supervisor.how_it_ended(-signal.SIGKILL)
    assert supervisor.how_it_ended(-signal.SIGKILL) == "killed by SIGKILL"
    assert "forkserver was killed" in supervisor.how_it_ended(255)


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(
            """
            from juggler.runtime.actors.processes import WorkerProgram, cool_down, warm_up

            print("once", flush=True)
            process = WorkerProgram("builtins:print", "in the worker").start("worker 0")
            process.join()
            raise SystemExit(process.exitcode)
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines(), done.returncode) == (["once"], 0), done
    assert "in the worker" in done.stderr, "stdout is the run's own"


def test_an_interrupt_right_after_it_was_started_does_not_end_the_forkserver() -> None:
    program = """
import os, signal, time
from multiprocessing import forkserver
from juggler.runtime.actors.processes import cool_down, warm_up

signal.signal(signal.SIGINT, lambda *_: None)
warm_up()
pid = forkserver._forkserver._forkserver_pid
os.killpg(0, signal.SIGINT)  # as a terminal does
while open(f"/proc/{pid}/cmdline").read(8) != "juggler:":  # it has its title once it ignores them
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    time.sleep(0.01)
cool_down()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_says_what_the_forkserver_could_not_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open')\n")
    program = """
from juggler.driver.config import RunConfig
from juggler.driver.preflight import PreflightError, Trial, rehearse
from juggler.runtime.actors.processes import cool_down, warm_up

warm_up()
try:
    rehearse(Trial(RunConfig.from_flat({"env": "CartPole-v1"})))
except PreflightError as error:
    print(error)
cool_down()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": exit code 1, OSError: libcudart.so.12: cannot open\n")
    assert done.stderr.count("Traceback") == 1
    assert f'File "{tmp_path}/torch.py", line 1' in done.stderr


def test_what_the_forkserver_imports_survives_a_fork() -> None:
    """It starts no thread, opens no file, and imports no compiler."""
    counts = textwrap.dedent(
        """
        import importlib, os, sys
        from juggler.runtime.actors.processes import PRELOAD

        def counted():
            return [len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")]

        before = counted()
        for name in PRELOAD:
            importlib.import_module(name)
        assert not {"sympy", "torch._dynamo"} & sys.modules.keys()
        print(before, counted())
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", counts], capture_output=True, text=True, timeout=120, check=True
    )
    before, after = done.stdout.strip().split("] [")
    assert before.strip("[]") == after.strip("[]")
