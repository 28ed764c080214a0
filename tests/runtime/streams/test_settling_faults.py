from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.learner_end import PATIENCE, LearnerEnd, header, tree

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.streams.episodes import EpisodeSender

pytestmark = pytest.mark.usefixtures("grpc_api")


def test_no_batch_is_forgotten_when_settling_another_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the thread will raise
    learner = LearnerEnd(tmp_path)
    go_on, second_is_settled = threading.Event(), threading.Event()
    learner.answer = lambda _: "" if go_on.wait(PATIENCE) else "late"

    def settled(batch_id: int, reason: str, explanation: str) -> None:
        if batch_id == 1:
            raise RuntimeError("cannot settle")
        second_is_settled.set()

    sender = EpisodeSender(learner.address, call_metadata("secret", "run", "i"), settled)
    try:
        for batch_id in (1, 2):
            sender.send(header(batch_id), tree(batch_id))
        go_on.set()
        assert second_is_settled.wait(PATIENCE)
    finally:
        go_on.set()
        sender.close()
        learner.stop()
