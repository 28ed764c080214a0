"""Exits of worker processes that no driver of this host started."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from support.changes import SkippedTime

from juggler import cli
from juggler.cli import main, worker
from juggler.cli.arguments import PREDECESSOR, WorkerArguments
from juggler.envrunner import envrunner_worker
from juggler.runtime.actors import worker as actors_worker
from juggler.runtime.actors.attachment import AttachError, Attachment, Contact
from juggler.runtime.actors.hub import Hub, HubSettings, Mailbox, WorkerJoined
from juggler.runtime.actors.worker import DriverLost
from juggler.runtime.wire.v1 import attach_pb2

_PATIENCE = 200.0  # seconds until a test fails; nothing takes as long

#: Threads are in C++ code, and come back to Python while the interpreter would be taken apart.
_BUSY = """
import atexit, sys, threading, time, torch
from juggler.cli import command_line

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

def multiply():
    the_end.wait()
    while True:
        matrix @ matrix

def begin_to_multiply():
    the_end.set()
    time.sleep(0.5)

matrix, sys.slow, the_end = torch.ones(500, 500), Slow(), threading.Event()
atexit.register(begin_to_multiply)
for _ in range(2):
    threading.Thread(target=multiply, daemon=True).start()
command_line()
"""

_LEAVES = """
import atexit, ctypes, sys, threading, time
from juggler.runtime.actors.processes import leave

class Kept:
    def __del__(self):
        print("taken apart")

def write():
    threading.main_thread().join(0.2)
    print("written by a thread")

sys.kept = Kept()
atexit.register(print, "registered")
ctypes.CDLL(None).puts(b"printed by C")
threading.Thread(target=write).start()
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
leave(CODE)
"""


@pytest.mark.long
@pytest.mark.parametrize("role", ["learner", "envrunner", "evaluator"])
def test_a_worker_whose_threads_are_busy_at_its_end_has_the_status_of_its_work(role: str) -> None:
    events: Mailbox[object] = Mailbox()
    hub = Hub(HubSettings(run_id="run", roles=(role,)), events)
    (address,) = hub.start(["127.0.0.1:0"])
    program = [sys.executable, "-c", _BUSY, role, "--driver", address]
    worker = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    try:
        (joined,) = events.gather(_PATIENCE)
        assert isinstance(joined, WorkerJoined)
        assert hub.send(joined.worker, 1, attach_pb2.Stop())
        _, said = worker.communicate(timeout=_PATIENCE)
        assert worker.returncode == 0, said
        assert said.splitlines()[-1].endswith(": stopped by the driver"), said
    finally:
        worker.kill()
        worker.communicate()
        hub.close()


def _left(code: int | str | None) -> subprocess.CompletedProcess[str]:
    program = _LEAVES.replace("CODE", repr(code))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=_PATIENCE
    )


@pytest.mark.long
def test_who_leaves_does_all_that_python_does_at_its_end_but_take_itself_apart() -> None:
    for code, status, words in ((3, 3, ""), ("no listener", 1, "no listener\n")):
        done = _left(code)
        assert {*done.stdout.splitlines()} == {"printed by C", "written by a thread", "registered"}
        assert (done.returncode, done.stderr) == (status, words)
    assert _left(None).returncode == 0


# A worker that waits for a driver, the first or another one, ends as any program does.


WAITS = "import sys; from juggler.cli import command_line; command_line()"
WORKER = ["envrunner", "--driver", "127.0.0.1:9"]


@pytest.mark.long
@pytest.mark.parametrize("ignored", [False, True], ids=["of a terminal", "of nohup"])
def test_it_ends_with_its_terminal_unless_nohup_started_it(ignored: bool) -> None:
    hangs_up = signal.SIG_IGN if ignored else signal.SIG_DFL
    waits = subprocess.Popen(
        [sys.executable, "-c", WAITS, *WORKER],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, PREDECESSOR: "the first life"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangs_up),
    )
    assert waits.stderr is not None
    with waits:
        assert "dials the driver" in waits.stderr.readline()
        waits.send_signal(signal.SIGHUP)
        if ignored:
            with pytest.raises(subprocess.TimeoutExpired):
                waits.wait(0.5)
            waits.send_signal(signal.SIGTERM)
        assert waits.wait(60) == 1
        assert "terminated before a driver had answered" in waits.stderr.read()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="making a namespace takes root")
def test_it_ends_also_as_process_1() -> None:
    waits = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", WAITS, *WORKER],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waits.stderr is not None
    with waits:
        assert "dials the driver" in waits.stderr.readline()
        (first,) = psutil.Process(waits.pid).children()
        first.terminate()
        try:
            assert waits.wait(30) == 1
        finally:
            if waits.returncode is None:
                first.kill()


def test_a_command_that_is_interrupted_says_so_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    module = types.SimpleNamespace(run=interrupted)
    monkeypatch.setattr(cli.importlib, "import_module", lambda _: module)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert cli.main(["evaluate", "runs/demo"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "juggler evaluate: interrupted, left at once\n"


#: Interrupted when it imports its first module of this name.
_INTERRUPTED_IMPORT = """
import sys
from juggler.cli import command_line

