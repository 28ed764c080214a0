"""Workers that end are started again, until they fail too often."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.processes import NEVER, QUICK, Exits, eventually, sleeper

from juggler.runtime.actors.processes import WorkerProgram
from juggler.runtime.actors.supervisor import RestartPolicy, Supervisor

#: One that a supervisor's thread starts ends with that thread.
pytestmark = pytest.mark.usefixtures("one_forkserver")


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
    supervisor.add("worker-0", sleeper(), QUICK)
    try:
        for _ in range(6):
            os.kill(eventually(lambda: supervisor.pids().get("worker-0")), signal.SIGKILL)
            assert exits.next().restart_in is not None
            supervisor.of_use("worker-0")  # before it can die again
    finally:
        supervisor.close(grace=0.0)


def test_a_worker_that_dies_after_little_use_each_time_stays_down_in_the_end() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    policy = RestartPolicy(0.01, 0.05, quarantine_after=3, enough_uses=2)
    supervisor.add("worker-0", sleeper(), policy)
    try:
        for uses, stays_down in ((1, False), (2, False), (1, False), (1, True)):
            pid = eventually(lambda: supervisor.pids().get("worker-0"))
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
    supervisor.add("worker-0", sleeper(), policy)
    try:
        for life in range(2):
            pid = eventually(lambda: supervisor.pids().get("worker-0"))
            if life == 1 and heard == "before it ends":
                supervisor.give_up("worker-0", pid)
            os.kill(pid, signal.SIGSEGV)
            exited = exits.next()
        if heard == "after it ended":
            assert exited.restart_in is not None
            supervisor.give_up("worker-0", pid)
            exited = exits.next()
        if heard == "in the next life":
            after = eventually(lambda: supervisor.pids().get("worker-0"))
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
    supervisor.add("worker-0", sleeper(), policy)
    try:
        for _ in range(3):
            pid = eventually(lambda: supervisor.pids().get("worker-0"))
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
    supervisor.add("worker-0", sleeper(), policy)
    try:
        for _ in range(4):
            pid = eventually(lambda: supervisor.pids().get("worker-0"))
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


def test_one_that_is_let_go_between_two_lives_is_told_once_to_stay_down() -> None:
    exits = Exits()
    supervisor = Supervisor(exits.events)
    policy = RestartPolicy(first_delay=60.0, longest_delay=60.0)
    supervisor.add("worker-0", WorkerProgram("os:_exit", 7), policy)
    try:
        assert exits.next().restart_in is not None
        supervisor.dismiss("worker-0", 60.0)
        supervisor.dismiss("worker-0", 0.0)
        supervisor.add("worker-1", WorkerProgram("os:_exit", 7), NEVER)
        ends = [exits.next() for _ in range(2)]
        assert [(each.worker_id, each.restart_in) for each in ends] == [
            ("worker-0", None),
            ("worker-1", None),
        ]
    finally:
        supervisor.close(grace=0.0)
