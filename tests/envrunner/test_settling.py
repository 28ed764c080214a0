"""Batches settle in stream threads, while the EnvRunner samples on."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.weights_learner import Learner, readers_stay, same

from juggler.envrunner import sampling_worker
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.envrunner_worker import EnvRunner
from juggler.envrunner.learner_streams import LearnerStreams
from juggler.envrunner.sampling_worker import Deliveries
from juggler.runtime.actors.attachment import Attachment, Contact, Detached
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.v1 import training_pb2


class _Attachment:
    run_id, incarnation, worker_id = "run", "incarnation", "envrunner-0"

    def __init__(self) -> None:
        self.replies: list[tuple[int, training_pb2.Receipt]] = []

    def reply(self, command_id: int, body: training_pb2.Receipt) -> None:
        self.replies.append((command_id, body))


def test_a_runner_that_leaves_waits_until_what_it_sent_is_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling_worker, "_ACKNOWLEDGED_SECONDS", 30.0)
    attachment = _Attachment()
    inbox: Mailbox[Any] = Mailbox()
    runner = runner_with(attachment, inbox, "blue")
    runner._deliveries._open["blue", 7] = (3, training_pb2.Receipt(batch_id=7, live_steps=5))

    class Acknowledged(threading.Condition):
        """The batch is acknowledged as soon as it is waited for."""

        def wait_for(self, *given: Any) -> bool:
            settle = runner._deliveries.settled
            threading.Thread(target=settle, args=("blue", 7, "", "")).start()
            return super().wait_for(*given)

    runner._deliveries._lock = Acknowledged()
    inbox.put(Detached("terminated"))
    assert runner.run() == "terminated"
    ((command_id, receipt),) = attachment.replies
    assert (command_id, receipt.live_steps, receipt.dropped) == (3, 5, "")


def runner_with(attachment: _Attachment, inbox: Mailbox[Any], *module_ids: str) -> EnvRunner:
    """One that is set up with these modules."""
    contact = Contact("unix:nowhere")
    runner = EnvRunner(cast(Attachment, attachment), inbox, contact)
    settled = runner._deliveries.settled
    for module_id in module_ids:
        streams = LearnerStreams(
            module_id, 0, cast(Attachment, attachment), contact, settled, set()
        )
        runner._streams[module_id] = streams
    return runner


class _Sender:
    """To a learner that acknowledges nothing."""

    def __init__(self, runner: EnvRunner) -> None:
        self._runner = runner

    def close(self) -> None:
        settle = self._runner._deliveries.settled
        lost = ("blue", 7, "learner_lost", "the channel was closed")
        threading.Thread(target=settle, args=lost).start()


def test_what_nobody_acknowledges_is_dropped_before_a_runner_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling_worker, "_ACKNOWLEDGED_SECONDS", 0.1)
    monkeypatch.setattr(sampling_worker, "_CLOSED_SECONDS", 30.0)
    attachment = _Attachment()
    inbox: Mailbox[Any] = Mailbox()
    runner = runner_with(attachment, inbox, "blue")
    runner._streams["blue"].senders["learner-0"] = (
        "incarnation",
        cast(EpisodeSender, _Sender(runner)),
    )
    runner._deliveries._open["blue", 7] = (3, training_pb2.Receipt(batch_id=7, live_steps=5))
    inbox.put(Detached("terminated"))
    runner.run()
    ((command_id, receipt),) = attachment.replies
    assert (command_id, receipt.live_steps, receipt.dropped) == (3, 5, "learner_lost")


def test_time_is_booked_while_a_receipt_is_made() -> None:
    attachment = _Attachment()
    deliveries = Deliveries(cast(Attachment, attachment))

    has_come = threading.Event()  # to the lock, or to its end without one

    class Noted(threading.Condition):
        def __enter__(self) -> bool:
            if threading.current_thread() is booking:
                has_come.set()
            return super().__enter__()

    class Slow(defaultdict[str, float]):
        """A thread books time while another goes through it."""

        def __iter__(self) -> Iterator[Any]:
            for key in super().__iter__():
                booking.start()
                assert has_come.wait(60)
                yield key

    def book() -> None:
        deliveries.spent({"sending": 2.0})
        has_come.set()

    booking = threading.Thread(target=book)
    deliveries._lock = Noted()
    deliveries._seconds = Slow(float, {"waiting": 1.0})
    deliveries._open["blue", 7] = (3, training_pb2.Receipt(batch_id=7))
    deliveries.settled("blue", 7, "", "")
    booking.join()
    ((command_id, receipt),) = attachment.replies
    assert (command_id, dict(receipt.seconds)) == (3, {"waiting": 1.0})
    assert dict(deliveries._seconds.items()) == {"waiting": 1.0, "sending": 2.0}


def test_learners_of_another_module_are_passed_over() -> None:
    runner = runner_with(_Attachment(), Mailbox(), "blue")
    learner = training_pb2.Learners.Learner(worker_id="learner-0", addresses=["unix:nowhere"])
    runner._learners(1, training_pb2.Learners(module_id="red", learners=[learner]))
    assert runner._streams["blue"].senders == {}
    assert not runner._streams["blue"].subscribed


def test_requests_of_another_round_do_not_come_before_a_round_is_complete() -> None:
    runner = runner_with(_Attachment(), Mailbox(), "blue", "red", "green")
    blue = training_pb2.SampleRequest(module_id="blue", round=1, requests_in_round=2)
    red = training_pb2.SampleRequest(module_id="red", round=2, requests_in_round=2)
    runner._sample(1, blue)
    with pytest.raises(ValueError, match="a request of round 2 arrived before"):
        runner._sample(2, red)
    with pytest.raises(ValueError, match="round 1 has two requests for module 'blue'"):
        runner._sample(3, blue)


# EnvRunners of one host read a module's weights from its learner once.


SIZE = 100_000  # elements of float32: 400 kB are large

Connect = Callable[..., LearnerStreams]


@pytest.fixture
def server(tmp_path: Path, every_thread_ends: None) -> Iterator[Learner]:
    made = Learner(tmp_path, max_streams=16)
    yield made
    made.stop()


@pytest.fixture
def connect(server: Learner, tmp_path: Path) -> Iterator[Connect]:
    made: list[LearnerStreams] = []

    def connect(learner: str = str(tmp_path), local: bool = True) -> LearnerStreams:
        """The streams of another EnvRunner to this incarnation of the learner."""
        attachment: Any = SimpleNamespace(
            worker_id=f"envrunner-{len(made)}", run_id="run", incarnation=f"{len(made)}"
        )
        contact = Contact("unix:nowhere", token="secret", local=local)
        streams = LearnerStreams("default", len(made), attachment, contact, lambda *_: None, set())
        made.append(streams)
        addresses = [server.address, server.tcp_address]
        told = training_pb2.Learners.Learner(
            worker_id="learner-0", incarnation=learner, addresses=addresses
        )
        streams.connect([told])
        return streams

    yield connect
    for each in made:
        each.close()


def test_a_learner_has_one_reader_for_each_host(server: Learner, connect: Connect) -> None:
    here = [connect(), connect(), connect(local=False)]
    elsewhere = [connect(learner="of another run"), connect(learner="of another run")]
    for update in range(1, 6):
        version = server.publish(1, update, SIZE)
        for streams in here + elsewhere:
            acted: list[Any] = []
            assert streams.act_on(version, lambda: False, acted.append)
            newest = streams.newest
            assert newest is not None
            assert same(newest, version, SIZE)
            assert streams.version == version
    readers_stay(server, 2)  # one of each run reads for its others


@pytest.mark.parametrize(
    ("key", "value"),
    [("env", 3), ("env_kwargs", [1]), ("envs_per_runner", True), ("vectorize", "x")],
)
def test_a_bad_value_is_named_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key}.*{re.escape(repr(value))}"):
        EnvRunnerConfig(**{key: value}).validate()