class Interrupts:
    def find_spec(self, name, *_):
        if name == interrupted:
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
_, interrupted, *words = sys.argv
sys.argv = ["juggler", *words]
command_line()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("juggler.runtime.near_matches", "trian"),
        ("juggler.runtime.actors.processes", "worker learner"),
        ("juggler.cli.worker", "learner"),
        ("tyro", "status runs/demo"),
    ],
)
def test_an_interrupted_import_leaves_no_traceback(module: str, command: str) -> None:
    words = [sys.executable, "-c", _INTERRUPTED_IMPORT, module, *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE)
    assert done.returncode == 130
    assert re.fullmatch("(juggler .*: interrupted, left at once\n)?", done.stderr)


@pytest.mark.slow
def test_nothing_slow_is_imported_before_an_interruption_is_handled() -> None:
    program = (
        "import sys; before = {*sys.modules}; import juggler.cli; print({*sys.modules} - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    found = ast.literal_eval(done.stdout)
    assert {each for each in found if each.startswith("juggler")} == {"juggler", "juggler.cli"}
    assert not found & {"typing", "re", "multiprocessing", "contextlib", "numpy"}


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["--help"], ["status", "--help"], ["train", "--list"]])
def test_a_command_whose_reader_has_left_ends_in_silence(arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "juggler", *arguments],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert done.stderr == b""
    assert done.returncode in (1, 128 + signal.SIGPIPE), "1 where rich has noticed"


# A parent may leave a command closed streams, blocked signals, and worse.


SURROUNDINGS_PROGRAM = """
import os, pathlib, signal, subprocess, sys, types
from juggler import cli

def run(arguments):
    print("this has no reader")
    found = [
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        subprocess.run(["false"]).returncode,
        *(os.readlink(f"/proc/self/fd/{number}") for number in range(3)),
    ]
    pathlib.Path(arguments[0]).write_text(repr(found))
    return 0

sys.modules["probe"] = types.SimpleNamespace(run=run)
cli.COMMANDS["new"] = ("probe:run", "")
cli.command_line()
"""


def _spoil() -> None:
    os.closerange(0, 3)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@pytest.mark.long
