"""What is said where `juggler status` and workers dial something that is no driver."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from juggler.cli import main
from juggler.runtime.actors.attachment import AttachError, Attachment, new_incarnation
from juggler.runtime.actors.mailbox import Mailbox


@pytest.fixture
def learner() -> Iterator[str]:
    """The address of a gRPC server that knows no method of a driver."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_who_asks_a_learner_for_the_status_is_told_that_it_is_no_driver(
    learner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--once", learner]) == 1
    said = capsys.readouterr().err
    assert f"juggler status: what answers at {learner} is no driver, but perhaps a learner" in said
    assert "Method not found" not in said


def test_a_worker_that_dials_a_learner_is_told_that_it_is_no_driver(learner: str) -> None:
    with pytest.raises(AttachError, match=f"^what answers at {learner} is no driver"):
        Attachment(learner, "worker", -1, new_incarnation(), Mailbox())
