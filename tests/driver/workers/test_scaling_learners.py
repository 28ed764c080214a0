"""More or fewer learners in a run whose driver starts them."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.workers_world import ROWS, STEPS, WorkersWorld

from juggler.driver import module_placement as learners_here
from juggler.driver.config import DriverConfig
from juggler.driver.loop import scale
from juggler.driver.monitoring import ScaleAsked
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.learner.process.learner_program import LearnerSetup
from juggler.runtime.actors.hub import Mailbox, Worker
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.actors.worker import from_json
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class Supervisor:
    """Start nothing; record workers to start and times to kill them."""

    restarts = 0

    def __init__(self, _: Mailbox[Any]) -> None:
        self.started: list[str] = []
        self.dismissed_within: dict[str, float] = {}

    def add(self, worker_id: str, *_: Any) -> None:
        self.started.append(worker_id)

    def dismiss(self, worker_id: str, seconds: float) -> None:
        self.dismissed_within[worker_id] = seconds

    def of_use(self, worker_id: str) -> None:
        pass

    def kill(self, *_: Any, **__: Any) -> None:
        pass


class World(WorkersWorld):
    """A run of one host: workers ready, learners met."""

    def __init__(self, directory: Path, **keys: Any) -> None:
        local = LocalWorkers(Mailbox(), "run", "token", b"")
        self.supervisor: Any = local.supervisor
        learners: dict[str, Any] = {"num_learners": keys.get("num_learners", 1), "devices": "cpu"}
        local.start(DriverConfig(num_env_runners=1, **learners))
        super().__init__(directory, only_local=True, local=local, **{**learners, **keys})
        local._directory.remove()
        self.supervisor.started.clear()
        if len(self.parts.core.modules) == 1 and self.core.members:
            self.meet(*self.learners)

    def scale(self, learners: int = 0, env_runners: int = 0) -> Future[tuple[int, int]]:
        asked = ScaleAsked(env_runners, learners, Future())
        scale(self.parts, asked)
        self.turn()
        return asked.answer

    def refusal(self, learners: int, env_runners: int = 0) -> str:
        error = self.scale(learners, env_runners).exception()
        assert isinstance(error, ValueError)
        assert self.supervisor.started == []
        assert self.supervisor.dismissed_within == {}
        return str(error)

    def get_ready(self, worker: Worker, *module_ids: str) -> None:
        super().get_ready(worker, *module_ids)
        if worker.role == "learner":
            ((command_id, _),) = self.asked(worker, training_pb2.Setup)
            self.reply(worker, command_id, attach_pb2.Done())

    def come(self, index: int) -> Worker:
        """A learner that was started is ready."""
        learner = self.join("learner", index)
        self.get_ready(learner)
        return learner

    def meet(self, *learners: Worker) -> None:
        """Report that these learners meet in each of their groups."""
        for learner in learners:
            for command_id, group in self.asked(learner, training_pb2.Group):
                formed = training_pb2.GroupFormed(
                    module_id=group.module_id,
                    generation=group.generation,
                    update=self.core.weights_version.update,
                    state_hash=1,
                )
                self.reply(learner, command_id, formed)

    def may_meet(self, learner: Worker) -> bool:
        ((_, setup),) = self.asked(learner, training_pb2.Setup)
        return from_json(setup.config, LearnerSetup).may_meet

    def was_stopped(self, learner: Worker) -> bool:
        return bool(self.asked(learner, attach_pb2.Stop))

    def told_of(self) -> list[str]:
        """The learners that the EnvRunner was told of last."""
        _, told = self.asked(self.runner, training_pb2.Learners)[-1]
        return [each.worker_id for each in told.learners]

    def answer_requests(self, already: set[int]) -> None:
        """Bring the EnvRunner's requested batches that are still missing."""
        for command_id, request in self.asked(self.runner, training_pb2.SampleRequest):
            if request.batch_id not in already:
                already.add(request.batch_id)
                receipt = training_pb2.Receipt(
                    batch_id=request.batch_id, learner=request.learner, live_steps=ROWS * STEPS
                )
                self.reply(self.runner, command_id, receipt)

    def make_updates(self, already: set[int]) -> None:
        """Each learner makes the requested updates that it has not made already."""
        for learner in self.learners:
            for command_id, update in self.asked(learner, training_pb2.Update):
                if command_id not in already:
                    already.add(command_id)
                    version = self.core.weights_version.update + (learner is self.learners[0])
                    done = training_pb2.UpdateDone(
                        update_id=update.update_id,
                        version={"generation": update.generation, "update": max(1, version)},
                    )
                    for batch_id in update.batch_ids:
                        done.batches.add(batch_id=batch_id, live_steps=ROWS * STEPS)
                    self.reply(learner, command_id, done)


