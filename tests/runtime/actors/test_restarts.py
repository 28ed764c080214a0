"""Workers and programs restart after exits, until they fail too often."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import NEVER, QUICK, Exits, eventually

from juggler.runtime.actors import processes
from juggler.runtime.actors import supervisor as supervisor_module
from juggler.runtime.actors.command_processes import CommandLine
from juggler.runtime.actors.processes import children
from juggler.runtime.actors.supervisor import RestartPolicy, Supervisor

CRASH, KILLED = -signal.SIGSEGV, -signal.SIGKILL
LATER = RestartPolicy(first_delay=60.0, longest_delay=60.0, quarantine_after=9, enough_uses=2)
_pids = count(1 << 23)  # beyond all process ids of Linux


class Life:
    """A process that ends when a test says so."""

    def __init__(self) -> None:
        self.pid, self.exitcode = next(_pids), None
        self.sentinel, self._end = os.pipe()

    def end(self, exitcode: int) -> None:
        self.exitcode: int | None = exitcode
        end, self._end = self._end, -1
        if end >= 0:
            os.close(end)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        pass

    def kill(self) -> None:
        if self.is_alive():
            self.end(KILLED)

    def __del__(self) -> None:
        os.close(self.sentinel)


class Lives:
    """A program, and the processes that were started of it."""

    def __init__(self) -> None:
        self.started: SimpleQueue[Life] = SimpleQueue()

    def start(self, title: str) -> Life:
        life = Life()
        self.started.put(life)
        return life

    def ended(self, process: Any) -> str:
        return ""


class World:
    """A supervisor of one worker, in simulated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.exits, self.program = Exits(), Lives()
        self.supervisor = Supervisor(self.exits.events.put)

    def add(self, policy: RestartPolicy) -> None:
        self.supervisor.add("worker-0", self.program, policy)

    def live(self, uses: int = 0) -> Life:
        """The next life, after N uses."""
        life = self.program.started.get(timeout=60)
        while self.supervisor.pids().get("worker-0") != life.pid:
            pass  # its supervisor is about to note it
        for _ in range(uses):
            self.supervisor.of_use("worker-0")
        return life

    def give_up(self, life: Life) -> None:
        self.supervisor.give_up("worker-0", life.pid)

    def is_restarted(self) -> bool:
        return self.exits.next().restart_in is not None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    yield made
    made.supervisor.close(grace=0.0)
    assert made.program.started.empty(), "one that stays down was started"


def at_once(**keys: Any) -> RestartPolicy:
    return RestartPolicy(0.0, 0.0, **keys)


