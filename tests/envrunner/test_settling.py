"""Batches are settled in the threads of streams, while the EnvRunner goes on sampling."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

from juggler.envrunner.worker import EnvRunner
from juggler.runtime.actors.attachment import Attachment
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.worker import Contact
from juggler.runtime.wire.v1 import training_pb2


class _Attachment:
    run_id, incarnation, worker_id = "run", "incarnation", "envrunner-0"

    def __init__(self) -> None:
        self.replies: list[tuple[int, training_pb2.Receipt]] = []

    def reply(self, command_id: int, body: training_pb2.Receipt) -> None:
        self.replies.append((command_id, body))


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
