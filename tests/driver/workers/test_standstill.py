"""What is reported where nothing comes or comes too late."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.workers_world import ROWS, SHAPE, STEPS, WorkersWorld

from juggler.driver.config import RunConfig
from juggler.driver.core.events import UsedBatch, WorkerKey
from juggler.driver.core.ledger import OpenBatch
from juggler.driver.periodic_work import EndlessEpisodes, PeriodicWork, Standstill, waits_for
from juggler.driver.reporting.metrics import Metrics
from juggler.driver.reporting.progress import PlainProgress
from juggler.driver.reporting.wording import age, conclude
from juggler.driver.workers import trained_modules as learners
from juggler.driver.workers import worker_events
from juggler.driver.workers.trained_modules import StaleRunners
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.envrunner_program import ENVRUNNER
from juggler.runtime.actors import requests
from juggler.runtime.actors.hub import Vitals, Worker
from juggler.runtime.wire.v1 import training_pb2

SECONDS = 7.0


def _standstill_of(
    world: WorkersWorld, cpu_seconds: Callable[[], float], **keys: Any
) -> Standstill:
    """A run of this configuration, with local workers' CPU seconds."""
    world.parts.config = RunConfig.from_flat({**SHAPE, **keys})
    supervisor = SimpleNamespace(of_use=lambda _: None)
    local = SimpleNamespace(cpu_seconds=cpu_seconds, supervisor=supervisor)
    world.parts.local = cast(Any, local)
    return Standstill(world.parts)