#: By name: a policy, and of each life: its uses, how it ends, and whether another one follows.
def test_pauses_double_from_the_first_to_the_longest() -> None:
    policy = RestartPolicy(first_delay=0.5, longest_delay=3.0)
    assert [policy.delay(deaths, 0.0) for deaths in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert policy.delay(1, 1.0) == 0.625


HISTORIES: dict[str, tuple[RestartPolicy, list[tuple[int, int, bool]]]] = {
    "it keeps dying": (
        at_once(quarantine_after=3),
        [(0, 7, True), (0, 7, True), (0, 7, False)],
    ),
    "it is of little use each time": (
        at_once(quarantine_after=3, enough_uses=2),
        [(1, CRASH, True), (2, CRASH, True), (1, CRASH, True), (1, CRASH, False)],
    ),
    "others kill it after one use": (
        at_once(quarantine_after=3, enough_uses=2),
        [(1, KILLED, True)] * 3 + [(0, KILLED, True), (0, KILLED, False)],
    ),
    "it ends in order after a failure": (
        at_once(until_success=True),
        [(0, 7, True), (0, KILLED, True), (0, 0, False)],
    ),
    "it dies too often, however much use it is": (
        at_once(most_in_window=4),
        [(1, 7, True)] * 3 + [(1, 7, False)],
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_worker_is_started_again_until_it_has_failed_too_often(world: World, name: str) -> None:
    policy, lives = HISTORIES[name]
    world.add(policy)
    for uses, exitcode, restarted in lives:
        world.live(uses).end(exitcode)
        assert world.is_restarted() == restarted
    assert world.supervisor.pids() == {}


def test_deaths_are_forgotten_with_time(world: World) -> None:
    world.add(at_once(most_in_window=2, window_seconds=60.0))
    for _ in range(3):
        world.live(1).end(7)
        assert world.is_restarted()
        world.now += 61.0
    world.live()


@pytest.mark.parametrize("reported", ["before it ends", "after it ended", "in the next life"])
def test_a_worker_that_fails_again_as_before_stays_down(world: World, reported: str) -> None:
    world.add(at_once(quarantine_after=9, enough_uses=2))
    world.live().end(CRASH)
    assert world.is_restarted()
    again = world.live()
    if reported == "before it ends":
        world.give_up(again)
    elif reported == "after it ended":
        world.supervisor._slots["worker-0"].policy = LATER
    again.end(CRASH)
    if reported == "after it ended":
        assert world.is_restarted()
        world.give_up(again)
    elif reported == "in the next life":
        assert world.is_restarted()
        after = world.live()
        world.give_up(again)
        assert world.supervisor.pids()["worker-0"] == after.pid
        after.end(CRASH)
    assert not world.is_restarted()


@pytest.mark.parametrize("ended", [False, True])
def test_a_worker_that_fails_again_after_enough_use_is_started_again(
    world: World, ended: bool
) -> None:
    world.add(at_once(quarantine_after=9, enough_uses=2))
    for _ in range(3):
        life = world.live(uses=2)
        if not ended:
            world.give_up(life)
        life.end(CRASH)
        assert world.is_restarted()
        if ended:
            world.give_up(life)
    world.live()


def test_one_that_is_let_go_between_two_lives_is_told_once_to_stay_down(world: World) -> None:
    world.add(LATER)
    world.live().end(7)
    assert world.is_restarted()
    world.supervisor.dismiss("worker-0", 60.0)
    world.supervisor.dismiss("worker-0", 0.0)
    other = Lives()
    world.supervisor.add("worker-1", other, NEVER)
    other.started.get(timeout=60).end(7)
    ends = [world.exits.next() for _ in range(2)]
    assert [(each.worker_id, each.restart_in) for each in ends] == [
        ("worker-0", None),
        ("worker-1", None),
    ]


def test_processes_that_end_while_their_supervisor_closes_do_not_disturb_it() -> None:
    for _ in range(200):
        program, supervisor = Lives(), Supervisor(Exits().events.put)
        for index in range(3):
            supervisor.add(f"worker-{index}", program, NEVER)
        lives = [program.started.get(timeout=60) for _ in range(3)]
        closing = threading.Thread(target=supervisor.close, args=(1.0,))
        closing.start()
        for life in lives:
            life.end(KILLED)
        closing.join(60)
        assert not closing.is_alive()


# Programs that are no workers are started, watched and ended as workers are.


def shell(script: str, log: Path) -> CommandLine:
    return CommandLine(["sh", "-c", script], log)


@pytest.mark.slow
def test_a_command_is_started_again_until_it_has_ended_too_often(tmp_path: Path) -> None:
    exits, log = Exits(), tmp_path / "logs" / "game.log"
    supervisor = Supervisor(exits.events.put)
    supervisor.add("game-0", shell("echo early; echo loads; echo no world >&2; exit 3", log), QUICK)
    try:
        ends = [exits.next() for _ in range(3)]
    finally:
        supervisor.close(grace=0.0)
    how = "exit code 3, its last output: early | loads | no world"
    assert [each.how for each in ends] == [how] * 3
    assert [each.restart_in is None for each in ends] == [False, False, True]
    assert log.read_text() == "early\nloads\nno world\n" * 3


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events.put)
    supervisor.add("game-0", CommandLine(["/no/such/game"], tmp_path / "log"), QUICK)
    try:
        assert "there is no program '/no/such/game'" in exits.next().how
    finally:
        supervisor.close(grace=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "closed"])
def test_what_a_command_has_started_ends_with_it(tmp_path: Path, end: str) -> None:
    exits, written = Exits(), tmp_path / "pid"
    supervisor = Supervisor(exits.events.put)
    script = f"sleep 1000 & echo $! > {written}; wait"
    supervisor.add("game-0", shell(script, tmp_path / "log"), QUICK)
    try:
        eventually(lambda: written.exists() and written.read_text().endswith("\n"))
        below = int(written.read_text())
        if end == "killed":
            os.kill(supervisor.pids()["game-0"], signal.SIGKILL)
            assert exits.next().how.startswith("killed by SIGKILL")
    finally:
        supervisor.close(grace=0.0)
    eventually(lambda: not Path(f"/proc/{below}").exists() or " Z " in _stat(below))


@pytest.mark.slow
def test_a_command_dies_with_the_process_that_started_it() -> None:
    script = (
        "import os; from juggler.runtime.actors.command_processes import CommandLine; "
        "print(CommandLine(['sleep', '1000']).start().pid, flush=True); os.kill(os.getpid(), 9)"
    )
    read, write = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", script],
        dict(os.environ),
        file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)],
    )
    os.close(write)
    with os.fdopen(read) as said:
        command = int(said.readline())
    os.waitpid(pid, 0)
    eventually(lambda: not Path(f"/proc/{command}").exists() or " Z " in _stat(command))
    assert command not in children(os.getpid())


def _stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "


# Processes that the surrounding program starts with multiprocessing's forkserver.


#: As one has for its own processes, such as those of a vector of environments.
PROGRAM_WITH_ITS_OWN = """
    import multiprocessing, time
    from juggler.runtime.actors.processes import WorkerProgram, cool_down, warm_up

    theirs = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    theirs.start()
    warm_up()
    ours = WorkerProgram("time:sleep", 0).start("worker")
    ours.join()
    WorkerProgram.ended(ours)
    cool_down()
    theirs.join(0.5)
    print(ours.exitcode, theirs.is_alive())
    theirs.kill()
"""


#: Such as those of a DataLoader. The forkserver stays for them, and only for them.
PROGRAM_THAT_USES_OURS = """
    import multiprocessing, time
    from juggler.runtime.actors import processes
    from juggler.runtime.actors.processes import WorkerProgram, cool_down, warm_up

    warm_up()
    theirs = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    theirs.start()
    ours = WorkerProgram("time:sleep", 0).start("worker")
    ours.join()
    WorkerProgram.ended(ours)
    theirs.join(0.5)
    said = [theirs.is_alive()]
    left = WorkerProgram("time:sleep", 60).start("worker")
    cool_down()
    left.join(30)
    said += [theirs.is_alive(), processes.forkserver_pid() > 0, left.exitcode]
    WorkerProgram.ended(left)
    theirs.kill()
    theirs.join()
    cool_down()
    print(*said, processes.forkserver_pid())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [(PROGRAM_WITH_ITS_OWN, "0 True\n"), (PROGRAM_THAT_USES_OURS, "True True True -9 0\n")],
    ids=["a forkserver that was there before", "processes below Juggler's forkserver"],
)
def test_what_is_the_scripts_own_outlives_the_workers(program: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == said


def test_a_process_that_another_thread_closes_meanwhile_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = multiprocessing.Process(target=time.sleep, args=(0,))
    closed.close()
    monkeypatch.setattr(multiprocessing.process, "_children", {closed})
    assert processes._of_the_script() == set()
