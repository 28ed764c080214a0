"""EpisodeSender when its stream breaks or closes: every batch is settled, and only once."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders, header, tree

from juggler.runtime.streams.episodes import BatchFrame

pytestmark = pytest.mark.usefixtures("grpc_api")


def test_a_batch_for_a_learner_that_is_not_there_is_lost(tmp_path: Path, senders: Senders) -> None:
    senders.open(f"unix:{tmp_path / 'nobody'}").send(header(1), tree(1))
    reason, explanation = senders.wait_for(1)[1]
    assert reason == "learner_lost"
    assert explanation


def test_a_broken_stream_settles_each_batch_that_was_not_acknowledged_once(
    learner: LearnerEnd, senders: Senders, gate: threading.Event
) -> None:
    sender = senders.open(learner.address)
    for batch_id in range(1, 30):
        sender.send(header(batch_id), tree(batch_id, 100_000))
    senders.wait_for(1)
    learner.begin_to_stop()
    settled = senders.wait_for(*range(1, 30))
    gate.set()  # the learner's thread goes on as if nothing had happened
    assert settled.pop(1) == ("", "")
    assert {reason for reason, _ in settled.values()} == {"learner_lost"}
    assert all(explanation for _, explanation in settled.values())
    sender.close()
    assert senders.settled_more_than_once() == []


def test_a_learner_that_fails_over_a_batch_loses_what_it_had_not_acknowledged(
    learner: LearnerEnd, senders: Senders
) -> None:
    def answer(frame: BatchFrame) -> str:
        if frame.header.batch_id == 2:
            raise RuntimeError("out of order")
        return ""

    learner.answer = answer
    sender = senders.open(learner.address)
    sender.send(header(1), tree(1))
    senders.wait_for(1)
    sender.send(header(2), tree(2))
    reason, explanation = senders.wait_for(2)[2]
    assert reason == "learner_lost"
    assert "out of order" in explanation
    senders.send_until_one_arrives(sender, first_id=3)
    assert senders.settled_more_than_once() == []


def test_the_sender_opens_a_new_stream_to_a_learner_that_came_back(
    learner: LearnerEnd, senders: Senders
) -> None:
    sender = senders.open(learner.address)
    sender.send(header(1), tree(1))
    senders.wait_for(1)
    for _ in range(3):
        learner.stop()
        learner.start()
        arrived = senders.send_until_one_arrives(sender, first_id=len(senders.settled) + 1)
        assert learner.taken[-1].header.batch_id == arrived
        np.testing.assert_equal(learner.taken[-1].tree, tree(arrived))
    assert senders.settled_more_than_once() == []


def test_batches_sent_while_the_learner_dies_and_comes_back_are_settled_once_each(
    learner: LearnerEnd, senders: Senders
) -> None:
    sender = senders.open(learner.address)
    sending = threading.Event()

    def send() -> None:
        for batch_id in range(1, 401):
            sender.send(header(batch_id), tree(batch_id, 20_000))
            if batch_id == 50:
                sending.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert sending.wait(PATIENCE)
    learner.stop()
    learner.start()
    thread.join(PATIENCE)
    settled = senders.wait_for(*range(1, 401))
    sender.close()
    assert {reason for reason, _ in settled.values()} <= {"", "learner_lost"}
    taken = [frame.header.batch_id for frame in learner.taken]
    assert len(taken) == len(set(taken)), "a batch arrived twice"
    acknowledged = {batch_id for batch_id, (reason, _) in settled.items() if not reason}
    assert acknowledged <= set(taken)
    assert senders.settled_more_than_once() == []


# -- closing --------------------------------------------------------------------------------------


def test_closing_loses_what_is_not_acknowledged(
    learner: LearnerEnd, senders: Senders, gate: threading.Event
) -> None:
    sender = senders.open(learner.address)
    for batch_id in range(1, 10):
        sender.send(header(batch_id), tree(batch_id, 300_000))
    senders.wait_for(1)
    sender.close()
    settled = senders.wait_for(*range(1, 10))
    gate.set()
    assert settled.pop(1) == ("", "")
    assert {reason for reason, _ in settled.values()} == {"learner_lost"}
    assert senders.settled_more_than_once() == []


def test_closing_a_sender_frees_the_learners_thread(learner: LearnerEnd, senders: Senders) -> None:
    for batch_id in range(1, 30):  # more than the learner has threads
        sender = senders.open(learner.address)
        sender.send(header(batch_id), tree(batch_id))
        assert senders.wait_for(batch_id) == {batch_id: ("", "")}
        sender.close()


def test_a_sender_that_sent_nothing_can_be_closed(learner: LearnerEnd, senders: Senders) -> None:
    senders.open(learner.address).close()
    assert senders.settled == []
    assert learner.opened == 0


def test_what_comes_after_a_sender_was_closed_is_lost(
    learner: LearnerEnd, senders: Senders
) -> None:
    sender = senders.open(learner.address)
    sender.close()
    sender.send(header(1), tree(1))
    assert senders.wait_for(1)[1][0] == "learner_lost"
    assert senders.settled_more_than_once() == []
