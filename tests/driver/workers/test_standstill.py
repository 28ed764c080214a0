"""Standstill: what people are told where nothing comes, from anybody or from one EnvRunner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.worker_events_world import SHAPE, WorkersWorld

from juggler.driver.config import RunConfig
from juggler.driver.upkeep import Upkeep
from juggler.driver.workers.standstill import Standstill
from juggler.runtime.actors import requests
from juggler.runtime.actors.vitals import Vitals
from juggler.runtime.wire.v1 import training_pb2

SECONDS = 7.0


def _standstill_of(
    world: WorkersWorld, cpu_seconds: Callable[[], float], **keys: Any
) -> Standstill:
    """Of a run of that configuration, whose local workers have used so many seconds."""
    world.parts.config = RunConfig.from_flat({**SHAPE, **keys})
    world.parts.local = cast(Any, SimpleNamespace(cpu_seconds=cpu_seconds, of_use=lambda _: None))
    return Standstill(world.parts)


class World(WorkersWorld):
    """With a clock that the test winds on."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(requests, "time", clock)
        super().__init__(directory)
        self.standstill = _standstill_of(self, lambda: 0.0, worker_timeout_seconds=SECONDS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_an_envrunner_that_brings_nothing_is_named_once(world: World) -> None:
    assert world.standstill.silent_runners() == []
    world.now += SECONDS - 1
    assert world.standstill.silent_runners() == []
    world.now += 1
    (text,) = world.standstill.silent_runners()
    assert text.startswith(
        "envrunner-0 on host has been asked for 2 batches and has brought none for 7 s. Others are"
    )
    world.now += SECONDS
    assert world.standstill.silent_runners() == [], "it was said"


def test_it_is_named_with_a_line_of_metrics_also_where_nothing_is_trained_on(world: World) -> None:
    upkeep = Upkeep(world.parts, cast(Any, None), [], lambda: None)
    upkeep.standstill = world.standstill
    upkeep.write_line = lambda: {}  # type: ignore[method-assign]
    upkeep._intervals = cast(Any, SimpleNamespace(due=lambda: ["line"]))
    world.parts.local = cast(Any, SimpleNamespace(directory_is_gone=lambda: ""))
    upkeep.on_intervals()
    assert not [text for text in world.told.messages if "brought none" in text]
    world.now += SECONDS
    upkeep.on_intervals()
    upkeep.on_intervals()
    (text,) = [text for text in world.told.messages if "brought none for 7 s" in text]
    assert "Are its environments slow, or stuck?" in text


def test_it_is_said_after_which_time_such_an_envrunner_is_replaced(world: World) -> None:
    keys = {"worker_timeout_seconds": SECONDS, "hang_seconds": 90.0}
    world.parts.only_local = True
    standstill = _standstill_of(world, lambda: 0.0, **keys)
    world.now += SECONDS
    (text,) = standstill.silent_runners()
    assert text.endswith("makes no progress for 90 s (hang_seconds) is killed and replaced")
    world.parts.only_local = False
    (text,) = _standstill_of(world, lambda: 0.0, **keys).silent_runners()
    assert text.endswith("90 s (hang_seconds) ends itself")


def test_one_that_brought_something_is_named_anew_when_it_brings_nothing_again(
    world: World,
) -> None:
    world.now += SECONDS
    assert len(world.standstill.silent_runners()) == 1
    for number in range(2):  # all that was asked
        world.sample(number)
    assert world.standstill.silent_runners() == []
    world.now += SECONDS
    assert len(world.standstill.silent_runners()) == 1


def test_where_nothing_is_learned_those_who_bring_nothing_are_named_too(world: World) -> None:
    assert "brought none" not in world.standstill.what_is_there()
    world.now += SECONDS
    text = world.standstill.look()
    assert text.startswith("no update in the last 7 s. envrunners: 1 attached, 1 ready; ")
    assert "envrunner-0 on host has been asked for 2 batches and has brought none for 7 s" in text


def test_a_group_that_takes_long_to_form_is_told_once(world: World) -> None:
    assert world.standstill.slow_groups() == ""
    world.now += 5.0
    text = world.standstill.slow_groups()
    assert text.startswith("a group of learners has not formed 5 s after it was to: learner-0. L")
    world.now += 5.0
    assert world.standstill.slow_groups() == "", "it was said"
    ((command_id, group),) = world.asked(world.learner, training_pb2.Group)
    formed = training_pb2.GroupFormed(generation=group.generation, module_id=group.module_id)
    world.reply(world.learner, command_id, formed)
    world.now += 5.0
    assert world.standstill.slow_groups() == ""


def test_environments_hang_where_each_takes_much_longer_than_ever_before(world: World) -> None:
    runner = "envrunner-0"
    stuck = {runner: Vitals(0.1, 0, 0, 0.0, held_up_by="step of environment 1 (Robot)")}
    world.now += 2
    world.sample(0)  # the longest so far
    world.now += 3.5
    assert world.standstill.hung_runners(stuck) == "", "environments may be slow"
    world.now += 1
    text = "envrunner-0 for 6 s, in step of environment 1 (Robot)"
    assert world.standstill.hung_runners(stuck) == text
    waits = {runner: Vitals(0.1, 0, 0, 0.0)}
    assert world.standstill.hung_runners(waits) == "", "it waits for weights, say"


def _standstill(directory: Path, used: list[float]) -> Standstill:
    """With local workers that have used so many seconds of processors at each look."""
    world = WorkersWorld(directory)
    return _standstill_of(world, lambda: used.pop(0), worker_timeout_seconds=60.0)


def test_workers_that_are_at_work_on_their_start_are_waited_for(tmp_path: Path) -> None:
    standstill = _standstill(tmp_path, [3.0, 6.0])
    for _ in range(2):
        assert standstill.look().startswith("no update in the last 60 s")
        assert standstill.starting


def test_workers_that_do_nothing_are_not(tmp_path: Path) -> None:
    standstill = _standstill(tmp_path, [3.0, 3.1])
    standstill.look()
    standstill.look()
    assert not standstill.starting


def test_nobody_is_waited_for_for_ever(tmp_path: Path) -> None:
    standstill = _standstill(tmp_path, [10.0 * n for n in range(1, 11)])
    waited = []
    for _ in range(10):
        standstill.look()
        waited.append(standstill.starting)
    assert waited == [True] * 9 + [False]
