"""What a process is let do: time, files, signals, logs."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from support.hub_world import World

from juggler.runtime.actors import attachment, hub
from juggler.runtime.actors.attachment import BusyThreads
from juggler.runtime.actors.hub import WorkerConnection, WorkerJoined, WorkerReplied, WorkerReported
from juggler.runtime.actors.logs import WorkerLog
from juggler.runtime.actors.processes import children, kill_children, process_descriptor
from juggler.runtime.actors.requests import Histogram, RequestPool
from juggler.runtime.actors.resources import resident_bytes, seconds_used, seconds_waited
from juggler.runtime.wire.v1 import attach_pb2

_SPIN = "import os, time; os.sched_setaffinity(0, {CPU}); end = time.monotonic() + 60\n"


@pytest.mark.slow
def test_two_processes_on_one_processor_wait_for_each_other() -> None:
    cpu = str(min(os.sched_getaffinity(0)))
    program = _SPIN.replace("CPU", cpu) + "while time.monotonic() < end: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    try:
        deadline = time.monotonic() + 60
        while min(seconds_waited(each.pid) for each in spinning) < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert seconds_used(each.pid for each in spinning) > 0
    finally:
        for each in spinning:
            each.kill()
            each.wait()
    assert seconds_waited(spinning[0].pid) == 0.0
    assert seconds_used([spinning[0].pid]) == 0.0


@pytest.mark.parametrize("starved", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_a_silent_worker_that_waits_for_a_processor_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, starved: bool, local: bool
) -> None:
    now = 0.0
    monkeypatch.setattr(hub, "seconds_waited", lambda _: 50.0 + now if starved else 50.0)
    worker: Any = SimpleNamespace(local=local, pid=1)
    connection = WorkerConnection(worker, asyncio.Event(), lambda: True, now)
    for now in range(20):
        silent = connection.silent(now)
    assert (silent < 10) is (local and starved)
    now = 1000
    assert connection.silent(now) >= 100, "in the end, even one that never runs is lost"


class Threads(BusyThreads):
    """In simulated time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = self.waited = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(attachment, "time", clock)
        monkeypatch.setattr(attachment, "thread_waited", lambda *_: self.waited)


def test_a_busy_thread_that_waits_for_a_processor_or_makes_progress_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, me = Threads(monkeypatch), threading.get_ident()
    with threads.busy():
        threads.longest()
        threads.now, threads.waited = 5.0, 4.0
        assert threads.longest() == (1.0, me)
        threads.progresses()
        assert threads.longest()[0] == 0.0
        threads.now += 3
        assert threads.longest() == (3.0, me)
        threads.add_suspension(2.0)
        assert threads.longest() == (1.0, me)
    assert threads.longest() == (0.0, 0)


def test_a_thread_that_hangs_is_found_while_another_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, begun, over = Threads(monkeypatch), threading.Event(), threading.Event()

    def hang() -> None:
        with threads.busy():
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=hang)
    with threads.busy():
        thread.start()
        assert begun.wait(30)
        for _ in range(5):
            threads.now += 1
            threads.progresses()
        longest = threads.longest()
    with threads.busy():  # now the younger of the two
        again = threads.longest()
    over.set()
    thread.join()
    assert longest == again == (5.0, thread.ident)


# The limit of open files: raised to its maximum, and handed down.


SCRIPT = """
import json, os, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
from juggler.runtime.actors.resources import allow_many_open_files
allow_many_open_files()
files = [open(os.devnull) for _ in range(200)]
child = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
handed_down = int(subprocess.check_output([sys.executable, "-c", child]))
print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), handed_down]))
"""


@pytest.mark.slow
def test_the_soft_limit_is_raised_to_the_hard_one_here_and_in_children() -> None:
    said = subprocess.check_output([sys.executable, "-c", SCRIPT], timeout=60)
    assert json.loads(said) == [[256, 256], 256]


@pytest.mark.slow
def test_a_limit_that_is_too_low_is_named() -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 24))
from juggler.runtime.actors.resources import allow_many_open_files
allow_many_open_files(24)
try:
    allow_many_open_files(25)
except ValueError as error:
    print(error)
