"""Records of workers: counts only grow, and errors stay visible."""

from __future__ import annotations

import pytest

from juggler.driver.reporting.worker_histories import MOST_GONE, WorkerHistories
from juggler.runtime.actors.hub import Worker, WorkerLeft
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import attach_pb2

V = Version(1, 1)


def _worker(incarnation: str, worker_id: str = "envrunner-0") -> Worker:
    role, _, index = worker_id.partition("-")
    return Worker(worker_id, incarnation, role, int(index), "host", 1, (), (), False)


def _histories() -> tuple[WorkerHistories, Worker]:
    histories, worker = WorkerHistories(), _worker("a")
    histories.joined(worker)
    return histories, worker


def test_states_from_joining_to_being_replaced() -> None:
    histories, worker = _histories()
    history = histories.by_id["envrunner-0"]
    states = [history.state]
    histories.ready(worker)
    states.append(history.state)
    histories.left(WorkerLeft(worker, "the connection broke"))
    states.append(history.state)
    histories.exited(Exited("envrunner-0", 1, "killed by SIGKILL", 0.5))
    states.append(history.state)
    histories.joined(_worker("b"))
    states.append(history.state)
    histories.exited(Exited("envrunner-0", 1, "exit code 1", None))
    states.append(history.state)
    assert states == ["starting", "ready", "left", "restarting", "starting", "down"]


def test_the_last_restart_is_that_of_the_newest_worker_with_what_ended_the_one_before() -> None:
    histories, worker = _histories()
    assert not histories.last_restart
    histories.left(WorkerLeft(worker, "it failed", attach_pb2.Failure(message="no contact")))
    assert not histories.last_restart, "its place is still empty"
    histories.exited(Exited("envrunner-0", 1, "exit code 1", 0.5))
    histories.joined(_worker("b"))
    assert histories.last_restart == "envrunner-0: no contact"


def test_a_failure_that_is_heard_of_after_the_exit_is_the_reason_of_the_restart() -> None:
    histories, worker = _histories()
    histories.exited(Exited("envrunner-0", worker.pid, "exit code 1", 0.5))
    histories.left(WorkerLeft(worker, "it failed", attach_pb2.Failure(message="no contact")))
    assert histories.last_restart == "envrunner-0: no contact"


def test_totals_go_on_where_another_process_takes_the_place() -> None:
    histories, _ = _histories()
    histories.worked("envrunner-0", 10, V)
    histories.spent("envrunner-0", {"inference": 2.0, "waiting": 1.0})
    histories.spent("envrunner-0", {"inference": 3.0, "waiting": 1.0})
    histories.counted("envrunner-0", {"inferences": 7})
    histories.joined(_worker("b"))
    histories.spent("envrunner-0", {"inference": 0.5})
    histories.counted("envrunner-0", {"inferences": 2, "inferred_rows": 5})
    histories.worked("envrunner-0", 5, V)
    history = histories.by_id["envrunner-0"]
    assert history.total_seconds() == {"inference": 3.5, "waiting": 1.0}
    assert histories.seconds() == {"envrunner": {"inference": 3.5, "waiting": 1.0}}
    assert histories.counts() == history.total_counts() == {"inferences": 9, "inferred_rows": 5}
    assert (history.steps, history.restarts) == (15, 1)


def test_who_is_here_and_who_is_started_again_is_never_forgotten() -> None:
    histories = WorkerHistories()
    for index in range(2 * MOST_GONE):
        histories.joined(_worker("a", f"learner-{index}"))
    restarting = [f"learner-{index}" for index in range(MOST_GONE)]
    for name in restarting:
        worker = histories.by_id[name].worker
        assert worker is not None
        histories.left(WorkerLeft(worker, "the connection broke"))
        histories.exited(Exited(name, 1, "killed by SIGKILL", 0.5))
    for index in range(2 * MOST_GONE):
        worker = _worker("a", f"envrunner-{index}")
        histories.joined(worker)
        histories.left(WorkerLeft(worker, "the connection broke"))
    back = _worker("b", f"envrunner-{2 * MOST_GONE - 1}")
    histories.joined(back)
    assert len(histories.by_id) == 3 * MOST_GONE
    assert all(f"learner-{index}" in histories.by_id for index in range(2 * MOST_GONE))
    assert histories.by_id[back.worker_id].worker is back


def test_rates_are_over_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("juggler.driver.reporting.worker_histories.time.monotonic", lambda: now)
    histories, _ = _histories()
    for _ in range(30):
        histories.mark()
        now += 1.0
        histories.worked("envrunner-0", 50, V)
    assert histories.rates() == pytest.approx({"envrunner-0": 50})
    now += 1e6
    histories.mark()
    now += 1.0
    assert histories.rates() == {"envrunner-0": 0.0}
