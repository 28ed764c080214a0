from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.protobuf import any_pb2
from support.changes import SkippedTime
from support.hub_world import World

from juggler.runtime.actors import endpoints
from juggler.runtime.actors import hub as hub_module
from juggler.runtime.actors.attachment import (
    LOST_THE_DRIVER,
    AttachError,
    Detached,
    ReceivedCommand,
    describe,
)
from juggler.runtime.actors.endpoints import PROTOCOL_VERSION, EndpointError
from juggler.runtime.actors.hub import (
    ATTACH_METHOD,
    REASON_KEY,
    Mailbox,
    WorkerJoined,
    WorkerLeft,
    WorkerReplied,
    WorkerReported,
)
from juggler.runtime.actors.requests import CapReached, RequestPool
from juggler.runtime.actors.worker import CommandLoop, FailedOnRequest
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


def _commands(inbox: Mailbox[Any], count: int) -> list[ReceivedCommand]:
    items: list[Any] = []
    deadline = time.monotonic() + 30
    while len(items) < count and time.monotonic() < deadline:
        items += inbox.gather(timeout=1.0)
    assert len(items) == count, items
    return items


def test_a_worker_attaches_and_gets_an_id_of_role_and_index(world: World) -> None:
    world.start()
    first, second = world.attach(), world.attach()
    assert [first.worker_id, second.worker_id] == ["worker-0", "worker-1"]
    assert world.attach("other", index=7).worker_id == "other-7"
    joined = world.wait_for(WorkerJoined).worker
    assert (joined.worker_id, joined.incarnation) == ("worker-0", first.incarnation)


def test_a_worker_that_lost_its_driver_first_gets_its_index_back(world: World) -> None:
    world.start()
    first, _ = world.attach(), world.attach()
    other = world.attach("other", predecessor=first.incarnation)
    assert other.worker_id == "other-0", "another role's: no worker is replaced"
    assert world.attach(predecessor="unknown-0").worker_id == "worker-2"
    joined = {world.wait_for(WorkerJoined).worker.incarnation for _ in range(4)}
    again = world.attach(predecessor=first.incarnation)
    assert again.worker_id == "worker-0"
    left, back = world.wait_for(WorkerLeft), world.wait_for(WorkerJoined)
    assert left.worker.incarnation == first.incarnation
    assert "replaced" in left.reason
    assert back.worker.incarnation == again.incarnation not in joined
    assert len(world.hub.vitals()) == 4
    world.hub.close()
    later = [*world.seen, *world.events.gather(0.5)]
    assert not any(isinstance(each, WorkerLeft) and each.worker is left.worker for each in later)


def test_commands_arrive_in_order_and_each_gets_its_reply(world: World) -> None:
    world.start()
    inbox: Mailbox[Any] = Mailbox()
    attachment = world.attach(inbox=inbox)
    worker = world.wait_for(WorkerJoined).worker
    for command_id in range(1, 101):
        assert world.hub.send(worker, command_id, attach_pb2.Stop())
    commands = _commands(inbox, 100)
    assert [command.command_id for command in commands] == list(range(1, 101))
    for command in commands:
        attachment.reply(command.command_id, attach_pb2.Done())
    replies = [world.wait_for(WorkerReplied).reply for _ in range(100)]
    assert [reply.id for reply in replies] == list(range(1, 101))
    assert all(reply.last and reply.body.Is(attach_pb2.Done.DESCRIPTOR) for reply in replies)


def test_no_command_between_two_messages_is_lost() -> None:
    body = any_pb2.Any(value=bytes(700 << 10))  # two of them fill a message
    commands = [attach_pb2.Command(id=number, body=body) for number in range(5)]
    connection: Any = SimpleNamespace(
        wake=asyncio.Event(), outbox=deque(commands), over="enough", cancel=lambda: None
    )
    sent: list[list[int]] = []

    class Stream:
        async def send(self, message: attach_pb2.ToWorker) -> None:
            sent.append([command.id for command in message.commands])

    async def write() -> None:
        connection.wake.set()
        await hub_module.Hub._write(cast(Any, None), connection, cast(Any, Stream()))

    asyncio.run(write())
    assert sent == [[0, 1], [2, 3], [4]]


def test_a_wake_while_items_are_taken_ends_the_next_wait() -> None:
    mailbox = Mailbox[int]()

    class Waking(deque[int]):
        def popleft(self) -> int:
            mailbox.wake()
            return super().popleft()

    mailbox._items = Waking()
    mailbox.put(1)
    assert mailbox.gather() == [1]
    assert mailbox._ready.is_set()