"""
    said = subprocess.check_output([sys.executable, "-c", program], timeout=60, text=True)
    assert said.startswith("a process may have 24 files open at once here, and this one needs 25")


# Processes that must not outlive another one are watched, and killed.


@pytest.mark.slow
@pytest.mark.parametrize("has_function", [True, False])
def test_a_descriptor_of_a_process_is_readable_once_it_has_ended(
    has_function: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_function:
        monkeypatch.delattr(os, "pidfd_open")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = process_descriptor(process.pid)
    try:
        assert not os.get_inheritable(descriptor)
        assert not select.select([descriptor], [], [], 0)[0]
        process.communicate(b"\n", timeout=60)
        assert select.select([descriptor], [], [], 60)[0]
    finally:
        os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        process_descriptor(process.pid)


@pytest.mark.slow
def test_a_child_that_is_claimed_a_little_after_it_exists_lives() -> None:
    program = ["sh", "-c", "sleep 60 & echo $!; sleep 60 & echo $!; wait"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        claimed, _ = (int(parent.stdout.readline()) for _ in range(2))
        claims: chain[set[int]] = chain([set()], repeat({claimed}))
        try:
            kill_children(parent.pid, but=lambda: next(claims))
            assert children(parent.pid) == {claimed}
        finally:
            for each in children(parent.pid):
                os.kill(each, signal.SIGKILL)


# Programs that are started by a process that uses gRPC.


PROGRAM = """
import os, time
from juggler.runtime.actors.endpoints import bind, dial
import grpc
from concurrent.futures import ThreadPoolExecutor

answer = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server = grpc.server(ThreadPoolExecutor(1))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Say": answer}),))
address = bind(server, "127.0.0.1:0")
server.start()
with dial(address) as channel:
    assert channel.unary_unary("/test/Say")(b"hello", timeout=30) == b"hello"
server.stop(None).wait()
for _ in range(5):
    if not (pid := os.fork()):
        time.sleep(0.05)
        os._exit(len(os.listdir("/proc/self/task")))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
def test_what_is_forked_has_no_threads_of_grpc(run_python: Callable[..., str]) -> None:
    assert run_python("-c", PROGRAM).split() == ["1"] * 5


# A worker's own lines say whose they are.


def test_a_line_for_people_has_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog("envrunner")
    log.error("no driver answers")
    log.identify("run1", "envrunner-3", "abc")
    log.info("attached")
    assert capsys.readouterr().err.splitlines() == [
        "juggler envrunner: no driver answers",
        "juggler envrunner-3 (run run1, incarnation abc): attached",
    ]


def test_a_line_for_machines_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog("envrunner", "json")
    log.identify("run1", "envrunner-3", "abc")
    log.error("two\nlines of 100 % trouble")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert datetime.fromisoformat(record.pop("time")).tzinfo is not None
    assert record == {
        "level": "error",
        "run": "run1",
        "worker": "envrunner-3",
        "incarnation": "abc",
        "pid": os.getpid(),
        "message": "two\nlines of 100 % trouble",
    }


# What heartbeats tell of a worker, and how long its answers take.


def test_a_hub_knows_when_it_heard_a_worker_and_how_much_memory_it_has(world: World) -> None:
    world.start()
    attachment = world.attach()
    attachment.device_bytes = lambda: 123
    attachment.beat(2.0)
    attachment.report(attach_pb2.Refusal())
    world.wait_for(WorkerReported)  # behind that heartbeat
    (vital,) = world.hub.vitals().values()
    assert vital.device_bytes == 123
    assert 0 <= vital.seconds_silent < 60
    assert 0 < vital.cpu_seconds <= time.process_time()
    assert vital.resident_bytes == pytest.approx(resident_bytes(), rel=0.5)


def test_a_histogram_counts_by_upper_bounds() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.1, 100):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 2]
    assert histogram.sum == pytest.approx(114.6)


def test_a_pool_measures_the_commands_that_it_is_told_to(world: World) -> None:
    world.start()
    histogram = Histogram((0.0, 60.0))
    pool = RequestPool(world.hub, latencies={attach_pb2.Stop: histogram})
    attachment = world.attach()
    joined = world.wait_for(WorkerJoined)
    pool.complete(joined)
    for command in (attach_pb2.Stop(), attach_pb2.Done()):
        command_id = pool.submit(joined.worker, command)
        for last in (False, True):
            attachment.reply(command_id, attach_pb2.Done(), last=last)
            (completed,) = pool.complete(world.wait_for(WorkerReplied))
            assert (completed.last, pool.in_flight(joined.worker)) == (last, not last)
    assert histogram.counts == [0, 1, 0], "one command of that kind, once"
    assert histogram.sum > 0
