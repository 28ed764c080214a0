"""Messages that hold more than they may, or what nobody can use: they are refused before they cost
anything, nothing of them is booked, and their sender is let go."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import any_pb2
from support.ready import ready_message
from support.worker_events_world import ROWS, SPACE, STEPS, WorkersWorld

from juggler.driver.workers.replies import COUNTS, SECONDS, read_evaluation
from juggler.runtime.actors.hello import MOST_EVENTS_PER_SECOND
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.wire.v1 import attach_pb2, spaces_pb2, training_pb2

MANY = {str(number): 1.0 for number in range(200_000)}


@pytest.fixture
def world(tmp_path: Path) -> WorkersWorld:
    return WorkersWorld(tmp_path)


def _raw(kind: str, value: bytes) -> any_pb2.Any:
    return any_pb2.Any(type_url=f"type.googleapis.com/juggler.v1.{kind}", value=value)


def _arrivals(*ids: int) -> training_pb2.Arrivals:
    return training_pb2.Arrivals(arrivals=[training_pb2.Arrival(batch_id=each) for each in ids])


# -- EnvRunners -----------------------------------------------------------------------------------


MUCH = [1.0] * 101


def _info(**said: Any) -> training_pb2.InfoNumber:
    return training_pb2.InfoNumber(
        **{"name": "x", "mean": [1.0], "least": [1.0], "most": [1.0], **said}
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"seconds": MANY}, "a message of over 1024 entries"),
        ({"counts": MANY}, "a message of over 1024 entries"),
        ({"seconds": {"sleeping": 1.0}}, "seconds of 'sleeping': known are collate, "),
        ({"counts": {"x" * 9000: 1.0}}, "xxx': known are inferences, "),
        ({"seconds": {"waiting": math.nan}}, "waiting = nan in the seconds"),
        ({"counts": {"inferences": math.inf}}, "inferences = inf in the counts"),
        ({"seconds": {"waiting": -1.0}}, "waiting = -1.0 in the seconds"),
        ({"episode_returns": [math.nan], "episode_lengths": [1]}, "a return that is not finite"),
        ({"episode_returns": [1.0, -math.inf], "episode_lengths": [1, 1]}, "not finite"),
        (
            {"episode_returns": [1.0] * 70_000, "episode_lengths": [1] * 70_000},
            "70000 episodes, where there can be 65556",
        ),
        ({"module_id": "other"}, "an answer about module 'other', not 'default'"),
        ({"learner": "learner-7"}, "a receipt for a batch of learner-7, not of learner-0"),
        ({"connector_delta": b"x" * 9_000_000}, "bytes: at most 8388608"),
        ({"infos": [_info()] * 129}, "129 numbers of infos: at most 128"),
        ({"infos": [_info(name="x" * 300)]}, "infos needs a printable name of at most 255"),
        ({"infos": [_info(least=[])]}, "numbers of infos of [0, 1] episodes: at most 100"),
        ({"infos": [_info(most=[math.inf])]}, "the number 'x' of infos is not finite"),
        (
            {"infos": [_info(mean=MUCH, least=MUCH, most=MUCH)]},
            "numbers of infos of [101] episodes: at most 100",
        ),
    ],
)
def test_of_a_receipt_that_holds_what_it_must_not_nothing_is_booked(
    world: WorkersWorld, said: dict[str, Any], words: str
) -> None:
    world.sample(**said)
    assert words in world.why_dismissed(world.runner)
    assert len(world.why_dismissed(world.runner)) < 5000
    assert world.core.ledger.sampled == 0
    assert world.parts.metrics.episodes == 0
    assert world.parts.metrics.workers.seconds() == {}
    assert world.parts.metrics.workers.counts() == {}


def test_all_that_may_be_counted_is_taken(world: WorkersWorld) -> None:
    world.sample(seconds=dict.fromkeys(SECONDS, 1.0), counts=dict.fromkeys(COUNTS, 2.0))
    assert world.why_dismissed(world.runner) == ""
    assert set(world.parts.metrics.workers.seconds()["envrunner"]) == SECONDS


def test_an_explanation_is_one_line_and_not_long(world: WorkersWorld) -> None:
    world.sample(dropped="refused", explanation="no\nerror: forged\r\x0b" + "x" * 5_000_000)
    (told,) = world.told.messages
    assert told.startswith("envrunner-0: no error: forged xxx")
    assert len(told.splitlines()) == 1
    assert len(told) < 1100


@pytest.mark.parametrize("role", ["runner", "learner"])
def test_a_note_is_one_line_and_too_many_are_too_many(
    world: WorkersWorld, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    worker = getattr(world, role)
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    world.report(worker, training_pb2.Note(text="takes\nsimulators"))
    assert world.told.messages == [f"{worker.worker_id} takes simulators"]
    assert world.told.levels == ["info"]
    for _ in range(80):
        assert world.why_dismissed(worker) == ""
        world.report(worker, training_pb2.Note(text="x", warning=True))
    assert set(world.told.levels[1:]) == {"warning"}
    assert "replies and reports in a second" in world.why_dismissed(worker)
    assert len(world.told.messages) == 80


def test_a_runner_of_an_endless_space_is_not_taken(world: WorkersWorld) -> None:
    runner = world.join("envrunner", 1)
    command_id, _ = world.asked(runner, training_pb2.Setup)[0]
    endless = spaces_pb2.Space()
    endless.tuple.spaces.extend([SPACE] * 5000)
    ready = ready_message(observation_space=endless, action_space=SPACE, rows=ROWS, steps=STEPS)
    world.reply(runner, command_id, ready)
    assert "a space of more than 4096 spaces" in world.why_dismissed(runner)


def test_spaces_of_other_runners_are_told_as_long_as_people_can_read_them(tmp_path: Path) -> None:
    wide = spaces_pb2.Space()
    wide.box.shape.extend([1000])
    wide.box.low.extend([0.5] * 1000)
    for space, words in ((spaces_pb2.Space(text={"max_length": 9}), "maxLength"), (wide, "bytes")):
        world = WorkersWorld(tmp_path)
        runner = world.join("envrunner", 1)
        command_id, _ = world.asked(runner, training_pb2.Setup)[0]
        ready = ready_message(observation_space=space, action_space=SPACE, rows=ROWS, steps=STEPS)
        world.reply(runner, command_id, ready)
        assert "has other spaces than" in world.why_dismissed(runner)
        assert words in world.why_dismissed(runner)
        assert len(world.why_dismissed(runner)) < 1000


# -- learners -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\x0a\x00" * 3_500_000, "of 7000000 bytes: at most 65536"),
        (b"\x0a\x00" * 30_000, "a message of over 1024 entries"),
        (b"\x0a\x00" * 1025, "a message of over 1024 entries"),
    ],
)
def test_a_report_of_countless_arrivals_costs_nothing(
    world: WorkersWorld, value: bytes, words: str
) -> None:
    began = time.process_time()
    world.report(world.learner, _raw("Arrivals", value))
    assert time.process_time() - began < 0.5
    assert words in world.why_dismissed(world.learner)


def test_arrivals_count_and_not_the_messages_that_they_come_in(
    world: WorkersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    for _ in range(MOST_EVENTS_PER_SECOND // 1000):
        world.report(world.learner, _arrivals(*[0] * 1000))
        assert world.why_dismissed(world.learner) == ""
    world.report(world.learner, _arrivals(0))
    assert "replies and reports in a second" in world.why_dismissed(world.learner)


def test_what_was_said_before_its_sender_was_let_go_is_not_heard(world: WorkersWorld) -> None:
    world.report(world.learner, _raw("Arrivals", b"\xff"))
    assert world.why_dismissed(world.learner)
    world.report(world.learner, _arrivals(1))
    assert world.core.ledger.sampled == 0
    world.leave(world.learner)
    world.learner = world.join("learner")
    world.get_ready(world.learner)
    assert world.core.members == ("learner-0",)


def test_a_batch_of_a_module_that_the_run_does_not_have_is_not_booked(world: WorkersWorld) -> None:
    ((_, request), _) = world.asked(world.runner, training_pb2.SampleRequest)
    arrivals = _arrivals(request.batch_id)
    arrivals.module_id = "other"
    world.report(world.learner, arrivals)
    assert "there is no module 'other' in this run" in world.why_dismissed(world.learner)
    assert world.core.ledger.sampled == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"batches": [training_pb2.UsedBatch()] * 2}, "an answer about 2 batches, of 1"),
        ({"batches": [training_pb2.UsedBatch()] * 9000}, "a message of over 1025 entries"),
        (
            {"batches": [training_pb2.UsedBatch(batch_id=1, live_steps=2**64 - 1)]},
            "18446744073709551615 steps in one batch",
        ),
        ({"module_id": "other"}, "an answer about module 'other', not 'default'"),
        ({"metrics": {str(n): {} for n in range(65)}}, "metrics of 65 modules: at most 64"),
        (
            {"metrics": {"m": {"values": {str(n): 1.0 for n in range(2000)}}}},
            "2000 metrics of a module: at most 1024",
        ),
        ({"metrics": {"m": {"values": {"x" * 300: 1.0}}}}, "needs a printable name of at most 255"),
        ({"metrics": {"a\nb": {}}}, "needs a printable name of at most 255"),
        ({"metrics": {"m": {"values": MANY}}}, "at most 262208"),
        ({"replay": MANY}, "at most 262208"),
        ({"replay": {"x" * 300: 1.0}}, "needs a printable name of at most 255"),
        ({"replay": {"replay_rows": math.nan}}, "replay_rows = nan in the numbers of a replay"),
        ({"replay": {"replay_rows": -1.0}}, "replay_rows = -1.0 in the numbers of a replay"),
        ({"seconds": {"update": math.nan}}, "update = nan in the seconds"),
        ({"seconds": {"sleeping": 1.0}}, "seconds of 'sleeping'"),
    ],
)
def test_of_an_answer_that_holds_what_it_must_not_nothing_is_booked(
    world: WorkersWorld, said: dict[str, Any], words: str
) -> None:
    world.sample()
    ((command_id, update),) = world.asked(world.learner, training_pb2.Update)
    done = training_pb2.UpdateDone(**{"update_id": update.update_id, **said})
    world.reply(world.learner, command_id, done)
    assert words in world.why_dismissed(world.learner)
    assert world.core.weights_version.update == 0
    assert world.parts.metrics.modules == {}


def test_metrics_of_modules_that_are_no_more_do_not_pile_up(world: WorkersWorld) -> None:
    metrics = world.parts.metrics
    for number in range(3):
        metrics.updated("learner-0", "default", {f"module-{number}": {"loss": 1.0}})
        metrics.updated("learner-0", "default", {})
    assert list(metrics.modules["learner-0", "default"]) == ["module-2"]


def _learner_ready(world: WorkersWorld, **said: Any) -> Worker:
    world.leave(world.learner)
    learner = world.join("learner")
    command_id, command = world.asked(learner, training_pb2.AddModule)[0]
    said = {"module_id": command.module_id, **said}
    world.reply(learner, command_id, training_pb2.ModuleReady(**said))
    return learner


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"module_id": "another"}, "an answer about module 'another', not 'default'"),
        ({"meeting_point": "x" * 300}, "a meeting point needs a printable name of at most 255"),
        ({"last_updates": [training_pb2.UpdateDone()] * 65}, "65 updates that it kept: at most 64"),
        (
            {
                "last_updates": [
                    training_pb2.UpdateDone(batches=[training_pb2.UsedBatch()] * 70_000)
                ]
            },
            "over 65536 batches in updates that it kept",
        ),
        ({"description": "x" * 2_000_000}, "at most 1048576"),
    ],
)
def test_a_learner_that_begins_with_too_much_is_not_taken(
    world: WorkersWorld, said: dict[str, Any], words: str
) -> None:
    learner = _learner_ready(world, **said)
    assert words in world.why_dismissed(learner)
    assert world.core.members == ()


def test_what_a_learner_says_of_its_device_is_one_line(world: WorkersWorld) -> None:
    _learner_ready(world, description="cpu\nforged" + "x" * 9000)
    assert world.parts.registry.devices["learner-0"].startswith("cpu forgedxxx")
    assert len(world.parts.registry.devices["learner-0"]) < 300


# -- whoever it is --------------------------------------------------------------------------------


def test_a_report_of_another_role_is_blamed_on_its_sender(tmp_path: Path) -> None:
    for sender, body, words in (
        ("runner", _arrivals(1), "juggler.v1.Arrivals in place of juggler.v1.Note"),
        ("learner", attach_pb2.Done(), "juggler.v1.Done in place of juggler.v1.Arrivals"),
    ):
        world = WorkersWorld(tmp_path)
        worker = getattr(world, sender)
        world.report(worker, body)
        assert words in world.why_dismissed(worker)
    evaluator = world.join("evaluator")
    world.parts.hub.dismissed.clear()  # type: ignore[attr-defined]
    world.report(evaluator, _arrivals(1))
    assert "juggler.v1.Arrivals in place of juggler.v1.Note" in world.why_dismissed(evaluator)


def test_every_worker_may_tell_people_something(tmp_path: Path) -> None:
    world = WorkersWorld(tmp_path)
    workers = [world.runner, world.learner, world.join("evaluator")]
    world.parts.hub.dismissed.clear()  # type: ignore[attr-defined]
    for worker in workers:
        world.report(worker, training_pb2.Note(text="shares no memory"))
        assert world.told.messages[-1] == f"{worker.worker_id} shares no memory"
        assert world.why_dismissed(worker) == ""


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ([math.nan], "a return that is not finite"),
        ([1.0] * 3, "3 episodes, where there can be 2"),
        ([1.0] * 100_000, "at most 1056"),
    ],
)
def test_an_evaluation_that_cannot_be_is_not_booked(
    world: WorkersWorld, returns: list[float], words: str
) -> None:
    evaluator = world.join("evaluator")
    world.get_ready(evaluator)
    world.parts.commands.tell("evaluator-0", training_pb2.Evaluate(episodes=2))
    played = training_pb2.Evaluation(episode_returns=returns, episode_lengths=[1] * len(returns))
    world.reply(evaluator, world.asked(evaluator, training_pb2.Evaluate)[0][0], played)
    assert words in world.why_dismissed(evaluator)
    assert world.parts.metrics.evaluation_return is None


def test_each_agent_may_be_played_by_another_module_in_each_episode_of_an_evaluation() -> None:
    agents, episodes = ("left", "right"), 100
    told = [
        training_pb2.AgentReturns(agent=agent, module_id=f"a-copy-of-main-{k}", returns=[1.0])
        for agent in agents
        for k in range(episodes)
    ]
    many = {"episode_returns": [2.0] * episodes, "episode_lengths": [9] * episodes}
    evaluation = training_pb2.Evaluation(**many, agent_returns=told)
    body = any_pb2.Any()
    body.Pack(evaluation)
    request = training_pb2.Evaluate(episodes=episodes)
    assert read_evaluation(request, body, agents, lambda _: True) == evaluation


def test_a_traceback_cannot_look_like_lines_of_the_run(world: WorkersWorld) -> None:
    failure = attach_pb2.Failure(message="it failed", traceback="Traceback\nerror: forged")
    world.leave(world.runner, failure=failure, stack="  File x\nforged")
    (told,) = world.told.messages
    first, *others = told.splitlines()
    assert first == "envrunner-0 left: gone"
    assert "  error: forged" in others
    assert [each for each in others if not each.startswith("  ")] == ["It was here:"]


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


def test_the_same_failure_of_a_later_update_is_not_printed_whole_again(
    world: WorkersWorld,
) -> None:
    for number in (7, 12):
        said = f"nothing is finite in 5 updates in a row, the last of them update {number}"
        failure = attach_pb2.Failure(message=said, traceback="Traceback\nRuntimeError")
        world.leave(world.join("envrunner", 1), failure=failure)
    assert world.told.messages[1:] == ["envrunner-1 left for the same reason as before"]


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
    assert world.worker_events._rates.keys() == {world.runner, world.learner}
