from __future__ import annotations

import pytest
from support.hub_world import World

from juggler.runtime.actors.hub_events import Joined, Replied
from juggler.runtime.actors.requests import CapReached, RequestPool
from juggler.runtime.wire.v1 import attach_pb2


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
