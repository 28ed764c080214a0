from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.hub_world import World

from juggler.runtime.actors import hello as hello_module
from juggler.runtime.actors.attachment import (
    LOST_THE_DRIVER,
    AttachError,
    Command,
    Detached,
)
from juggler.runtime.actors.endpoints import EndpointError, dial
from juggler.runtime.actors.hub import ATTACH_METHOD
from juggler.runtime.actors.hub_events import Joined, Left, Replied, Reported
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.wire.v1 import attach_pb2


def _commands(inbox: Mailbox[Any], count: int) -> list[Command]:
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
    joined = world.wait_for(Joined).worker
    assert (joined.worker_id, joined.incarnation) == ("worker-0", first.incarnation)


def test_a_worker_that_lost_its_driver_first_gets_its_index_back(world: World) -> None:
    world.start()
    first, _ = world.attach(), world.attach()
    other = world.attach("other", predecessor=first.incarnation)
    assert other.worker_id == "other-0", "another role's: nobody is replaced"
    assert world.attach(predecessor="nobody's").worker_id == "worker-2"
    joined = {world.wait_for(Joined).worker.incarnation for _ in range(4)}
    again = world.attach(predecessor=first.incarnation)
    assert again.worker_id == "worker-0"
    left, back = world.wait_for(Left), world.wait_for(Joined)
    assert left.worker.incarnation == first.incarnation
    assert "replaced" in left.reason
    assert back.worker.incarnation == again.incarnation not in joined
    assert len(world.hub.vitals()) == 4


def test_commands_arrive_in_order_and_each_gets_its_reply(world: World) -> None:
    world.start()
    inbox: Mailbox[Any] = Mailbox()
    attachment = world.attach(inbox=inbox)
    worker = world.wait_for(Joined).worker
    for command_id in range(1, 101):
        assert world.hub.send(worker, command_id, attach_pb2.Stop())
    commands = _commands(inbox, 100)
    assert [command.command_id for command in commands] == list(range(1, 101))
    for command in commands:
        attachment.reply(command.command_id, attach_pb2.Done())
    replies = [world.wait_for(Replied).reply for _ in range(100)]
    assert [reply.id for reply in replies] == list(range(1, 101))
    assert all(reply.last and reply.body.Is(attach_pb2.Done.DESCRIPTOR) for reply in replies)


def test_a_reply_larger_than_one_message_may_be_does_not_break_the_stream(world: World) -> None:
    world.start()
    attachment = world.attach()
    chunk = attach_pb2.Refusal(reason="x" * (2 << 20))
    for index in range(8):
        attachment.reply(1, chunk, last=index == 7)
    replies = [world.wait_for(Replied).reply for _ in range(8)]
    assert [reply.last for reply in replies] == [False] * 7 + [True]


def test_a_failed_command_carries_the_workers_own_traceback(world: World) -> None:
    world.start()
    attachment = world.attach()
    try:
        raise KeyError("a very particular key")
    except KeyError as error:
        attachment.fail(5, error)
    failure = world.wait_for(Replied).reply.failure
    assert "a very particular key" in failure.message
    assert "test_attach.py" in failure.traceback


def test_reports_arrive_unasked(world: World) -> None:
    world.start()
    world.attach().report(attach_pb2.Refusal(reason="just so"))
    body = attach_pb2.Refusal()
    assert world.wait_for(Reported).body.Unpack(body)
    assert body.reason == "just so"


def test_a_farewell_says_why_the_worker_left(world: World) -> None:
    world.start()
    world.attach().farewell("had enough", ValueError("of this"))
    left = world.wait_for(Left)
    assert left.reason == "had enough"
    assert "of this" in left.failure.message


def test_workers_of_a_role_may_be_lost_sooner_from_some_moment_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("juggler.runtime.actors.attachment.Attachment._beat", lambda self: None)
    world.start(heartbeat_seconds=0.05, silence_seconds=1000)
    world.attach()
    world.hub.lose_after("worker", 0.3)
    assert "no heartbeat" in world.wait_for(Left).reason


def test_a_main_loop_that_hangs_is_found_although_the_heart_beats(world: World) -> None:
    world.start(heartbeat_seconds=0.05, hang_seconds=0.2)
    attachment = world.attach()
    attachment.held_up_by = lambda frame: "somebody's step"
    with attachment.busy():
        left = world.wait_for(Left)
    assert left.reason.startswith("hung in somebody's step: no progress for ")
    assert "left = world.wait_for(Left)" in left.stack