PATIENCE = 60.0  # worker_timeout_seconds
BOTH = {"agents": {"left": "blue", "right": "red"}}
GAME = {"agents": {"row": ["main-0"], "column": ["main-0"]}}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "juggler.driver.workers.local_workers"
    monkeypatch.setattr(f"{module}.Supervisor", Supervisor)
    monkeypatch.setattr(f"{module}.share_forkserver", lambda: None)


Make = Callable[..., World]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda **keys: World(tmp_path, **keys)


def test_a_learner_that_is_started_joins_the_one_that_trained_alone(make: Make) -> None:
    world = make()
    assert not world.may_meet(world.learner)
    assert world.scale(learners=2).result() == (0, 1)
    assert world.supervisor.started == ["learner-1"]
    assert world.told.messages[-1] == "learners: 2 instead of 1"
    assert world.silences() == {"learner": 6.0}, "others wait for one that hangs"
    second = world.come(1)
    assert world.may_meet(second)
    assert not world.why_dismissed(second)
    ((_, group),) = world.asked(second, training_pb2.Group)
    assert list(group.members) == ["learner-0", "learner-1"]
    assert world.told_of() == ["learner-0", "learner-1"]
    assert world.scale(learners=2).result() == (0, 2), "nothing changes"
    assert len(world.supervisor.started) == 1


def test_a_learner_that_cannot_train_with_others_does_not_disturb_the_first(make: Make) -> None:
    world = make()
    world.scale(learners=2)
    second = world.join("learner", 1)
    ((command_id, _),) = world.asked(second, training_pb2.AddModule)
    why = "population cannot train in a group of learners"
    world.reply(second, command_id, training_pb2.ModuleReady(why_alone=why))
    assert world.why_dismissed(second) == why
    assert world.core.members == ("learner-0",)


def test_a_learner_is_told_to_stop_once_it_has_trained_on_what_it_was_asked_for(make: Make) -> None:
    world = make(num_learners=2, batch_size=40, num_env_runners=1)
    second, sampled, updated = world.learners[1], set[int](), set[int]()
    asked = world.asked(world.runner, training_pb2.SampleRequest)
    assert "learner-1" in [request.learner for _, request in asked]
    assert world.scale(learners=1).result() == (0, 2)
    assert world.supervisor.dismissed_within == {"learner-1": math.inf}
    assert not world.was_stopped(second)
    while not world.was_stopped(second):
        assert world.told_of() == ["learner-0", "learner-1"]
        assert set(world.core.members) == {"learner-0", "learner-1"}
        trained = world.core.ledger.trained
        world.answer_requests(sampled)
        world.make_updates(updated)
        assert world.core.ledger.trained > trained, "it stands still"
    assert world.supervisor.dismissed_within == {"learner-1": PATIENCE}
    assert world.told_of() == ["learner-0"]
    assert list(world.asked(world.learner, training_pb2.Group)[-1][1].members) == ["learner-0"]
    world.leave(second, farewell=True)
    world.end_process(Exited("learner-1", 2, "exit code 0", None))
    assert world.told.messages[-1] == "learner-1 has left, as requested"
    assert "warning" not in world.told.levels
    assert not world.parts.end.reached
    world.meet(world.learner)
    world.answer_requests(sampled)
    world.make_updates(updated)
    assert sum(world.core.ledger.dropped.values()) == 0
    assert world.scale(learners=2).result() == (0, 1)
    assert world.supervisor.started == ["learner-1"], "its number is free again"


def test_a_learner_that_still_sends_a_checkpoint_is_not_stopped(make: Make) -> None:
    world = make(num_learners=2)
    first, second = world.learners
    world.leave(first)
    world.learners[0] = world.come(0)
    world.meet(*world.learners)
    assert world.core.members == ("learner-1", "learner-0"), "checkpoints are of the first"
    world.learner = second
    command_id = world.ask_for_a_snapshot()
    world.leave(world.runner)  # nothing is asked for
    world.scale(learners=1)
    assert world.core.members == ("learner-0",)
    assert not world.was_stopped(second)
    world.fail(second, command_id)
    assert world.was_stopped(second)


def test_a_learner_that_takes_too_long_to_leave_is_stopped_all_the_same(make: Make) -> None:
    world = make(num_learners=2, worker_timeout_seconds=1e-9)
    world.scale(learners=1)
    world.turn()
    assert world.was_stopped(world.learners[1])
    world.leave(world.learners[1], farewell=True)
    assert world.core.members == ("learner-0",)


def test_a_learner_that_is_not_here_yet_is_ended_at_once(make: Make) -> None:
    world = make()
    world.scale(learners=3)
    attached = world.join("learner", 1)
    assert world.scale(learners=1).result() == (0, 3)
    assert world.supervisor.dismissed_within == {"learner-1": math.inf, "learner-2": 0.0}
    world.get_ready(attached)
    assert world.core.members == ("learner-0",)
    assert world.was_stopped(attached)
    assert world.scale(learners=2).result() == (0, 1)
    assert world.supervisor.started[2:] == ["learner-3"], "the others are still leaving"


