from __future__ import annotations

import pytest
from support.hub_world import World

from juggler.runtime.actors.hub_events import Joined, Left, Replied
from juggler.runtime.actors.requests import CapReached, RequestPool
from juggler.runtime.wire.v1 import attach_pb2


def test_each_command_completes_once_with_what_was_asked(world: World) -> None:
    world.start()
    pool = RequestPool(world.hub)
    attachment = world.attach()
    joined = world.wait_for(Joined)
    assert pool.complete(joined) == []
    command_id = pool.submit(joined.worker, attach_pb2.Stop())
    assert pool.in_flight(joined.worker) == 1
    attachment.reply(command_id, attach_pb2.Done())
    attachment.reply(command_id, attach_pb2.Done())  # a duplicate
    first, second = world.wait_for(Replied), world.wait_for(Replied)
    assert pool.asked(first) == attach_pb2.Stop()
    assert pool.has_in_flight(attach_pb2.Stop)
    assert not pool.has_in_flight(attach_pb2.Done)
    (completed,) = pool.complete(first)
    assert completed.request == attach_pb2.Stop()
    assert completed.last
    assert pool.asked(second) is None
    assert pool.complete(second) == []
    assert pool.in_flight(joined.worker) == 0
    assert not pool.has_in_flight(attach_pb2.Stop)


def test_a_command_may_have_several_replies_and_is_in_flight_until_the_last(world: World) -> None:
    world.start()
    pool = RequestPool(world.hub)
    attachment = world.attach()
    joined = world.wait_for(Joined)
    pool.complete(joined)
    command_id = pool.submit(joined.worker, attach_pb2.Stop())
    attachment.reply(command_id, attach_pb2.Done(), last=False)
    assert [c.last for c in pool.complete(world.wait_for(Replied))] == [False]
    assert pool.in_flight(joined.worker) == 1
    attachment.reply(command_id, attach_pb2.Done())
    assert [c.last for c in pool.complete(world.wait_for(Replied))] == [True]
    assert pool.in_flight(joined.worker) == 0


def test_nobody_gets_more_than_the_cap(world: World) -> None:
    world.start()
    pool = RequestPool(world.hub, cap=2)
    world.attach()
    joined = world.wait_for(Joined)
    pool.complete(joined)
    pool.submit(joined.worker, attach_pb2.Stop())
    pool.submit(joined.worker, attach_pb2.Stop())
    with pytest.raises(CapReached, match="worker-0 has 2"):
        pool.submit(joined.worker, attach_pb2.Stop())


def test_a_worker_that_leaves_completes_all_its_commands_with_a_failure(world: World) -> None:
    world.start()
    pool = RequestPool(world.hub)
    attachment = world.attach()
    joined = world.wait_for(Joined)
    pool.complete(joined)
    ids = [pool.submit(joined.worker, attach_pb2.Stop()) for _ in range(3)]
    attachment.close()
    completed = pool.complete(world.wait_for(Left))
    assert [c.command_id for c in completed] == ids
    assert all(c.failure is not None and "worker-0 left" in c.failure.message for c in completed)
    with pytest.raises(KeyError, match="worker-0 is not attached"):
        pool.submit(joined.worker, attach_pb2.Stop())
