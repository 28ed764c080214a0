"""What workers say, how they are set up, and what connectors learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import any_pb2
from gymnasium import spaces
from support.workers_world import ROWS, STEPS, WorkersWorld, begin_an_evaluation, ready_message

from juggler.driver.config import RunConfig
from juggler.driver.workers.command_sender import ConnectorState
from juggler.driver.workers.worker_registry import WorkerRegistry
from juggler.runtime.actors.hub import Worker
from juggler.runtime.actors.requests import RequestPool
from juggler.runtime.connectors.mergeable_state import Moments, from_bytes, to_bytes
from juggler.runtime.wire.spaces import space_from_message, space_to_message
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


@pytest.fixture
def world(tmp_path: Path) -> WorkersWorld:
    return WorkersWorld(tmp_path)


def _garbage(kind: str) -> any_pb2.Any:
    return any_pb2.Any(type_url=f"type.googleapis.com/juggler.v1.{kind}", value=b"\xff" * 20)


def _update(world: WorkersWorld) -> tuple[int, training_pb2.Update]:
    world.sample()
    (update,) = world.asked(world.learner, training_pb2.Update)
    return update


def test_a_learner_that_takes_no_batch_of_an_envrunner_ends_the_run_with_the_reason(
    world: WorkersWorld,
) -> None:
    refused = {"dropped": "refused", "explanation": "observations hold a number outside"}
    for number in range(9):
        world.sample(number, **refused)
    world.sample(9)  # one that is taken
    for number in range(10, 19):
        world.sample(number, **refused)
    assert not world.parts.end.reached
    world.sample(19, **refused)
    assert "learner-0 has refused 10 batches of envrunner-0 in a row" in world.parts.end.failure
    assert "observations hold a number outside" in world.parts.end.failure


def test_bytes_that_are_no_message_are_blamed_on_who_sent_them(world: WorkersWorld) -> None:
    command_id, _ = world.asked(world.runner, training_pb2.SampleRequest)[0]
    world.reply(world.runner, command_id, _garbage("Receipt"))
    assert "not a juggler.v1.Receipt" in world.why_dismissed(world.runner)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_receipt_that_cannot_be_is_blamed_on_its_runner(
    tmp_path: Path, synchronous: bool
) -> None:
    world = WorkersWorld(tmp_path, synchronous=synchronous)
    world.sample(dropped="boredom")
    assert "'boredom'" in world.why_dismissed(world.runner)
    assert world.core.ledger.sampled == 0


def test_who_answers_no_command_is_let_go_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(hub: Any, cap: int, **others: Any) -> RequestPool:
        return RequestPool(hub, cap=10, **others)

    monkeypatch.setattr("juggler.driver.workers.command_sender.RequestPool", short)
    world = WorkersWorld(tmp_path)
    for batch_id in range(1000, 1020):  # each makes a Discard, which is never answered
        arrival = training_pb2.Arrival(batch_id=batch_id)
        world.report(world.learner, training_pb2.Arrivals(arrivals=[arrival]))
    assert "10 commands in flight" in world.why_dismissed(world.learner)


def test_a_runner_that_fails_and_stays_is_let_go_when_it_fails_again(world: WorkersWorld) -> None:
    for _ in range(2):
        command_id, _ = world.asked(world.runner, training_pb2.SampleRequest)[-1]
        assert world.why_dismissed(world.runner) == ""
        world.fail(world.runner, command_id)
    assert "failed again: cannot" in world.why_dismissed(world.runner)
    world.leave(world.runner)
    world.core.ledger.check()


def test_an_update_that_failed_is_not_waited_for(world: WorkersWorld) -> None:
    command_id, _ = _update(world)
    world.fail(world.learner, command_id)
    assert world.core.idle
    assert world.core.ledger.dropped["learner_lost"] == 20


def test_envrunners_know_how_many_steps_the_run_has_trained_on(world: WorkersWorld) -> None:
    command_id, update = _update(world)
    done = training_pb2.UpdateDone(
        update_id=update.update_id, version={"generation": update.generation, "update": 1}
    )
    for batch_id in update.batch_ids:
        done.batches.add(batch_id=batch_id, live_steps=ROWS * STEPS)
    world.reply(world.learner, command_id, done)
    world.sample(1)
    requests = world.asked(world.runner, training_pb2.SampleRequest)
    trained = [request.steps_trained for _, request in requests]
    assert (trained[0], trained[-1]) == (0, ROWS * STEPS)
    world.leave(world.runner)
    ((_, setup),) = world.asked(world.join("envrunner"), training_pb2.Setup)
    assert setup.steps_trained == ROWS * STEPS


def test_an_evaluation_that_failed_is_not_waited_for(world: WorkersWorld) -> None:
    evaluator = world.joined("evaluator")
    begin_an_evaluation(world)
    assert world.parts.evaluations.evaluating
    world.fail(evaluator, world.asked(evaluator, training_pb2.Evaluate)[0][0])
    assert not world.parts.evaluations.evaluating


def test_only_what_a_runner_had_begun_is_lost_with_it_when_it_says_so(world: WorkersWorld) -> None:
    (begun, _), *rest = world.asked(world.runner, training_pb2.SampleRequest)
    assert rest
    world.leave(world.runner, farewell=True, unanswered=frozenset({begun}))
    assert world.core.ledger.lost_unreported == ROWS * STEPS


def test_a_request_does_not_go_to_a_successor_that_is_not_set_up(world: WorkersWorld) -> None:
    successor = world.join("envrunner")  # before its predecessor is known to be gone
    world.sample()
    assert world.asked(successor, training_pb2.SampleRequest) == []
    world.leave(world.runner)
    world.get_ready(successor)
    assert len(world.asked(successor, training_pb2.SampleRequest)) == 2


def test_what_is_no_state_is_blamed_on_the_learner(world: WorkersWorld, tmp_path: Path) -> None:
    world.reply(world.learner, world.ask_for_a_snapshot(), any_pb2.Any(value=b"\xff"))
    assert world.why_dismissed(world.learner)
    world.leave(world.learner)
    assert not world.parts.checkpoints.under_way
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_that_failed_is_not_waited_for(world: WorkersWorld) -> None:
    world.fail(world.learner, world.ask_for_a_snapshot())
    assert not world.parts.checkpoints.under_way


# -- EnvRunners -----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["runner", "learner"])
def test_a_note_is_one_line(world: WorkersWorld, role: str) -> None:
    worker = getattr(world, role)
    world.report(worker, training_pb2.Note(text="takes\nsimulators"))
    assert world.told.messages == [f"{worker.worker_id} takes simulators"]
    assert world.told.levels == ["info"]
    world.report(worker, training_pb2.Note(text="x", warning=True))
    assert world.told.levels == ["info", "warning"]
    assert world.why_dismissed(worker) == ""


# -- learners -------------------------------------------------------------------------------------


def test_metrics_of_modules_that_are_no_more_do_not_pile_up(world: WorkersWorld) -> None:
    metrics = world.parts.metrics
    for number in range(3):
        metrics.updated("learner-0", "default", {f"module-{number}": {"loss": 1.0}})
        metrics.updated("learner-0", "default", {})
    assert list(metrics.modules["learner-0", "default"]) == ["module-2"]


# -- any worker ----------------------------------------------------------------------------------


def test_the_same_failure_of_another_environment_is_not_printed_whole_again(
    world: WorkersWorld,
) -> None:
    for number in range(3):
        message = f"environment {number} (Robot) failed in step: RuntimeError: no contact"
        failure = attach_pb2.Failure(message=message, traceback="Traceback\nRuntimeError")
        world.leave(world.join("envrunner", 1), failure=failure)
    first, *others = world.told.messages
    assert first.startswith("envrunner-1 left: gone\n  Traceback")
    assert others == ["envrunner-1 left for the same reason as before"] * 2


def test_numbers_that_are_not_finite_are_told_once_and_not_by_each_worker(
    world: WorkersWorld,
) -> None:
    said = "rewards of environment 0 at step 7 of a fragment are nan: the environment must give"
    world.sample(dropped="nonfinite", explanation=said)
    assert world.told.messages == [], "the EnvRunner leaves, and says it then"
    for index in (0, 1, 2):
        worker = world.runner if index == 0 else world.join("envrunner", index)
        failure = attach_pb2.Failure(message=said.replace("step 7", f"step {index}"))
        world.leave(worker, failure=failure)
    first, *others = world.told.messages
    assert first == "envrunner-0 left: gone"
    assert others == [
        "envrunner-1 left for the same reason as envrunner-0",
        "envrunner-2 left for the same reason as envrunner-1",
    ]


def test_what_failures_are_remembered_by_is_bounded(world: WorkersWorld) -> None:
    for number in range(300):
        worker = world.join("envrunner", 1)
        failure = attach_pb2.Failure(message=f"failure {number}", traceback="x" * 1000)
        world.leave(worker, failure=failure)
    assert len(world.parts.departures._shown) <= 100
    assert world.parts.departures.failures == {}


# WorkerRegistry: when each worker is set up, and when it is ready.


VECTOR = spaces.Box(-math.inf, math.inf, (4,), np.float32)
TWO = spaces.Discrete(2)


def _worker(role: str, index: int = 0, incarnation: str = "a", host: str = "here") -> Worker:
    return Worker(
        worker_id=f"{role}-{index}",
        incarnation=incarnation,
        role=role,
        index=index,
        host=host,
        pid=1,
        devices=("cpu",),
        data_addresses=(f"unix:/{role}-{index}", f"{host}:5005"),
        local=True,
    )


def _ready(observation: Any = VECTOR, action: Any = TWO, rows: int = 16) -> training_pb2.Ready:
    return ready_message(
        observation_space=space_to_message(observation),
        action_space=space_to_message(action),
        rows=rows,
        steps=32,
    )


def _registry(first_update: int = 0, **keys: Any) -> WorkerRegistry:
    evaluated = {"evaluation_seconds": 1.0, "evaluation_episodes": 16}
    return WorkerRegistry(RunConfig.from_flat({**evaluated, **keys}), first_update)


def _set_up(registry: WorkerRegistry, worker: Worker) -> training_pb2.Setup:
    """Commands to a worker that is set up on arrival."""
    ((told, setup),) = registry.joined(worker)
    assert told is worker
    return setup


def _with_runner(registry: WorkerRegistry, index: int = 0) -> Worker:
    runner = _worker("envrunner", index)
    _set_up(registry, runner)
    registry.runner_ready(runner, _ready())
    return runner


# -- spaces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["envrunner", "evaluator"])
def test_a_learner_waits_for_the_spaces_of_the_first_runner(first: str) -> None:
    registry = _registry()
    learner, runner = _worker("learner"), _worker(first)
    assert registry.joined(learner) == []
    _set_up(registry, runner)
    ((told, _),) = registry.runner_ready(runner, _ready())
    assert told is learner
    module = registry.module_setup("default", seed=7)
    assert (module.module_id, module.seed) == ("default", 7)
    assert space_from_message(module.observation_space) == VECTOR
    assert space_from_message(module.action_space) == TWO


@pytest.mark.parametrize(
    "other",
    [
        _ready(observation=spaces.Box(-math.inf, math.inf, (5,), np.float32)),
        _ready(observation=spaces.Box(-1, math.inf, (4,), np.float32)),
        _ready(observation=spaces.Box(-math.inf, math.inf, (4,), np.float64)),
        _ready(action=spaces.Discrete(3)),
        _ready(action=spaces.Discrete(2, start=1)),
    ],
    ids=["shape", "bound", "dtype", "number of actions", "first action"],
)
@pytest.mark.parametrize("role", ["envrunner", "evaluator"])
def test_a_runner_with_other_spaces_is_refused(role: str, other: training_pb2.Ready) -> None:
    registry = _registry()
    _with_runner(registry)
    stranger = _worker(role, index=7, host="elsewhere")
    _set_up(registry, stranger)
    with pytest.raises(ValueError, match="other spaces") as refused:
        registry.runner_ready(stranger, other)
    said = str(refused.value)
    assert said.startswith(f"{role}-7 on elsewhere has other spaces")
    assert "same version of the environment?" in said
    assert "\n" not in said
    assert stranger not in registry.ready.values()
    assert space_from_message(registry.spaces["default"].observation_space) == VECTOR


# -- seeds ----------------------------------------------------------------------------------------


def test_every_worker_and_every_life_of_it_has_a_seed_of_its_own() -> None:
    seeds = set()
    count = 0
    for run_seed in (0, 1):
        for first_update in (0, 100):
            registry = _registry(first_update, seed=run_seed)
            _with_runner(registry, index=9)
            for role in ("envrunner", "evaluator", "learner"):
                for index in (0, 1):
                    for incarnation in ("a", "b", "c"):
                        setup = _set_up(registry, _worker(role, index, incarnation))
                        seeds.add(setup.seed)
                        count += 1
    assert len(seeds) == count == 2 * 2 * 3 * 2 * 3


# -- what each role is told -----------------------------------------------------------------------


# -- present --------------------------------------------------------------------------------------


def test_training_needs_a_ready_runner_and_a_ready_learner() -> None:
    registry = _registry()
    learner = _worker("learner")
    assert registry.joined(learner) == []
    assert not registry.complete()
    runner = _with_runner(registry)
    assert not registry.complete()
    assert registry.describe() == ("envrunners: 1 attached, 1 ready; learners: 1 attached, 0 ready")
    registry.learner_ready(learner, training_pb2.ModuleReady(module_id="default"))
    assert registry.complete()
    registry.left(runner)
    assert not registry.complete()
    assert registry.describe() == ("envrunners: 0 attached, 0 ready; learners: 1 attached, 1 ready")


def test_a_worker_that_leaves_late_does_not_take_its_successor_along() -> None:
    registry = _registry()
    before = _with_runner(registry)
    successor = _worker("envrunner", incarnation="b")
    _set_up(registry, successor)
    registry.runner_ready(successor, _ready())
    registry.left(before)
    assert registry.attached == {"envrunner-0": successor}
    assert registry.of_role("envrunner") == [successor]
    registry.left(successor)
    registry.left(successor)
    assert registry.attached == registry.ready == {}
    assert registry.spaces


# What connectors learn: from receipts to one state and the next sampler.


def delta(*samples: float, name: str = "filter") -> bytes:
    return to_bytes({name: Moments.of(np.array(samples)[:, None]).to_tree()})


def mean(content: bytes) -> float:
    return float(Moments.from_tree(from_bytes(content)["filter"]).mean[0])


def worker(index: int, incarnation: str = "x") -> Worker:
    return Worker(f"envrunner-{index}", incarnation, "envrunner", index, "host", 1, (), (), False)


def learned(*deltas: bytes) -> ConnectorState:
    state = ConnectorState()
    for batch_id, each in enumerate(deltas):
        state.add_delta("envrunner-0", batch_id, each)
    state.merge_waiting()
    return state


def test_everybody_is_told_once_what_all_have_learned() -> None:
    state = learned(delta(1.0), delta(5.0))
    for each in (worker(0), worker(1)):
        assert mean(state.news_for(each)) == 3
        assert state.news_for(each) == b""
    assert mean(state.news_for(worker(1))) == 3


def test_news_are_told_when_they_are_a_hundredth_of_what_is_known() -> None:
    state, told = learned(delta(*range(1000))), worker(0)
    state.news_for(told)
    state.add_delta("envrunner-0", 1, delta(*range(9)))
    state.merge_waiting()
    assert state.news_for(told) == b""
    state.add_delta("envrunner-0", 2, delta(1.0))
    state.merge_waiting()
    news = Moments.from_tree(from_bytes(state.news_for(told))["filter"])
    assert news.count == 1010


def test_deltas_are_merged_in_order_of_envrunners_and_requests_whenever_they_came() -> None:
    deltas = {i: delta(*np.random.default_rng(i).normal(1e6, 1.0, 5 + i)) for i in range(6)}
    # Which of its batches has which id depends, between EnvRunners, on which was faster.
    ids = ((10, 11, 14, 12, 13, 15), (10, 12, 13, 11, 14, 15), (12, 13, 15, 10, 11, 14))
    contents = set()
    for order, named in zip((range(6), reversed(range(6)), (3, 0, 5, 1, 4, 2)), ids, strict=True):
        state = ConnectorState()
        for i in order:
            state.add_delta(f"envrunner-{9 + i // 3}", named[i], deltas[i])
        state.merge_waiting()
        contents.add(to_bytes(state.merged))
    assert len(contents) == 1


def test_what_is_announced_is_news_for_everybody_however_little_it_is() -> None:
    state, told = learned(delta(*range(1000))), worker(0)
    state.news_for(told)
    state.add_delta("envrunner-0", 1, delta(1.0))
    state.merge_waiting()
    state.announce()
    restored = ConnectorState(state.merged)
    assert state.news_for(told) == restored.news_for(worker(0)) != b""
    nothing = ConnectorState()
    nothing.announce()
    assert nothing.news_for(told) == b""


# -- in a worker_events --------------------------------------------------------------------------


def test_a_delta_of_other_connectors_is_refused() -> None:
    state = learned(delta(1.0))
    with pytest.raises(ValueError, match="states of other connectors"):
        state.add_delta("envrunner-0", 1, delta(1.0, name="another"))
    with pytest.raises(ValueError):  # noqa: PT011 - says what is wrong with the frame
        state.add_delta("envrunner-0", 1, b"\xff\xff")
    state.merge_waiting()
    assert Moments.from_tree(state.merged["filter"]).count == 1


def answer_updates(world: WorkersWorld, **said: Any) -> None:
    """The learner answers the newest update."""
    command_id, update = world.asked(world.learner, training_pb2.Update)[-1]
    version = {"generation": update.generation, "update": world.parts.core.updates + 1}
    used = [{"batch_id": batch_id, "live_steps": 20} for batch_id in update.batch_ids]
    done = training_pb2.UpdateDone(
        update_id=update.update_id, version=version, batches=used, **said
    )
    world.reply(world.learner, command_id, done)


def arrived(world: WorkersWorld, batch_id: int) -> None:
    arrival = training_pb2.Arrival(batch_id=batch_id, live_steps=20)
    world.report(world.learner, training_pb2.Arrivals(arrivals=[arrival]))


def test_in_synchronous_mode_requests_pass_on_all_of_the_rounds_before(tmp_path: Path) -> None:
    asked = []
    for receipt_first in (True, False):
        world = WorkersWorld(tmp_path, synchronous=True)
        for number in (4.0, 8.0):
            command_id, request = world.asked(world.runner, training_pb2.SampleRequest)[-1]
            told = {"batch_id": request.batch_id, "learner": "learner-0", "live_steps": 20}
            receipt = training_pb2.Receipt(**told, connector_delta=delta(number))
            if receipt_first:
                world.reply(world.runner, command_id, receipt)
                answer_updates(world)
            else:
                arrived(world, request.batch_id)
                answer_updates(world)
                assert world.parts.core.updates == (number == 8.0), "no report yet"
                world.reply(world.runner, command_id, receipt)
        requests = world.asked(world.runner, training_pb2.SampleRequest)
        asked.append([request.connector_state for _, request in requests])
        assert world.parts.core.updates == 2
    assert asked[0] == asked[1]
    first, *later = asked[0]
    assert first == b""
    assert [mean(content) for content in later] == [4, 6]


def test_an_answer_that_came_early_is_heard_when_its_learner_leaves(tmp_path: Path) -> None:
    world = WorkersWorld(tmp_path, synchronous=True)
    _, request = world.asked(world.runner, training_pb2.SampleRequest)[-1]
    arrived(world, request.batch_id)
    answer_updates(world)
    world.leave(world.learner)
    assert world.core.ledger.trained == 20