def test_a_learner_that_ended_a_moment_before_is_said_once_to_have_left(make: Make) -> None:
    world = make(num_learners=2)
    world.scale(learners=1)
    world.leave(world.learners[1])
    before = len(world.told.messages)
    world.end_process(Exited("learner-1", 2, "killed by SIGKILL", 0.25))  # said before it was asked
    assert world.told.messages[before:] == []
    world.end_process(Exited("learner-1", 0, "it was not running", None))
    assert world.told.messages[before:] == ["learner-1 has left, as requested"]
    assert not world.parts.end.reached


def test_nobody_waits_for_learners_that_are_not_wanted_any_more(tmp_path: Path) -> None:
    class Late(World):
        def join(self, role: str, index: int = 0) -> Worker:
            return super().join(role, min(index, 1))  # the third one never comes

    world = Late(tmp_path, num_learners=3)
    assert world.core.members == ()
    assert world.core.missing_learners == 1
    world.scale(learners=2)
    assert world.core.members == ("learner-0", "learner-1")


def test_modules_stay_where_they_are_and_each_keeps_a_learner(make: Make) -> None:
    world = make(**BOTH, num_learners=4)
    assert "module 'red' would have no learner" in world.refusal(learners=1)
    assert world.scale(learners=2).result() == (0, 4)
    members = {key: module.members for key, module in world.parts.core.modules.items()}
    for learner in world.learners[2:]:
        assert learner.worker_id in {*members["blue"], *members["red"]}
    assert set(world.supervisor.dismissed_within) == {"learner-2", "learner-3"}
    assert world.scale(learners=3).result() == (0, 2)
    fifth = world.come(4)
    hosted = [module.module_id for _, module in world.asked(fifth, training_pb2.AddModule)]
    assert hosted == ["blue"]


@pytest.mark.parametrize(
    ("keys", "wanted", "words"),
    [
        ({}, 65, "65 learners: must be at most 64"),
        ({"synchronous": True}, 2, "a synchronous run has the same"),
        ({**GAME, "league": {"builder": "alphastar"}}, 2, "a run with a league keeps its learners"),
        ({**BOTH, "shared": {"encoder.*": ["blue", "red"]}}, 2, "modules that share parts keeps"),
        (
            {**BOTH, "modules": {"red": {"num_learners": 2}}, "num_learners": 3},
            4,
            "a run with num_learners in its",
        ),
    ],
)
def test_who_cannot_have_so_many_learners_is_told_why_and_nothing_changes(
    make: Make, keys: dict[str, Any], wanted: int, words: str
) -> None:
    world = make(**keys)
    assert words in world.refusal(learners=wanted, env_runners=5)


class Keeping(World):
    """Each of its learners keeps steps of 4 GB."""

    kept_bytes = 4 * 10**9


def test_memory_that_learners_have_taken_for_their_steps_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learners_here, "usable_memory", lambda: 5 * 10**9)
    world = Keeping(tmp_path, algorithm="dqn", save_replay=False)
    world.resident["learner-0"] = 10**9  # its table is not full yet
    assert "8.0 GB in all (4.0, 4.0), and 6.0 GB" in world.refusal(learners=2)
    world.resident["learner-0"] = 9 * 10**9  # of which 4 are its steps
    assert world.scale(learners=2).result() == (0, 1)


def test_a_run_that_is_ending_starts_none(make: Make) -> None:
    world = make()
    world.parts.end.stop("stop_steps")
    assert world.refusal(learners=2, env_runners=3) == "the run is ending"


def test_a_run_whose_workers_dial_in_starts_none(tmp_path: Path) -> None:
    world = WorkersWorld(tmp_path)
    asked = ScaleAsked(0, 2, Future())
    scale(world.parts, asked)
    assert "the workers of this run dial in" in str(asked.answer.exception())


def test_envrunners_and_learners_are_scaled_together(make: Make) -> None:
    world = make()
    assert world.scale(learners=2, env_runners=3).result() == (1, 1)
    assert world.supervisor.started == ["envrunner-1", "envrunner-2", "learner-1"]
    assert world.scale(env_runners=1).result() == (3, 0)
    assert world.supervisor.dismissed_within == {"envrunner-1": 0.0, "envrunner-2": 0.0}


def test_gateways_come_and_go_only_if_they_start_simulators(make: Make) -> None:
    dialed = make(gateway="127.0.0.1:0")
    assert "this run's only gateway" in dialed.refusal(learners=1, env_runners=2)
    world = make(simulator="./game {address}")
    assert world.scale(learners=1, env_runners=2).result() == (1, 1)
    assert world.supervisor.started == ["envrunner-1"]