def test_a_command_needs_no_streams_and_neither_its_parents_signals(tmp_path: Path) -> None:
    found = tmp_path / "found"
    command = [sys.executable, "-c", SURROUNDINGS_PROGRAM, "new", str(found)]
    assert subprocess.Popen(command, preexec_fn=_spoil).wait(50) == 0
    assert found.read_text() == repr([set(), 1, *["/dev/null"] * 3])


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="making a namespace takes root")
def test_a_first_process_of_a_container_is_terminated_before_its_command_listens() -> None:
    program = """
import sys, time, types
from juggler import cli

def run(arguments):
    print("here", flush=True)
    time.sleep(600)

sys.modules["probe"] = types.SimpleNamespace(run=run)
cli.COMMANDS["new"] = ("probe:run", "")
cli.command_line()
"""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", program, "new"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as namespace:
        assert namespace.stdout is not None
        assert namespace.stdout.readline() == "here\n"
        (first,) = psutil.Process(namespace.pid).children()
        first.terminate()
        try:
            assert namespace.wait(10) == 128 + signal.SIGTERM
        finally:
            namespace.kill()


@pytest.mark.long
def test_a_working_directory_that_was_deleted_is_one_sentence(tmp_path: Path) -> None:
    def lose() -> None:
        os.rmdir(os.getcwd())

    gone = tmp_path / "gone"
    gone.mkdir()
    command = [sys.executable, "-m", "juggler", "runs"]
    done = subprocess.run(
        command, cwd=gone, preexec_fn=lose, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "working directory was deleted" in done.stderr


#: What the system lacks fails to import, as it does there.
ELSEWHERE = """
import sys
sys.platform = {system!r}
sys.modules |= dict.fromkeys(["fcntl", "resource", "pwd", "grp", "termios"])
sys.argv = ["juggler", *{arguments!r}]
from juggler.cli import main
sys.exit(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["train", "cartpole"], ["status"]])
def test_on_other_systems_the_first_line_says_what_runs_it(
    system: str, arguments: list[str], tmp_path: Path
) -> None:
    code = ELSEWHERE.format(system=system, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert first.startswith("juggler runs on Linux. On macOS and Windows, use docker")
    assert "docker run --rm --init -v runs:/runs juggler train cartpole" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())


# What is said where `juggler status` and workers dial something that is not a driver.


@pytest.fixture
def learner() -> Iterator[str]:
    """Return the address of a gRPC server without a driver's methods."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_who_asks_a_learner_for_the_status_is_told_that_it_is_no_driver(
    learner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--once", learner]) == 1
    said = capsys.readouterr().err
    assert f"juggler status: the server at {learner} is not a driver, but perhaps a learner" in said
    assert "Method not found" not in said


def test_a_worker_that_dials_a_learner_is_told_that_it_is_no_driver(learner: str) -> None:
    with pytest.raises(AttachError, match=f"^the server at {learner} is not a driver"):
        Attachment(Contact(learner), "worker", Mailbox())


# What workers do that dialed a driver which is gone, and another one takes its place.


def test_a_worker_whose_driver_is_gone_begins_again_at_the_next_as_who_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Contact] = []
    monkeypatch.setattr(actors_worker, "time", SkippedTime())
    monkeypatch.setattr(
        worker,
        "_restart",
        lambda: begun.append(WorkerArguments(driver="127.0.0.1:9").contact("learner")),
    )

    def loses_its_driver() -> None:
        raise DriverLost("the first life")

    worker.work(Contact("127.0.0.1:9", reattach_seconds=60.0), loses_its_driver)
    with pytest.raises(DriverLost):
        worker.work(Contact("127.0.0.1:9"), loses_its_driver)
    (waits,) = begun
    assert (waits.predecessor, waits.timeout) == ("the first life", waits.reattach_seconds)
    assert PREDECESSOR not in os.environ
    assert WorkerArguments(driver="127.0.0.1:9").contact("learner").timeout < waits.timeout


def test_an_evaluator_dials_in_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Any] = []
    monkeypatch.setattr(envrunner_worker, "main", programs.append)
    monkeypatch.setattr(worker, "work", lambda contact, main: main())
    worker.run(["evaluator", "--driver", "127.0.0.1:9"])
    (program,) = programs
    assert (program.role, program.contact.address) == ("evaluator", "127.0.0.1:9")
