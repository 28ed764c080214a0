"""EnvRunners of one host read a module's weights from its learner once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.sharing import soon
from support.weights_learner import PATIENCE, Learner, same

from juggler.envrunner.learner_streams import LearnerStreams
from juggler.runtime.actors.worker import Contact
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2

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
    soon(lambda: len(server.publisher._subscribers) == 2, "one of each run reads for its others")


def test_who_stays_acts_with_newer_weights_when_who_read_them_leaves(
    server: Learner, connect: Connect
) -> None:
    streams = [connect() for _ in range(3)]
    version = server.publish(1, 1, SIZE)
    update = 1
    while len(streams) > 1:
        for each in streams:
            assert each.act_on(version, lambda: False, lambda _: None)
        soon(lambda: len(server.publisher._subscribers) == 1, "one reads")
        (relay,) = (s for s in streams if cast(Any, s._subscription)._relay is not None)
        relay.close()
        streams.remove(relay)
        update += 1
        version = server.publish(1, update, SIZE)
    assert streams[0]._subscription is not None
    weights = streams[0]._subscription.wait_for(Version(1, update), PATIENCE)
    assert same(weights, version, SIZE)
