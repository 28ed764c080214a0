"""What connectors learn: from receipts to one state and the next sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.workers_world import WorkersWorld

from juggler.driver.workers.command_sender import ConnectorState
from juggler.runtime.actors.hub import Worker
from juggler.runtime.connectors.mergeable_state import Moments, from_bytes, to_bytes
from juggler.runtime.wire.v1 import training_pb2


def delta(*samples: float, name: str = "filter") -> bytes:
    return to_bytes({name: Moments.of(np.array(samples)[:, None]).to_tree()})


def mean(content: bytes) -> float:
    return float(Moments.from_tree(from_bytes(content)["filter"]).mean[0])


def worker(index: int, incarnation: str = "x") -> Worker:
    return Worker(f"envrunner-{index}", incarnation, "envrunner", index, "host", 1, (), (), False)


def learned(*deltas: bytes) -> ConnectorState:
    state = ConnectorState()
    for batch_id, each in enumerate(deltas):
        state.add_delta("envrunner-0", batch_id, each)
    state.merge_waiting()
    return state


def test_everybody_is_told_once_what_all_have_learned() -> None:
    state = learned(delta(1.0), delta(5.0))
    for each in (worker(0), worker(1)):
        assert mean(state.news_for(each)) == 3
        assert state.news_for(each) == b""
    assert mean(state.news_for(worker(1))) == 3


def test_news_are_told_when_they_are_a_hundredth_of_what_is_known() -> None:
    state, told = learned(delta(*range(1000))), worker(0)
    state.news_for(told)
    state.add_delta("envrunner-0", 1, delta(*range(9)))
    state.merge_waiting()
    assert state.news_for(told) == b""
    state.add_delta("envrunner-0", 2, delta(1.0))
    state.merge_waiting()
    news = Moments.from_tree(from_bytes(state.news_for(told))["filter"])
    assert news.count == 1010


def test_deltas_are_merged_in_order_of_envrunners_and_requests_whenever_they_came() -> None:
    deltas = {i: delta(*np.random.default_rng(i).normal(1e6, 1.0, 5 + i)) for i in range(6)}
    # Which of its batches has which id depends, between EnvRunners, on which was faster.
    ids = ((10, 11, 14, 12, 13, 15), (10, 12, 13, 11, 14, 15), (12, 13, 15, 10, 11, 14))
    contents = set()
    for order, named in zip((range(6), reversed(range(6)), (3, 0, 5, 1, 4, 2)), ids, strict=True):
        state = ConnectorState()
        for i in order:
            state.add_delta(f"envrunner-{9 + i // 3}", named[i], deltas[i])
        state.merge_waiting()
        contents.add(to_bytes(state.merged))
    assert len(contents) == 1


def test_what_is_announced_is_news_for_everybody_however_little_it_is() -> None:
    state, told = learned(delta(*range(1000))), worker(0)
    state.news_for(told)
    state.add_delta("envrunner-0", 1, delta(1.0))
    state.merge_waiting()
    state.announce()
    restored = ConnectorState(state.merged)
    assert state.news_for(told) == restored.news_for(worker(0)) != b""
    nothing = ConnectorState()
    nothing.announce()
    assert nothing.news_for(told) == b""


# -- in a worker_events --------------------------------------------------------------------------


def test_a_delta_of_other_connectors_is_refused() -> None:
    state = learned(delta(1.0))
    with pytest.raises(ValueError, match="states of other connectors"):
        state.add_delta("envrunner-0", 1, delta(1.0, name="another"))
    with pytest.raises(ValueError):  # noqa: PT011 - says what is wrong with the frame
        state.add_delta("envrunner-0", 1, b"\xff\xff")
    state.merge_waiting()
    assert Moments.from_tree(state.merged["filter"]).count == 1


def states_asked_with(world: WorkersWorld) -> list[bytes]:
    return [
        request.connector_state
        for _, request in world.asked(world.runner, training_pb2.SampleRequest)
    ]


def answer_updates(world: WorkersWorld, **said: Any) -> None:
    """The learner answers the newest update."""
    command_id, update = world.asked(world.learner, training_pb2.Update)[-1]
    version = {"generation": update.generation, "update": world.parts.core.updates + 1}
    used = [{"batch_id": batch_id, "live_steps": 20} for batch_id in update.batch_ids]
    done = training_pb2.UpdateDone(
        update_id=update.update_id, version=version, batches=used, **said
    )
    world.reply(world.learner, command_id, done)


def arrived(world: WorkersWorld, batch_id: int) -> None:
    arrival = training_pb2.Arrival(batch_id=batch_id, live_steps=20)
    world.report(world.learner, training_pb2.Arrivals(arrivals=[arrival]))


def test_in_synchronous_mode_requests_pass_on_all_of_the_rounds_before(tmp_path: Path) -> None:
    asked = []
    for receipt_first in (True, False):
        world = WorkersWorld(tmp_path, synchronous=True)
        for number in (4.0, 8.0):
            command_id, request = world.asked(world.runner, training_pb2.SampleRequest)[-1]
            told = {"batch_id": request.batch_id, "learner": "learner-0", "live_steps": 20}
            receipt = training_pb2.Receipt(**told, connector_delta=delta(number))
            if receipt_first:
                world.reply(world.runner, command_id, receipt)
                answer_updates(world)
            else:
                arrived(world, request.batch_id)
                answer_updates(world)
                assert world.parts.core.updates == (number == 8.0), "no report yet"
                world.reply(world.runner, command_id, receipt)
        asked.append(states_asked_with(world))
        assert world.parts.core.updates == 2
    assert asked[0] == asked[1]
    first, *later = asked[0]
    assert first == b""
    assert [mean(content) for content in later] == [4, 6]


def test_an_answer_that_came_early_is_heard_when_its_learner_leaves(tmp_path: Path) -> None:
    world = WorkersWorld(tmp_path, synchronous=True)
    _, request = world.asked(world.runner, training_pb2.SampleRequest)[-1]
    arrived(world, request.batch_id)
    answer_updates(world)
    world.leave(world.learner)
    assert world.core.ledger.trained == 20
