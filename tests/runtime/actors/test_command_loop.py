from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.hub_world import World

from juggler.runtime.actors.attachment import Detached, describe
from juggler.runtime.actors.hub import Mailbox, WorkerJoined, WorkerLeft, WorkerReplied
from juggler.runtime.actors.requests import CapReached, RequestPool
from juggler.runtime.actors.worker import CommandLoop, FailedOnRequest
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


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


def test_a_command_may_have_several_replies_and_is_in_flight_until_the_last(world: World) -> None:
    world.start()
    pool = RequestPool(world.hub)
    attachment = world.attach()
    joined = world.wait_for(WorkerJoined)
    pool.complete(joined)
    command_id = pool.submit(joined.worker, attach_pb2.Stop())
    attachment.reply(command_id, attach_pb2.Done(), last=False)
    assert [c.last for c in pool.complete(world.wait_for(WorkerReplied))] == [False]
    assert pool.in_flight(joined.worker) == 1
    attachment.reply(command_id, attach_pb2.Done())
    assert [c.last for c in pool.complete(world.wait_for(WorkerReplied))] == [True]
    assert pool.in_flight(joined.worker) == 0


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
