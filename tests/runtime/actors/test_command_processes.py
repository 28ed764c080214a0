"""Programs that are no workers are started, watched and ended as workers are."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support.processes import QUICK, Exits, eventually

from juggler.runtime.actors.command_processes import CommandLine
from juggler.runtime.actors.processes import children
from juggler.runtime.actors.supervisor import Supervisor


def shell(script: str, log: Path) -> CommandLine:
    return CommandLine(["sh", "-c", script], log)


def test_a_command_is_started_again_until_it_has_ended_too_often(tmp_path: Path) -> None:
    exits, log = Exits(), tmp_path / "logs" / "game.log"
    supervisor = Supervisor(exits.events)
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
    supervisor = Supervisor(exits.events)
    supervisor.add("game-0", CommandLine(["/no/such/game"], tmp_path / "log"), QUICK)
    try:
        assert "there is no program '/no/such/game'" in exits.next().how
    finally:
        supervisor.close(grace=0.0)


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_what_a_command_has_started_ends_with_it(tmp_path: Path, end: str) -> None:
    exits, written = Exits(), tmp_path / "pid"
    supervisor = Supervisor(exits.events)
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