def test_a_failed_command_carries_the_workers_own_traceback(world: World) -> None:
    world.start()
    attachment = world.attach()
    try:
        raise KeyError("a very particular key")
    except KeyError as error:
        attachment.fail(5, error)
    failure = world.wait_for(WorkerReplied).reply.failure
    assert "a very particular key" in failure.message
    assert "test_attach.py" in failure.traceback


def test_reports_arrive_unasked(world: World) -> None:
    world.start()
    world.attach().report(attach_pb2.Refusal(reason="just so"))
    body = attach_pb2.Refusal()
    assert world.wait_for(WorkerReported).body.Unpack(body)
    assert body.reason == "just so"


def test_what_is_too_large_for_a_message_is_told_and_breaks_no_connection(world: World) -> None:
    world.start()
    attachment, large = world.attach(), attach_pb2.Refusal(reason="x" * (9 << 20))
    worker = world.wait_for(WorkerJoined).worker
    with pytest.raises(EndpointError, match=r"to the driver has 9\.0 MiB"):
        attachment.report(large)
    with pytest.raises(EndpointError, match=r"to worker-0 has 9\.0 MiB"):
        world.hub.send(worker, 1, large)
    attachment.report(attach_pb2.Refusal(reason="small"))
    assert world.wait_for(WorkerReported)


def test_a_farewell_says_why_the_worker_left(world: World) -> None:
    world.start()
    world.attach().farewell("had enough", ValueError("of this"))
    left = world.wait_for(WorkerLeft)
    assert left.reason == "had enough"
    assert "of this" in left.failure.message


def test_texts_of_workers_are_single_lines_of_limited_length() -> None:
    text, message = "one\ntwo \x0b three" + "x" * 5000, attach_pb2.FromWorker()
    message.heartbeat.held_up_by = message.farewell.reason = text
    for failure in (message.farewell.failure, message.replies.add().failure):
        failure.message, failure.traceback = text, text
    read = hub_module.read_message(message.SerializeToString())
    failures = read.farewell.failure, read.replies[0].failure
    lines = [read.heartbeat.held_up_by, read.farewell.reason, *(each.message for each in failures)]
    assert all(line.startswith("one two threex") and len(line) <= 1000 for line in lines)
    assert [each.traceback for each in failures] == [text, text]


def test_workers_of_a_role_may_be_lost_sooner_from_some_moment_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("juggler.runtime.actors.attachment.Attachment._beat", lambda self: None)
    world.start(silence_seconds=1000)
    world.attach()
    world.loop.let_pass(20)
    assert world.hub.vitals()["worker-0"].seconds_silent > 10
    world.hub.lose_after("worker", 10)
    world.loop.let_pass(1)
    assert "no heartbeat" in world.wait_for(WorkerLeft).reason


