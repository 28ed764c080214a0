"""Real processes: killed, stopped, orphaned."""

from __future__ import annotations

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

from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.processes import WorkerProgram, cool_down, start, warm_up
from juggler.runtime.actors.supervisor import Exited, RestartPolicy, Supervisor

QUICK = RestartPolicy(first_delay=0.01, longest_delay=0.05, quarantine_after=3)
NEVER = RestartPolicy(quarantine_after=1)


@pytest.fixture(autouse=True, scope="module")
def _no_forkserver_is_left() -> Iterator[None]:
    yield
    cool_down()


def _eventually(what: Any, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := what():
            return result
        time.sleep(0.02)
    raise AssertionError(f"it did not happen within {seconds} s")


class Exits:
    """What a supervisor tells, one after the other."""

    def __init__(self) -> None:
        self.events: Mailbox[Any] = Mailbox()
        self._waiting: list[Any] = []

    def next(self, seconds: float = 30.0) -> Exited:
        deadline = time.monotonic() + seconds
        while not self._waiting and time.monotonic() < deadline:
            self._waiting += self.events.gather(deadline - time.monotonic())
        assert self._waiting, "nothing ended"
        exited = self._waiting.pop(0)
        assert isinstance(exited, Exited)
        return exited


def _sleeper() -> WorkerProgram:
    return WorkerProgram("time:sleep", 60)


def test_a_process_is_titled_by_role_and_index() -> None:
    process = start(_sleeper(), "envrunner 3")
    try:
        titled = _eventually(
            lambda: "juggler: envrunner 3" in " ".join(psutil.Process(process.pid).cmdline())
        )
        assert titled
    finally:
        process.kill()
        process.join()


def test_a_killed_process_is_started_again_and_the_kill_is_told() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    supervisor.add("worker-0", _sleeper(), QUICK)
    try:
        first = _eventually(lambda: supervisor.pids().get("worker-0"))
        os.kill(first, signal.SIGKILL)
        exited = exits.next()
        assert (exited.worker_id, exited.pid, exited.how) == (
            "worker-0",
            first,
            "killed by SIGKILL",
        )
        assert exited.restart_in is not None
        second = _eventually(lambda: supervisor.pids().get("worker-0"))
        assert second != first
        assert supervisor.restarts == 1
    finally:
        supervisor.close(grace=0.0)
    _eventually(lambda: not psutil.pid_exists(second))  # the forkserver has yet to reap it


def test_a_process_that_fails_says_why_and_ends_whatever_its_threads_do(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "raise MemoryError('no room for the replay')\n"
    )
    exits = Exits()
    supervisor = Supervisor(exits.events)
    supervisor.add("worker-0", WorkerProgram("runpy:run_path", str(script)), NEVER)
    try:
        assert exits.next(60).how == "killed by SIGALRM, MemoryError: no room for the replay"
    finally:
        supervisor.close(grace=0.0)


def test_what_keeps_dying_stays_down_in_the_end() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    supervisor.add("worker-0", WorkerProgram("os:_exit", 7), QUICK)
    try:
        ends = [exits.next() for _ in range(3)]
        assert [exited.how for exited in ends] == ["exit code 7"] * 3
        assert [exited.restart_in is None for exited in ends] == [False, False, True]
        assert supervisor.pids() == {}
    finally:
        supervisor.close(grace=0.0)


def test_a_worker_that_was_of_use_is_not_held_to_old_failures() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    supervisor.add("worker-0", _sleeper(), QUICK)
    try:
        for _ in range(6):
            os.kill(_eventually(lambda: supervisor.pids().get("worker-0")), signal.SIGKILL)
            assert exits.next().restart_in is not None
            supervisor.of_use("worker-0")  # before it can die again
    finally:
        supervisor.close(grace=0.0)


def test_a_worker_that_dies_after_little_use_each_time_stays_down_in_the_end() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    policy = RestartPolicy(0.01, 0.05, quarantine_after=3, enough_uses=2)
    supervisor.add("worker-0", _sleeper(), policy)
    try:
        for uses, stays_down in ((1, False), (2, False), (1, False), (1, True)):
            pid = _eventually(lambda: supervisor.pids().get("worker-0"))
            for _ in range(uses):
                supervisor.of_use("worker-0")
            os.kill(pid, signal.SIGSEGV)
            assert (exits.next().restart_in is None) == stays_down
        assert supervisor.keeps_failing("worker-0")
    finally:
        supervisor.close(grace=0.0)


@pytest.mark.parametrize("heard", ["before it ends", "after it ended", "in the next life"])
def test_a_worker_that_fails_again_as_before_stays_down(heard: str) -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    delay = 0.01 if heard == "in the next life" else 1.0
    policy = RestartPolicy(delay, delay, quarantine_after=9, enough_uses=2)
    supervisor.add("worker-0", _sleeper(), policy)
    try:
        for life in range(2):
            pid = _eventually(lambda: supervisor.pids().get("worker-0"))
            if life == 1 and heard == "before it ends":
                supervisor.give_up("worker-0", pid)
            os.kill(pid, signal.SIGSEGV)
            exited = exits.next()
        if heard == "after it ended":
            assert exited.restart_in is not None
            supervisor.give_up("worker-0", pid)
            exited = exits.next()
        if heard == "in the next life":
            after = _eventually(lambda: supervisor.pids().get("worker-0"))
            supervisor.give_up("worker-0", pid)
            assert supervisor.pids()["worker-0"] == after
            os.kill(after, signal.SIGSEGV)
            exited = exits.next()
        assert exited.restart_in is None
        time.sleep(1.2)
        assert "worker-0" not in supervisor.pids()
    finally:
        supervisor.close(grace=0.0)


@pytest.mark.parametrize("ended", [False, True])
def test_a_worker_that_fails_again_after_enough_use_is_started_again(ended: bool) -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    policy = RestartPolicy(0.01, 0.01, quarantine_after=9, enough_uses=2)
    supervisor.add("worker-0", _sleeper(), policy)
    try:
        for _ in range(3):
            pid = _eventually(lambda: supervisor.pids().get("worker-0"))
            for _ in range(2):
                supervisor.of_use("worker-0")
            if not ended:
                supervisor.give_up("worker-0", pid)
            os.kill(pid, signal.SIGSEGV)
            assert exits.next().restart_in is not None
            if ended:
                supervisor.give_up("worker-0", pid)
    finally:
        supervisor.close(grace=0.0)


def test_a_worker_that_others_kill_needs_to_have_been_of_use_but_once() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    policy = RestartPolicy(0.01, 0.05, quarantine_after=3, enough_uses=2)
    supervisor.add("worker-0", _sleeper(), policy)
    try:
        for _ in range(4):
            pid = _eventually(lambda: supervisor.pids().get("worker-0"))
            supervisor.of_use("worker-0")
            os.kill(pid, signal.SIGKILL)
            assert exits.next().restart_in is not None
    finally:
        supervisor.close(grace=0.0)


def test_a_worker_that_dies_too_often_stays_down_however_much_use_it_is_in_between() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    policy = RestartPolicy(first_delay=0.01, longest_delay=0.01, most_in_window=4)
    supervisor.add("worker-0", WorkerProgram("os:_exit", 7), policy)
    try:
        for _ in range(3):
            assert exits.next().restart_in is not None
            supervisor.of_use("worker-0")
        assert exits.next().restart_in is None
    finally:
        supervisor.close(grace=0.0)


def test_deaths_are_forgotten_with_time() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    policy = RestartPolicy(first_delay=0.3, longest_delay=0.3, most_in_window=2, window_seconds=0.2)
    supervisor.add("worker-0", WorkerProgram("os:_exit", 7), policy)
    try:
        for _ in range(3):
            assert exits.next().restart_in is not None
            supervisor.of_use("worker-0")
    finally:
        supervisor.close(grace=0.0)


def test_one_that_must_not_be_restarted_stays_down_at_once() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    supervisor.add("worker-0", WorkerProgram("os:_exit", 1), NEVER)
    try:
        assert exits.next().restart_in is None
    finally:
        supervisor.close(grace=0.0)


def test_a_worker_that_leaves_when_the_run_is_over_is_not_replaced() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    supervisor.add("worker-0", _sleeper(), QUICK)
    supervisor.add("worker-1", _sleeper(), QUICK)
    try:
        _eventually(lambda: len(supervisor.pids()) == 2)
        supervisor.stop_restarting()
        os.kill(supervisor.pids()["worker-0"], signal.SIGKILL)
        assert exits.next().restart_in is None
        time.sleep(0.3)  # QUICK would have started another one by now
        assert list(supervisor.pids()) == ["worker-1"]
        assert supervisor.restarts == 0
    finally:
        supervisor.close(grace=0)


def test_a_stopped_process_can_be_killed_and_is_replaced() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    supervisor.add("worker-0", _sleeper(), QUICK)
    try:
        first = _eventually(lambda: supervisor.pids().get("worker-0"))
        os.kill(first, signal.SIGSTOP)
        supervisor.kill("worker-0", pid=first + 1)  # somebody else's: nothing happens
        assert psutil.pid_exists(first)
        supervisor.kill("worker-0", pid=first)
        assert exits.next().how == "killed by SIGKILL"
        assert _eventually(lambda: supervisor.pids().get("worker-0")) != first
    finally:
        supervisor.close(grace=0.0)


def test_processes_that_end_while_the_supervisor_closes_do_not_disturb_it() -> None:
    warm_up()
    for turn in range(20):
        supervisor = Supervisor(Mailbox())
        for index in range(3):
            supervisor.add(f"worker-{index}", _sleeper(), NEVER)
        pids = _eventually(lambda: len(found := supervisor.pids()) == 3 and found)  # noqa: B023
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        time.sleep(turn * 0.0002)  # so that they are noticed before, in the midst of it, or after
        supervisor.close(grace=1.0)


def _stopped_forkserver() -> psutil.Process:
    cool_down()
    warm_up()
    # By its id: it may not have the title, nor even its own command line, yet.
    server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    server.suspend()
    return server


def test_a_start_that_fails_is_told_and_tried_again() -> None:
    server = _stopped_forkserver()
    events: Mailbox[Any] = Mailbox()
    supervisor = Supervisor(events)
    supervisor.add("worker-0", _sleeper(), QUICK)
    time.sleep(0.2)  # it waits for an answer by now; if not yet, the new forkserver gives one
    try:
        server.kill()
        pid = _eventually(lambda: supervisor.pids().get("worker-0"))
        assert psutil.pid_exists(pid)
        for exited in events.gather():
            assert "could not be started" in exited.how
            assert exited.restart_in is not None
    finally:
        supervisor.close(grace=0.0)
        cool_down()


def test_a_forkserver_that_does_not_answer_holds_nobody_up() -> None:
    server = _stopped_forkserver()
    supervisor = Supervisor(Mailbox())
    supervisor.add("worker-0", _sleeper(), QUICK)
    time.sleep(0.2)  # in the midst of starting it
    before = time.monotonic()
    supervisor.add("worker-1", _sleeper(), QUICK)
    supervisor.kill("worker-0", pid=1)
    supervisor.close(grace=0.0)
    cool_down()
    assert time.monotonic() - before < 10
    assert not server.is_running()


def test_delays_double_up_to_a_limit() -> None:
    policy = RestartPolicy(first_delay=1.0, longest_delay=5.0)
    assert [policy.delay(n, jitter=0.0) for n in (1, 2, 3, 4, 9)] == [1, 2, 4, 5, 5]
    assert policy.delay(1, jitter=1.0) == pytest.approx(1.25)


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import time
            from juggler.runtime.actors.processes import WorkerProgram, cool_down, start, warm_up

            print(start(WorkerProgram("time:sleep", 60), "worker 0").pid, flush=True)
            time.sleep(60)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert psutil.pid_exists(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _eventually(lambda: not psutil.pid_exists(child))


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(
            """
            from juggler.runtime.actors.processes import WorkerProgram, cool_down, start, warm_up

            print("once", flush=True)
            process = start(WorkerProgram("builtins:print", "in the worker"), "worker 0")
            process.join()
            raise SystemExit(process.exitcode)
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines(), done.returncode) == (["once", "in the worker"], 0), done


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
        timeout=50,
        start_new_session=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forkserver_that_was_there_before_is_used_and_left_alone() -> None:
    """A program may have one for its own processes, such as those of a vector of environments."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM_WITH_ITS_OWN)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 True\n"


PROGRAM_WITH_ITS_OWN = """
    import multiprocessing, time
    from juggler.runtime.actors.processes import WorkerProgram, cool_down, ended, start, warm_up

    theirs = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    theirs.start()
    warm_up()
    ours = start(WorkerProgram("time:sleep", 0), "worker")
    ours.join()
    ended(ours)
    cool_down()
    theirs.join(0.5)
    print(ours.exitcode, theirs.is_alive())
    theirs.kill()
"""