def test_another_thread_that_hangs_is_found_although_the_main_loop_goes_on(world: World) -> None:
    world.start(heartbeat_seconds=0.05, hang_seconds=0.2)
    attachment = world.attach()
    begun, over = threading.Event(), threading.Event()

    def hang() -> None:
        with attachment.busy():
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=hang)
    thread.start()
    assert begun.wait(30)
    for _ in range(20):
        with attachment.busy():
            time.sleep(0.01)
    left = world.wait_for(Left)
    over.set()
    thread.join()
    assert left.reason.startswith("hung: no progress for")
    assert "over.wait(60)" in left.stack


def test_long_work_that_says_that_it_goes_on_does_not_count_as_hung(world: World) -> None:
    world.start(heartbeat_seconds=0.05, hang_seconds=2.0)
    attachment = world.attach()
    with attachment.busy():
        over = time.monotonic() + 5.0
        while time.monotonic() < over:
            attachment.progresses()
            time.sleep(0.01)
        with pytest.raises(AssertionError):
            world.wait_for(Left, seconds=0.1)
        assert world.wait_for(Left).reason.startswith("hung: no progress for ")


def test_the_end_of_the_hub_reaches_its_workers(world: World) -> None:
    world.start()
    inbox: Mailbox[Any] = Mailbox()
    world.attach(inbox=inbox)
    world.wait_for(Joined)
    world.hub.close()
    (last,) = _commands(inbox, 1)
    assert isinstance(last, Detached)
    assert last.reason.startswith((LOST_THE_DRIVER, "the driver ended"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"role": "intruder"}, "unknown role 'intruder'"),
        ({"token": "wrong"}, "token is missing or wrong"),
        ({"token": ""}, "token is missing or wrong"),
        ({"run_id": "another"}, "this is run run, not another"),
        ({"incarnation": ""}, "incarnation"),
    ],
)
def test_who_does_not_belong_here_is_refused_with_a_reason(
    world: World, options: dict[str, Any], reason: str
) -> None:
    world.start(token="secret")
    with pytest.raises(AttachError, match=reason):
        world.attach(**{"token": "secret", **options})
    assert world.attach(token="secret").worker_id == "worker-0"


def test_another_protocol_version_is_refused_and_told_what_to_do(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    monkeypatch.setattr(hello_module, "PROTOCOL_VERSION", 99)
    with pytest.raises(AttachError, match=r"version 99.*install the same version"):
        world.attach()


def test_one_worker_too_many_is_refused(world: World) -> None:
    world.start(max_workers=2)
    world.attach()
    world.attach()
    with pytest.raises(AttachError, match="at most 2 workers"):
        world.attach()


def test_a_stream_that_begins_with_anything_but_a_hello_is_refused(world: World) -> None:
    world.start()
    channel = dial(world.address)
    first = attach_pb2.FromWorker(heartbeat=attach_pb2.Heartbeat())
    call = channel.stream_stream(
        ATTACH_METHOD,
        request_serializer=attach_pb2.FromWorker.SerializeToString,
        response_deserializer=attach_pb2.ToWorker.FromString,
    )(iter([first]))
    assert "hello" in next(call).refusal.reason
    channel.close()


def test_garbage_on_one_stream_leaves_the_others_alone(world: World) -> None:
    world.start()
    inbox: Mailbox[Any] = Mailbox()
    world.attach(inbox=inbox)
    worker = world.wait_for(Joined).worker
    channel = dial(world.address)
    call = channel.stream_stream(
        ATTACH_METHOD, request_serializer=None, response_deserializer=None
    )(iter([b"\xff" * 1000]))
    assert b"not a message of an attach stream" in next(call)
    channel.close()
    world.hub.send(worker, 1, attach_pb2.Stop())
    assert _commands(inbox, 1)[0].command_id == 1


def test_a_driver_that_nobody_runs_is_named(world: World) -> None:
    with pytest.raises(EndpointError, match=r"no driver answers at unix:.*hub\.sock"):
        world.attach(timeout=0.3)


def test_attaching_and_leaving_leaves_no_threads_behind(world: World) -> None:
    world.start()
    world.attach().farewell("bye")
    world.wait_for(Left)
    world.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        left = [t.name for t in threading.enumerate() if t.name.startswith(("attach", "hub"))]
        if not left:
            break
        time.sleep(0.05)
    assert left == []