class World(WorkersWorld):
    """With a clock that the test winds on."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
        self.now = 100.0
        for module in (requests, worker_events, learners):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        super().__init__(directory, **keys)
        self.standstill = _standstill_of(self, lambda: 0.0, worker_timeout_seconds=SECONDS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_an_envrunner_that_brings_nothing_is_named_once(world: World) -> None:
    assert world.standstill.silent_runners() == []
    world.now += SECONDS - 1
    assert world.standstill.silent_runners() == []
    world.now += 1
    (text,) = world.standstill.silent_runners()
    assert text.startswith(
        "envrunner-0 on host has had requests for 2 batches and has sent none for 7 s. Other"
    )
    world.now += SECONDS
    assert world.standstill.silent_runners() == [], "it was said"


def test_it_is_named_with_a_line_of_metrics_also_where_nothing_is_trained_on(world: World) -> None:
    periodic_work = PeriodicWork(world.parts, cast(Any, None), [], lambda: None)
    periodic_work.standstill = world.standstill
    periodic_work.write_line = lambda: {}  # type: ignore[method-assign]
    periodic_work._intervals = cast(Any, SimpleNamespace(due=lambda: ["line"]))
    world.parts.local = cast(Any, SimpleNamespace(directory_is_gone=lambda: ""))
    periodic_work.on_intervals()
    assert not [text for text in world.told.messages if "has sent none" in text]
    world.now += SECONDS
    periodic_work.on_intervals()
    periodic_work.on_intervals()
    (text,) = [text for text in world.told.messages if "has sent none for 7 s" in text]
    assert "Are its environments slow, or stuck?" in text


def test_a_group_that_takes_long_to_form_is_told_once(world: World) -> None:
    assert world.standstill.slow_groups() == ""
    world.now += 5.0
    text = world.standstill.slow_groups()
    assert text.startswith("a group of learners has not formed within 5 s: learner-0. L")
    world.now += 5.0
    assert world.standstill.slow_groups() == "", "it was said"
    ((command_id, group),) = world.asked(world.learner, training_pb2.Group)
    formed = training_pb2.GroupFormed(generation=group.generation, module_id=group.module_id)
    world.reply(world.learner, command_id, formed)
    world.now += 5.0
    assert world.standstill.slow_groups() == ""


def test_environments_hang_where_each_takes_much_longer_than_ever_before(world: World) -> None:
    runner = "envrunner-0"
    stuck = {runner: Vitals(0.1, 0, 0, 0.0, held_up_by="step of environment 1 (Robot)")}
    world.now += 2
    world.sample(0)  # the longest so far
    world.now += 3.5
    assert world.standstill.hung_runners(stuck) == "", "environments may be slow"
    world.now += 1
    text = "envrunner-0 for 6 s, in step of environment 1 (Robot)"
    assert world.standstill.hung_runners(stuck) == text
    waits = {runner: Vitals(0.1, 0, 0, 0.0)}
    assert world.standstill.hung_runners(waits) == "", "it waits for weights, say"


def _standstill(directory: Path, used: list[float]) -> Standstill:
    """Local workers that have used this many CPU seconds at each look."""
    world = WorkersWorld(directory)
    return _standstill_of(world, lambda: used.pop(0), worker_timeout_seconds=60.0)


def test_workers_that_are_at_work_on_their_start_are_waited_for(tmp_path: Path) -> None:
    standstill = _standstill(tmp_path, [3.0, 6.0])
    for _ in range(2):
        assert standstill.check().startswith("no update in the last 60 s")
        assert standstill.starting


def test_nobody_is_waited_for_for_ever(tmp_path: Path) -> None:
    standstill = _standstill(tmp_path, [10.0 * n for n in range(1, 11)])
    waited = []
    for _ in range(10):
        standstill.check()
        waited.append(standstill.starting)
    assert waited == [True] * 9 + [False]


# What a run says that it waits for before its first update.


@pytest.mark.parametrize(
    ("gateway", "said"),
    [
        (True, "waiting for a simulator to dial in"),
        (False, "EnvRunners make their environments, CartPole-v1"),
    ],
)
def test_a_run_whose_envrunners_are_starting_says_what_they_wait_for(
    gateway: bool, said: str
) -> None:
    registry = SimpleNamespace(
        attached={"envrunner-0": SimpleNamespace(role=ENVRUNNER)}, of_role=lambda role: []
    )
    config = RunConfig.from_flat({"env": "CartPole-v1"})
    config.env_runner.gateway = gateway
    parts = SimpleNamespace(config=config, registry=registry, core=None)
    assert waits_for(cast(Any, parts)) == said


def test_the_first_update_is_said_to_be_under_way_and_its_steps_are_not_said_to_be_missing(
    tmp_path: Path,
) -> None:
    world = WorkersWorld(tmp_path, batch_size=40)
    assert waits_for(world.parts) == "0 of 40 steps for the first update"
    world.sample(0)
    assert waits_for(world.parts) == "20 of 40 steps for the first update"
    world.sample(1)
    assert waits_for(world.parts) == "the first update is under way"
    told = Standstill(world.parts).describe_workers()
    assert "an update needs 40 steps, and has 0, besides the steps of an update under way" in told


# StaleRunners: which runner is named because its samples come too late, and how often.


LEARNER = WorkerKey("learner-0", "a")


class StaleRunnersWorld:
    def __init__(self) -> None:
        self.runners = StaleRunners(max_staleness=6)
        self._next_id = 0

    def sampled(self, worker_id: str, batches: int, every: int = 0) -> None:
        """N batches, every n-th of which was stale; 0: none."""
        for number in range(1, batches + 1):
            self._next_id += 1
            batch = OpenBatch(self._next_id, WorkerKey(worker_id, "a"), LEARNER, 512)
            dropped = "stale" if every and number % every == 0 else ""
            used = UsedBatch(self._next_id, 512, 9, dropped)
            self.runners.answered([used], {self._next_id: batch})


def test_an_envrunner_whose_batches_are_all_stale_is_named_once() -> None:
    stale = StaleRunnersWorld()
    for _ in range(4):
        stale.sampled("envrunner-0", 50)
        stale.sampled("envrunner-1", 1, every=1)
        assert stale.runners.check() == [], "that may be chance"
    stale.sampled("envrunner-1", 1, every=1)
    (text,) = stale.runners.check()
    assert text.startswith(
        "100% of the recent steps of envrunner-1 were dropped as stale: more than max_staleness"
    )
    for _ in range(200):
        stale.sampled("envrunner-0", 50)
        stale.sampled("envrunner-1", 1, every=1)
        assert stale.runners.check() == []


def test_a_few_stale_batches_of_a_healthy_run_are_not_announced() -> None:
    stale = StaleRunnersWorld()
    for _ in range(20):
        stale.sampled("envrunner-0", 100, every=20)
        assert stale.runners.check() == []


def test_steps_that_came_too_old_to_a_gateway_count_too() -> None:
    stale = StaleRunnersWorld()
    for _ in range(20):
        stale.sampled("envrunner-0", 1)
        stale.runners.brought("envrunner-0", 512)
    (text,) = stale.runners.check()
    assert text.startswith("50% of the recent steps of envrunner-0")


def test_what_a_learner_answers_is_booked_for_who_sampled_it(tmp_path: Path) -> None:
    stale = WorkersWorld(tmp_path)
    for number in range(10):
        stale.sample(number)
        command_id, update = stale.asked(stale.learner, training_pb2.Update)[-1]
        done = training_pb2.UpdateDone(update_id=update.update_id)
        for batch_id in update.batch_ids:
            done.batches.add(
                batch_id=batch_id, live_steps=ROWS * STEPS, staleness=9, dropped="stale"
            )
        stale.reply(stale.learner, command_id, done)
    (text,) = stale.parts.modules["default"].stale_runners.check()
    assert text.startswith("100% of the recent steps of envrunner-0")
    assert stale.core.ledger.dropped["stale"] == 10 * ROWS * STEPS


# An EnvRunner that cannot reach a learner which is here is told of, with the reason.


WHY = "connection refused"


def test_batches_that_keep_missing_a_learner_are_told_with_the_reason(world: World) -> None:
    def answers(number: int, after: float, dropped: str = "learner_lost") -> list[str]:
        """What people are told when a request is answered so much later."""
        before = len(world.told.messages)
        world.now += after
        world.sample(number, dropped=dropped, explanation=WHY if dropped else "")
        return world.told.messages[before:]

    assert answers(0, 0.0) == [], "it may just have ended"
    assert answers(1, 4.9) == []
    (text,) = answers(2, 0.2)
    expected = "envrunner-0 on host do not reach learner-0 on host at : connection refused. They"
    assert expected in text
    assert world.told.levels[-1] == "warning"
    answers(3, 100.0, "")  # one that gets there ends it
    assert answers(4, 2.0) == []
    assert len(answers(5, 5.0)) == 1


# Learners that are all here and cannot update together: people are told why.


NO_GROUP = "cannot reach the learner at gpu2:5006"


class GroupsWorld(World):
    """With learners at addresses."""

    def get_ready(self, worker: Worker, *module_ids: str) -> None:
        if worker.role != "learner":
            return super().get_ready(worker, *module_ids)
        for number, module in self.asked(worker, training_pb2.AddModule):
            where = {"module_id": module.module_id, "meeting_point": "tls:gpu1:5006"}
            self.reply(worker, number, training_pb2.ModuleReady(**where))

    def fail_to_meet(self, why_first: str = NO_GROUP) -> list[str]:
        """The notice after members of the newest group lost each other."""
        before = len(self.told.messages)
        for learner in self.learners:
            number, group = self.asked(learner, training_pb2.Group)[-1]
            why = why_first if learner is self.learner else "the learner before this one has left"
            formed = training_pb2.GroupFormed(generation=group.generation, peer_lost=why)
            self.reply(learner, number, formed)
        self.now += 1.5
        met = self.parts.modules["default"].to_meet_again()
        assert met is not None
        self.parts.happened(met)
        return [text for text in self.told.messages[before:] if "cannot update together" in text]


def test_each_learner_s_reason_is_told_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = GroupsWorld(tmp_path, monkeypatch, num_learners=2)
    (text,) = groups.fail_to_meet()
    assert f"learner-0: {NO_GROUP}; learner-1: the learner before this one has left. It is" in text
    assert groups.fail_to_meet() == []
    groups.now += 60.0
    assert len(groups.fail_to_meet()) == 1


# Where no episode ends for long: how old the mean return is, and the hint at a limit.


def test_the_age_of_the_mean_return_is_the_time_since_an_episode_ended() -> None:
    metrics = Metrics()
    assert metrics.line(3.0, 100)["episode_return_age"] is None, "there is no mean yet"
    metrics.episodes_ended([-6578.0], [3000])
    assert metrics.line(5.0, 200)["episode_return_age"] == 0.0
    assert metrics.line(65.0, 5200)["episode_return_age"] == 60.0
    assert metrics.steps_without_an_end == 5000
    metrics.episodes_ended([-6578.0], [3000])
    assert metrics.line(70.0, 5300)["episode_return_age"] == 0.0, "the same return, but of now"
    assert metrics.steps_without_an_end == 0


@pytest.mark.parametrize(
    ("seconds", "said"), [(None, ""), (9.9, ""), (10.0, "10.0 s"), (83, "1:23")]
)
def test_an_old_mean_is_shown_with_its_age(seconds: float | None, said: str) -> None:
    line: dict[str, Any] = {
        "wall_time": 700.0,
        "episode_return_mean": -6578.0,
        "episode_return_age": seconds,
        "env_steps_trained": 778_000,
        "steps_per_second": 1000.0,
        "staleness_mean": 1.0,
        "updates": 5,
        "num_env_runners": 2,
    }
    assert age(line) == said
    stream = io.StringIO()
    PlainProgress(stream).update(line)
    old = f" ({said} old)" if said else ""
    assert f"return -6578.0{old}  steps  778k" in stream.getvalue()
    assert f"return -6578.0{old} after 778k steps" in conclude(line)


def _world(directory: Path, steps: int, lengths: list[int], **keys: Any) -> WorkersWorld:
    """Environments that made N steps each since these episodes ended."""
    world = WorkersWorld(directory, **keys)
    metrics = world.parts.metrics
    metrics.episodes_ended([-1.0] * len(lengths), lengths)
    metrics.line(1.0, 1000)
    metrics.line(2.0, (1000 if lengths else 0) + steps * ROWS)
    return world


@pytest.mark.parametrize(
    ("steps", "lengths", "told"),
    [
        (4999, [], False),
        (5000, [], True),
        (5000, [10, 20], True),
        (5000, [10, 2501], False),
        (5002, [10, 2501], True),
    ],
)
def test_a_hint_comes_once_where_no_episode_has_ended_for_long(
    tmp_path: Path, steps: int, lengths: list[int], told: bool
) -> None:
    world = _world(tmp_path, steps, lengths)
    endless = EndlessEpisodes(EnvRunnerConfig(env="CliffWalking-v1", envs_per_runner=ROWS))
    texts = endless.check(world.parts)
    assert len(texts) == told
    if told:
        assert f"no episode has ended in the last {steps:,} steps of each environment" in texts[0]
        assert ("the return is of earlier episodes" in texts[0]) == bool(lengths)
        assert texts[0].endswith("set a limit: max_episode_steps = 1000")
    assert endless.check(world.parts) == []


@pytest.mark.parametrize("left", [0, 1])
def test_steps_of_envrunners_that_are_gone_are_not_taken_for_those_of_one_environment(
    tmp_path: Path, left: int
) -> None:
    world = _world(tmp_path, 0, [10], num_env_runners=4)
    runners = [world.runner, *(world.join("envrunner", index) for index in (1, 2, 3))]
    for runner in runners[1:]:
        world.get_ready(runner)
    endless = EndlessEpisodes(EnvRunnerConfig(env="CliffWalking-v1", envs_per_runner=ROWS))
    assert endless.check(world.parts) == []
    world.parts.metrics.line(3.0, 1000 + 4 * 4999 * ROWS)
    for runner in runners[left:]:
        world.leave(runner)
    assert endless.check(world.parts) == []
    world.parts.metrics.line(4.0, 1000 + 4 * 5000 * ROWS)
    (text,) = endless.check(world.parts)
    assert "in the last 5,000 steps of each environment" in text


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        ({"env": "mine:Env"}, "set a limit: max_episode_steps = 1000"),
        ({"env": "dm_env_rpc://host:1"}, "have the simulator truncate them"),
        ({"gateway": "127.0.0.1:0"}, "have the simulator truncate them"),
    ],
)
def test_the_hint_is_what_the_environment_can_do(
    tmp_path: Path, keys: dict[str, Any], remedy: str
) -> None:
    world = _world(tmp_path, 5000, [])
    (text,) = EndlessEpisodes(EnvRunnerConfig(envs_per_runner=ROWS, **keys)).check(world.parts)
    assert text.endswith(remedy)
