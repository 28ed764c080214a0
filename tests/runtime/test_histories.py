"""Runs in simulated time, with faults that a seed draws: see `support/runtime_world.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support import runtime_world
from support.runtime_world import History, play, search, simulated_run
from support.simulation import Violation

from juggler.driver.workers.worker_events import WorkerEvents
from juggler.envrunner.envrunner_worker import EnvRunner
from juggler.learner.group.peers import Peers
from juggler.learner.process.hosted_module import Membership
from juggler.runtime.actors import hub
from juggler.runtime.actors.endpoints import SERVER_OPTIONS
from juggler.runtime.actors.requests import RequestPool
from juggler.runtime.episodes.version import Version

DEATHS = ("a_worker_is_killed", "a_learner_is_killed")
STANDSTILLS = ("a_worker_stands_still", "the_driver_stands_still", "an_environment_hangs")
NETWORK = ("a_connection_breaks", "the_network_is_cut_for_a_while", "a_stream_of_batches_breaks")
EVERYTHING = (*DEATHS, *STANDSTILLS, *NETWORK, "the_wall_clock_jumps")

#: By name: what may happen.
CLASSES = {
    "deaths": History(kinds=DEATHS),
    "standstills": History(kinds=STANDSTILLS),
    "network": History(kinds=NETWORK, duplicates=0.1),
    "everything": History(kinds=EVERYTHING, faults=6, duplicates=0.05),
    "groups": History(kinds=EVERYTHING, faults=6, duplicates=0.05, learners=2, batch_size=40),
    "large states": History(kinds=("a_learner_is_killed",), learners=2, slow_saves=9.0, hang=120.0),
}
SEEDS = 12
MORE = 1000


@pytest.fixture(scope="module", autouse=True)
def in_simulated_time() -> Iterator[None]:
    with simulated_run():
        yield


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MORE, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CLASSES)
def test_a_run_survives_what_happens(name: str, seeds: int, tmp_path: Path) -> None:
    """No worker is lost without cause; no step counts twice."""
    search(CLASSES[name], range(seeds), tmp_path)


def test_a_seed_gives_the_same_history_again(tmp_path: Path) -> None:
    first, second = (play(CLASSES["groups"], 7, tmp_path) for _ in range(2))
    assert first == second


# Faults of the past, each put back: a history shows it.


def _watch_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that counts its own standstill as its workers' silence."""

    async def watch(self: Any) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_seconds)
            now = self._loop.time()
            for connection in list(self._connections.values()):
                if now - connection.last_seen > self._settings.silence_seconds:
                    connection.over, connection.unresponsive = "no heartbeat", True
                    connection.cancel()

    monkeypatch.setattr(hub.Hub, "watch", watch)


def _pings_end_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC ends a stopped driver's connection after an unanswered ping."""
    monkeypatch.setattr(hub, "WATCHFUL_SERVER_OPTIONS", SERVER_OPTIONS)


def _no_wait_for_a_large_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners take one that saves for long for lost."""
    monkeypatch.setattr(Peers, "wait_for_all", lambda self, work: work())


def _groups_of_the_past_are_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that is behind spends time on abandoned groups."""
    form = Membership.form

    def formed(self: Any, group: Any, learner: Any, superseded: Callable[[], bool]) -> Any:
        answers = chain([False], iter(superseded, None))
        return form(self, group, learner, lambda: next(answers))

    monkeypatch.setattr(Membership, "form", formed)


def _a_failed_update_brings_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new member reports its weights; the group's seem impossible."""
    updated, made = WorkerEvents._updated, WorkerEvents._made

    def heard(self: Any, worker: Any, done: Any) -> None:
        self.said = Version.of(done.version)
        updated(self, worker, done)

    def booked(self: Any, update: Any, metrics: Any) -> None:
        made(self, replace(update, version=self.said), metrics)

    monkeypatch.setattr(WorkerEvents, "_updated", heard)
    monkeypatch.setattr(WorkerEvents, "_made", booked)


def _first_weights_are_due_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that is still joining its group counts as lost."""
    never = property(lambda _: False, lambda _, __: None)
    monkeypatch.setattr(runtime_world._Subscription, "answered", never, raising=False)


def _a_wait_for_weights_hears_of_no_other_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler waits for weights of a learner that is gone."""

    def act_on(self: Any, streams: Any, at_least: Any) -> bool:
        return streams.act_on(at_least, self._loop.over, lambda _: None)

    monkeypatch.setattr(EnvRunner, "_act_on", act_on)


def _an_answer_counts_each_time_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts that come twice count twice, also of killed runners."""
    replied = RequestPool._replied

    def again(self: Any, worker: Any, reply: Any) -> Any:
        pending = self._in_flight.get(worker, {})
        before = dict(pending)
        completed = replied(self, worker, reply)
        pending.update(before)
        return completed

    monkeypatch.setattr(RequestPool, "_replied", again)


@pytest.mark.slow  # of the simulated world: whether it would show them
@pytest.mark.parametrize(
    ("fault", "history", "seen"),
    [
        (_watch_by_the_clock, History(kinds=("the_driver_stands_still",)), "without a cause"),
        (_pings_end_connections, History(kinds=("the_driver_stands_still",)), "without a cause"),
        (_no_wait_for_a_large_state, CLASSES["large states"], "stands still"),
        (_groups_of_the_past_are_formed, CLASSES["large states"], "stands still"),
        (_a_failed_update_brings_weights, CLASSES["large states"], "sent an invalid message"),
        (_first_weights_are_due_soon, CLASSES["large states"], "LearnerOutOfReach"),
        (
            _a_wait_for_weights_hears_of_no_other_learner,
            History(kinds=("a_learner_is_killed",)),
            "hung: no progress",
        ),
        (
            _an_answer_counts_each_time_it_comes,
            History(kinds=("a_worker_is_killed",), duplicates=0.1),
            "steps sampled, of at most",
        ),
    ],
)
def test_a_history_shows_a_fault_of_the_past(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: Callable[[pytest.MonkeyPatch], None],
    history: History,
    seen: str,
) -> None:
    fault(monkeypatch)
    with pytest.raises(Violation, match=seen):
        search(history, range(60), tmp_path)
