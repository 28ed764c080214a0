"""How batches settle, and how EnvRunners and learners share memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.weights_learner import Learner, readers_stay, same

from juggler.envrunner import sampling_worker
from juggler.envrunner.envrunner_worker import EnvRunner
from juggler.envrunner.learner_streams import LearnerStreams
from juggler.envrunner.sampling_worker import Deliveries
from juggler.runtime.actors.attachment import Attachment, Contact, Detached
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.streams.memory_socket import MemorySocket
from juggler.runtime.streams.shared_directory import learner_socket
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


# EnvRunners and learners over TCP, with or without a shared directory.


LEARNER = training_pb2.Learners.Learner(
    worker_id="learner-0", incarnation="one", addresses=["127.0.0.1:1"]
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(tmp_path))
    return tmp_path


def _connected(index: int = 0, modules: int = 1) -> tuple[str, str, list[str]]:
    """An EnvRunner's sender, its shared memory, and its log."""
    said: list[str] = []
    attachment: Any = SimpleNamespace(
        worker_id=f"envrunner-{index}",
        run_id="run",
        incarnation="runner",
        report=lambda note: said.append(note.text),
    )
    contact = Contact("nowhere:1", token="secret")
    another = training_pb2.Learners.Learner()
    another.CopyFrom(LEARNER)
    another.worker_id = "learner-1"
    learners = [LEARNER, another]
    before: set[str] = set()
    for number in range(modules):
        streams = LearnerStreams(f"m{number}", index, attachment, contact, lambda *_: None, before)
        streams.connect(learners)
        sender: Any = streams.sender("learner-0")
        found = sender._address, sender._memory, said
        streams.close()
    return found


@pytest.mark.usefixtures("directory")
def test_with_a_learner_in_the_directory_its_memory_is_shared() -> None:
    address = learner_socket("secret", "run", "one")
    listens = MemorySocket(address)
    assert _connected() == ("127.0.0.1:1", address, [])
    listens.close()


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("whose", [("another", "run", "one"), ("secret", "run", "two")])
def test_a_learner_that_is_not_in_the_directory_is_said_once_for_all_envrunners(
    whose: tuple[str, str, str], directory: Path
) -> None:
    listens = MemorySocket(learner_socket(*whose))
    why = (
        f"shares no memory with learners that have no socket in {directory}: they are on other "
        "hosts, or JUGGLER_SHARED_DIR is not set there"
    )
    assert _connected(modules=3) == ("127.0.0.1:1", "", [why]), "many notes would end the worker"
    assert _connected(index=1) == ("127.0.0.1:1", "", [])
    listens.close()


@pytest.mark.usefixtures("directory")
def test_without_a_directory_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUGGLER_SHARED_DIR")
    assert _connected() == ("127.0.0.1:1", "", [])


@pytest.mark.usefixtures("directory")
def test_a_directory_that_is_gone_or_memory_that_is_not_to_be_shared_is_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listens = MemorySocket(learner_socket("secret", "run", "one"))
    monkeypatch.setenv("JUGGLER_SHARED_MEMORY", "off")
    assert _connected() == ("127.0.0.1:1", "", [])
    monkeypatch.delenv("JUGGLER_SHARED_MEMORY")
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(directory / "gone"))
    address, memory, said = _connected(modules=2)
    assert (address, memory) == ("127.0.0.1:1", "")
    (one,) = said
    assert one.startswith(f"shares no memory: JUGGLER_SHARED_DIR={directory}/gone: No such file")
    listens.close()
