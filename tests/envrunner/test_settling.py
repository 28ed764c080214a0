"""Batches are settled in the threads of streams, while the EnvRunner goes on sampling."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import pytest

from juggler.envrunner import envrunner_worker as worker
from juggler.envrunner.envrunner_worker import EnvRunner
from juggler.runtime.actors.attachment import Attachment, Detached
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.worker import Contact
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
    monkeypatch.setattr(worker, "_ACKNOWLEDGED_SECONDS", 30.0)
    attachment = _Attachment()
    inbox: Mailbox[Any] = Mailbox()
    runner = EnvRunner(cast(Attachment, attachment), inbox, Contact("unix:nowhere"))
    runner._open[7] = (3, training_pb2.Receipt(batch_id=7, live_steps=5))
    inbox.put(Detached("terminated"))
    acknowledging = threading.Timer(0.2, runner._settled, args=(7, "", ""))
    acknowledging.start()
    assert runner.run() == "terminated"
    ((command_id, receipt),) = attachment.replies
    assert (command_id, receipt.live_steps, receipt.dropped) == (3, 5, "")


class _Sender:
    """To a learner that acknowledges nothing."""

    def __init__(self, runner: EnvRunner) -> None:
        self._runner = runner

    def close(self) -> None:
        settle = self._runner._settled
        threading.Thread(target=settle, args=(7, "learner_lost", "the channel was closed")).start()


def test_what_nobody_acknowledges_is_dropped_before_a_runner_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "_ACKNOWLEDGED_SECONDS", 0.1)
    monkeypatch.setattr(worker, "_CLOSED_SECONDS", 30.0)
    attachment = _Attachment()
    inbox: Mailbox[Any] = Mailbox()
    runner = EnvRunner(cast(Attachment, attachment), inbox, Contact("unix:nowhere"))
    runner._senders["learner-0"] = ("incarnation", cast(EpisodeSender, _Sender(runner)))
    runner._open[7] = (3, training_pb2.Receipt(batch_id=7, live_steps=5))
    inbox.put(Detached("terminated"))
    runner.run()
    ((command_id, receipt),) = attachment.replies
    assert (command_id, receipt.live_steps, receipt.dropped) == (3, 5, "learner_lost")


def test_time_is_booked_while_a_receipt_is_made() -> None:
    attachment = _Attachment()
    runner = EnvRunner(cast(Attachment, attachment), Mailbox(), Contact("unix:nowhere"))

    class Slow(defaultdict[str, float]):
        """Somebody books time in the midst of whoever goes through it."""

        def __iter__(self) -> Iterator[Any]:
            for key in super().__iter__():
                booking.start()
                booking.join(timeout=0.2)
                yield key

    booking = threading.Thread(target=runner._spent, args=({"sending": 2.0},))
    runner._seconds = Slow(float, {"waiting": 1.0})
    runner._open[7] = (3, training_pb2.Receipt(batch_id=7))
    runner._settled(7, "", "")
    booking.join()
    ((command_id, receipt),) = attachment.replies
    assert (command_id, dict(receipt.seconds)) == (3, {"waiting": 1.0})
    assert dict(runner._seconds.items()) == {"waiting": 1.0, "sending": 2.0}


def test_a_request_for_a_module_that_it_does_not_act_with_is_refused() -> None:
    runner = EnvRunner(cast(Attachment, _Attachment()), Mailbox(), Contact("unix:nowhere"))
    runner._module_id = "blue"
    with pytest.raises(ValueError, match="batch of module 'red', and acts with 'blue'"):
        runner._sample(1, training_pb2.SampleRequest(module_id="red", batch_id=7))


def test_learners_of_another_module_are_passed_over() -> None:
    runner = EnvRunner(cast(Attachment, _Attachment()), Mailbox(), Contact("unix:nowhere"))
    runner._module_id = "blue"
    learner = training_pb2.Learners.Learner(worker_id="learner-0", addresses=["unix:nowhere"])
    runner._learners(1, training_pb2.Learners(module_id="red", learners=[learner]))
    assert runner._senders == {}
    assert runner._subscription is None