def test_a_main_loop_that_hangs_is_found_although_the_heart_beats(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start(hang_seconds=120.0)
    attachment = world.attach()
    attachment.held_up_by = lambda frame: "a slow step"
    with attachment.busy():
        monkeypatch.setattr(attachment._threads, "_stood_still", -1000.0)
        attachment.beat(2.0)
        left = world.wait_for(WorkerLeft)
    assert left.reason.startswith("hung in a slow step: no progress for 1")
    assert "in test_a_main_loop_that_hangs_is_found" in left.stack


def test_the_end_of_the_hub_reaches_its_workers(world: World) -> None:
    world.start()
    inbox: Mailbox[Any] = Mailbox()
    world.attach(inbox=inbox)
    world.wait_for(WorkerJoined)
    world.hub.close()
    (last,) = _commands(inbox, 1)
    assert isinstance(last, Detached)
    assert last.reason.startswith((LOST_THE_DRIVER, "the driver ended"))


def test_another_protocol_version_is_refused_and_told_what_to_do(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    monkeypatch.setattr(hub_module, "PROTOCOL_VERSION", 99)
    with pytest.raises(AttachError, match=r"version 99.*install the same version"):
        world.attach()


def test_one_worker_too_many_is_refused(world: World) -> None:
    world.start(max_workers=2)
    world.attach()
    world.attach()
    with pytest.raises(AttachError, match="at most 2 workers"):
        world.attach()


def test_a_driver_that_nobody_runs_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(endpoints, "time", SkippedTime(step=1.0))
    with pytest.raises(EndpointError, match=r"no driver answers at unix:.*hub\.sock"):
        world.attach(timeout=10.0)


def test_attaching_and_leaving_leaves_no_threads_behind(
    every_thread_ends: None, world: World
) -> None:
    world.start()
    world.attach().farewell("bye")
    world.wait_for(WorkerLeft)


# Attach streams when one side says or does what it should not, or stands still.


def test_a_failure_of_any_length_fits_a_message(world: World) -> None:
    world.start()
    world.attach().fail(1, OSError("x" * 9_000_000))
    failure = world.wait_for(WorkerReplied).reply.failure
    assert failure.message.startswith("OSError: xxx")
    assert failure.message.endswith("xxx")
    assert len(failure.message) < 100_000


def test_a_failure_may_hold_what_utf8_cannot() -> None:
    assert "robot-\\udc80.urdf" in describe(OSError("no file robot-\udc80.urdf")).message


def test_a_role_may_have_a_limit(world: World) -> None:
    world.start(most_of={"other": 1})
    first = world.attach("other")
    with pytest.raises(AttachError, match="already has its 1 other"):
        world.attach("other")
    for _ in range(3):
        world.attach("worker")
    successor = world.attach("other", index=0)  # of a process that may be dead
    assert successor.worker_id == first.worker_id


# Refused workers are told why.


def hello(**changes: Any) -> bytes:
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "role": "worker",
        "index": -1,
        "incarnation": "bad",
        "token": "secret",
    }
    return attach_pb2.FromWorker(hello=attach_pb2.Hello(**fields | changes)).SerializeToString()


def conversation(address: str, *messages: bytes) -> tuple[bool, str]:
    """Whether a worker with this greeting was accepted, and its stream's end."""
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for message in messages:
        outgoing.put(message)
    welcome = False
    # No limit on what it sends.
    with grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel:
        call = channel.stream_stream(ATTACH_METHOD)(iter(outgoing.get, None), timeout=30)
        try:
            for raw in call:
                down = attach_pb2.ToWorker.FromString(raw)
                welcome = welcome or down.HasField("welcome")
                if down.HasField("refusal"):
                    return welcome, down.refusal.reason
            reason = dict(call.trailing_metadata()).get(REASON_KEY, b"").decode()
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            outgoing.put(None)
    return welcome, reason


#: What else is wrong with a hello is in `errors.txt`.
NOT_LET_IN: dict[str, list[bytes]] = {
    "sent bytes that are not a message of an attach stream": [b"\xff\xff"],
    "the token is missing or wrong": [hello(token="guess")],
    "RESOURCE_EXHAUSTED: SERVER: Received message larger than max": [hello(host="x" * 9_000_000)],
}


@pytest.mark.parametrize("answer", NOT_LET_IN)
def test_who_is_not_let_in_is_told_why(world: World, answer: str) -> None:
    world.start(token="secret")
    welcome, reason = conversation(world.address, *NOT_LET_IN[answer])
    assert not welcome
    assert reason.startswith(answer)


def test_who_sends_no_message_is_let_go(world: World) -> None:
    world.start(token="secret")
    why = "sent bytes that are not a message of an attach stream"
    assert conversation(world.address, hello(), b"\xff\xff") == (True, why)
    assert world.wait_for(WorkerLeft).worker.incarnation == "bad"


def test_a_worker_that_sends_garbage_is_let_go_and_forgotten(world: World) -> None:
    world.start(token="secret")
    why = "sent bytes that are not a message of an attach stream"
    assert conversation(world.address, hello(), b"\xff\xff") == (True, why)
    assert world.wait_for(WorkerLeft).worker.incarnation == "bad"
    assert world.hub.vitals() == {}


def test_who_says_no_hello_is_told_why(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, receive = threading.Event(), hub_module.AttachStream.receive

    def received(self: Any) -> Any:
        waits.set()
        return receive(self)

    monkeypatch.setattr(hub_module.AttachStream, "receive", received)
    world.start(token="secret")
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(conversation, world.address)
        assert waits.wait(60)
        world.loop.let_pass(11)
        assert told.result(60) == (False, "no hello within 10 s")


def test_a_worker_is_local_only_where_it_came_over_a_unix_socket(world: World) -> None:
    world.start()
    world.attach(local=True)
    assert world.wait_for(WorkerJoined).worker.local
    world.address = world.tcp_address
    world.attach(local=True)
    assert not world.wait_for(WorkerJoined).worker.local


def test_a_worker_hears_why_it_was_let_go(world: World) -> None:
    world.start()
    inbox: Mailbox[Any] = Mailbox()
    world.attach(inbox=inbox)
    world.hub.dismiss(world.wait_for(WorkerJoined).worker, "sent an invalid message: é")
    (detached,) = inbox.gather(timeout=60)
    assert isinstance(detached, Detached)
    assert detached.reason == "the driver dismissed this worker: sent an invalid message: é"


def _loop(world: World) -> tuple[CommandLoop, Any]:
    world.start()
    inbox: Mailbox[Any] = Mailbox()
    loop = CommandLoop(world.attach(inbox=inbox), inbox)
    return loop, world.wait_for(WorkerJoined).worker


def test_a_stop_goes_before_everything_that_waits(world: World) -> None:
    loop, worker = _loop(world)
    carried_out: list[int] = []
    first, rest_sent = threading.Event(), threading.Event()

    def work(command_id: int, _: training_pb2.Discard) -> attach_pb2.Done:
        carried_out.append(command_id)
        first.set()
        assert rest_sent.wait(60)
        while not loop.over():
            pass  # as a long wait of a handler does
        return attach_pb2.Done()

    loop.on(training_pb2.Discard, work)
    reasons: list[str] = []
    thread = threading.Thread(target=lambda: reasons.append(loop.run()))
    thread.start()
    world.hub.send(worker, 1, training_pb2.Discard())
    assert first.wait(60)
    world.hub.send(worker, 2, training_pb2.Discard())
    world.hub.send(worker, 3, attach_pb2.Stop())
    rest_sent.set()
    thread.join(10)
    assert reasons == ["stopped by the driver"]
    assert carried_out == [1]


def test_a_stop_because_of_a_failure_is_a_failure_of_the_worker(world: World) -> None:
    loop, worker = _loop(world)
    world.hub.send(worker, 1, attach_pb2.Stop(failure="module 'x': not finite"))
    with pytest.raises(FailedOnRequest) as raised:
        loop.run()
    assert describe(raised.value) == attach_pb2.Failure(message="module 'x': not finite")


def test_an_exception_is_the_commands_answer_and_ends_the_loop(world: World) -> None:
    loop, worker = _loop(world)

    def fail(_: int, __: training_pb2.Discard) -> None:
        raise RuntimeError("no such luck")

    loop.on(training_pb2.Discard, fail)
    world.hub.send(worker, 4, training_pb2.Discard())
    with pytest.raises(RuntimeError, match="no such luck"):
        loop.run()
    reply = world.wait_for(WorkerReplied).reply
    assert (reply.id, "no such luck" in reply.failure.message) == (4, True)


def test_a_farewell_names_what_was_begun_and_has_no_answer(world: World) -> None:
    world.start()
    inbox: Mailbox[Any] = Mailbox()
    attachment = world.attach(inbox=inbox)
    loop = CommandLoop(attachment, inbox)
    worker = world.wait_for(WorkerJoined).worker

    def work(command_id: int, _: training_pb2.Discard) -> attach_pb2.Done | None:
        if command_id == 3:
            attachment.reply(1, attach_pb2.Done())  # as one that was under way till now
            inbox.put(Detached("terminated"))
        return attach_pb2.Done() if command_id == 2 else None

    loop.on(training_pb2.Discard, work)
    for command_id in range(1, 6):
        world.hub.send(worker, command_id, training_pb2.Discard())
    attachment.farewell(loop.run())
    left = world.wait_for(WorkerLeft)
    assert (left.reason, left.unanswered) == ("terminated", {3})


def test_a_command_that_nobody_knows_is_answered_and_survived(world: World) -> None:
    loop, worker = _loop(world)
    world.hub.send(worker, 1, training_pb2.Discard())
    world.hub.send(worker, 2, attach_pb2.Stop())
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_nothing_is_lost_between_many_threads_and_one_loop() -> None:
    mailbox: Mailbox[int] = Mailbox()
    each, threads = 2000, 4

    def put(start: int) -> None:
        for number in range(start, start + each):
            mailbox.put(number)

    writers = [threading.Thread(target=put, args=(n * each,)) for n in range(threads)]
    for writer in writers:
        writer.start()
    seen: list[int] = []
    deadline = time.monotonic() + 30
    while len(seen) < each * threads and time.monotonic() < deadline:
        seen += mailbox.gather(timeout=1.0)
    for writer in writers:
        writer.join()
    assert sorted(seen) == list(range(each * threads))


def test_nobody_gets_more_than_the_cap(world: World) -> None:
    world.start()
    pool = RequestPool(world.hub, cap=2)
    world.attach()
    joined = world.wait_for(WorkerJoined)
    pool.complete(joined)
    pool.submit(joined.worker, attach_pb2.Stop())
    pool.submit(joined.worker, attach_pb2.Stop())
    with pytest.raises(CapReached, match="worker-0 has 2"):
        pool.submit(joined.worker, attach_pb2.Stop())
