"""Records of workers: counts only grow, and errors stay visible."""

from __future__ import annotations

import pytest

from juggler.driver.record.worker_records import MOST_GONE, WorkerRecords
from juggler.runtime.actors.hub import Worker, WorkerLeft
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import attach_pb2

V = Version(1, 1)


def _worker(incarnation: str, worker_id: str = "envrunner-0") -> Worker:
    role, _, index = worker_id.partition("-")
    return Worker(worker_id, incarnation, role, int(index), "host", 1, (), (), False)


def _records() -> tuple[WorkerRecords, Worker]:
    records, worker = WorkerRecords(), _worker("a")
    records.joined(worker)
    return records, worker


def test_states_from_joining_to_being_replaced() -> None:
    records, worker = _records()
    record = records.by_id["envrunner-0"]
    states = [record.state]
    records.ready(worker)
    states.append(record.state)
    records.left(WorkerLeft(worker, "the connection broke"))
    states.append(record.state)
    records.exited(Exited("envrunner-0", 1, "killed by SIGKILL", 0.5))
    states.append(record.state)
    records.joined(_worker("b"))
    states.append(record.state)
    records.exited(Exited("envrunner-0", 1, "exit code 1", None))
    states.append(record.state)
    assert states == ["starting", "ready", "left", "restarting", "starting", "down"]


def test_the_last_restart_is_that_of_the_newest_worker_with_what_ended_the_one_before() -> None:
    records, worker = _records()
    assert not records.last_restart
    records.left(WorkerLeft(worker, "it failed", attach_pb2.Failure(message="no contact")))
    assert not records.last_restart, "its place is still empty"
    records.exited(Exited("envrunner-0", 1, "exit code 1", 0.5))
    records.joined(_worker("b"))
    assert records.last_restart == "envrunner-0: no contact"


def test_a_failure_that_is_heard_of_after_the_exit_is_the_reason_of_the_restart() -> None:
    records, worker = _records()
    records.exited(Exited("envrunner-0", worker.pid, "exit code 1", 0.5))
    records.left(WorkerLeft(worker, "it failed", attach_pb2.Failure(message="no contact")))
    assert records.last_restart == "envrunner-0: no contact"


def test_totals_go_on_where_another_process_takes_the_place() -> None:
    records, _ = _records()
    records.worked("envrunner-0", 10, V)
    records.spent("envrunner-0", {"inference": 2.0, "waiting": 1.0})
    records.spent("envrunner-0", {"inference": 3.0, "waiting": 1.0})
    records.counted("envrunner-0", {"inferences": 7})
    records.joined(_worker("b"))
    records.spent("envrunner-0", {"inference": 0.5})
    records.counted("envrunner-0", {"inferences": 2, "inferred_rows": 5})
    records.worked("envrunner-0", 5, V)
    record = records.by_id["envrunner-0"]
    assert record.total_seconds() == {"inference": 3.5, "waiting": 1.0}
    assert records.seconds() == {"envrunner": {"inference": 3.5, "waiting": 1.0}}
    assert records.counts() == record.total_counts() == {"inferences": 9, "inferred_rows": 5}
    assert (record.steps, record.restarts) == (15, 1)


def test_who_is_here_and_who_is_started_again_is_never_forgotten() -> None:
    records = WorkerRecords()
    for index in range(2 * MOST_GONE):
        records.joined(_worker("a", f"learner-{index}"))
    restarting = [f"learner-{index}" for index in range(MOST_GONE)]
    for name in restarting:
        worker = records.by_id[name].worker
        assert worker is not None
        records.left(WorkerLeft(worker, "the connection broke"))
        records.exited(Exited(name, 1, "killed by SIGKILL", 0.5))
    for index in range(2 * MOST_GONE):
        worker = _worker("a", f"envrunner-{index}")
        records.joined(worker)
        records.left(WorkerLeft(worker, "the connection broke"))
    back = _worker("b", f"envrunner-{2 * MOST_GONE - 1}")
    records.joined(back)
    assert len(records.by_id) == 3 * MOST_GONE
    assert all(f"learner-{index}" in records.by_id for index in range(2 * MOST_GONE))
    assert records.by_id[back.worker_id].worker is back


def test_rates_are_over_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("juggler.driver.record.worker_records.time.monotonic", lambda: now)
    records, _ = _records()
    for _ in range(30):
        records.mark()
        now += 1.0
        records.worked("envrunner-0", 50, V)
    assert records.rates() == pytest.approx({"envrunner-0": 50})
    now += 1e6
    records.mark()
    now += 1.0
    assert records.rates() == {"envrunner-0": 0.0}
