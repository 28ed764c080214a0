"""An EnvRunner plays with modules that nobody trains: with what the driver meant, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paced_sampling import by_slot
from support.runner_world import RunnerWorld
from support.scripted_agents import FOUR, THREE, ScriptedAgents, in_turn

from juggler.driver.checkpoint.restoring import restores
from juggler.envrunner import stage_building
from juggler.envrunner.multi_agent import making
from juggler.runtime.checkpoints.checkpoint import CONNECTORS
from juggler.runtime.checkpoints.frozen import WEIGHTS, tree_digest
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

AGENTS = {"red": "learns", "green": "old", "blue": "random"}


def playing(scale: float) -> dict[str, Any]:
    """`Scaled` chooses the action of this number."""
    weights = {"scale": np.full((), scale, np.float32), "value.bias": np.zeros(3, np.float32)}
    return {WEIGHTS: weights, CONNECTORS: {}}


@pytest.fixture
def envs() -> ScriptedAgents:
    spaces = {"red": THREE, "green": THREE, "blue": FOUR}
    return ScriptedAgents(2, spaces, in_turn(tuple(AGENTS), 7))


@pytest.fixture
def make_world(
    envs: ScriptedAgents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RunnerWorld]]:
    monkeypatch.setattr(stage_building, "step_back", lambda *_: None)
    monkeypatch.setattr(making, "make_multi_agent_envs", lambda *_, **__: envs)
    worlds: list[RunnerWorld] = []

    def make(**keys: Any) -> RunnerWorld:
        keys = {"frozen": {"old": playing(2)}, "row_age": 0, **keys}
        worlds.append(RunnerWorld(tmp_path, AGENTS, **keys))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def actions(envs: ScriptedAgents, agent: str) -> list[int]:
    place = envs.agents.index(agent)
    return [
        action
        for slot, episodes in envs.log.items()
        for episode in episodes
        for action in episode.actions
        if slot % 3 == place
    ]


def test_only_modules_that_are_trained_have_batches(make_world: Callable[..., RunnerWorld]) -> None:
    world = make_world()
    world.send_frozen()
    assert [module.module_id for module in world.begin().modules] == ["learns"]


def test_a_module_that_is_not_trained_sends_no_steps_and_never_changes(
    make_world: Callable[..., RunnerWorld], envs: ScriptedAgents
) -> None:
    world = make_world()
    world.send_frozen()
    world.begin()
    played, recorded, ended = {"old": 0, "random": 0}, 0, {"old": 0, "random": 0}
    for update in range(1, 40):
        world.learners["learns"].publish(update)
        (receipt,) = world.play(learns=update).values()
        assert receipt.module_id == "learns"
        recorded += receipt.live_steps
        if receipt.live_steps:
            header, batch = world.learners["learns"].batch()
            assert header.module_id == "learns"
            assert {slot % 3 for slot, _ in by_slot([batch])} == {0}, "only red's steps"
        assert [each.module_id for each in receipt.played] == ["old", "random"]
        for each in receipt.played:
            played[each.module_id] += each.steps
            ended[each.module_id] += len(each.episode_returns)
    assert set(actions(envs, "green")) == {2}, "it acts as it was"
    assert set(actions(envs, "blue")) == {0, 1, 2}
    for module_id, agent in (("old", "green"), ("random", "blue")):
        made = len(actions(envs, agent))
        assert made - envs.num_envs <= played[module_id] <= made
        place = envs.agents.index(agent)
        over = sum(bool(e.end) for slot in (place, place + 3) for e in envs.log[slot])
        assert ended[module_id] == over > 0
    assert recorded <= len(actions(envs, "red"))


def test_weights_that_are_not_those_that_were_meant_are_refused(
    make_world: Callable[..., RunnerWorld], envs: ScriptedAgents
) -> None:
    world = make_world()
    world.send_frozen(old=playing(1))
    with pytest.raises(AssertionError) as refused:
        world.set_up()
    said = str(refused.value)
    assert "the weights of module 'old' are not those that this run plays with" in said
    assert tree_digest(playing(1)) in said
    assert tree_digest(playing(2)) in said
    assert not actions(envs, "red"), "nobody played"


def test_without_weights_nobody_plays(make_world: Callable[..., RunnerWorld]) -> None:
    with pytest.raises(AssertionError, match="their digest is none, and must be"):
        make_world().set_up()


def test_a_part_that_was_damaged_on_its_way_is_refused(
    make_world: Callable[..., RunnerWorld],
) -> None:
    world = make_world()
    (part,) = restores("old", playing(2), {})
    scale = np.full((), 2, np.float32).tobytes()
    assert scale in part.chunk
    part.chunk = part.chunk.replace(scale, np.full((), 3, np.float32).tobytes())
    world.driver.tell(part)
    assert "does not match its digest" in str(world.driver.hear(WireError))  # type: ignore[type-var]


def test_weights_of_another_module_are_told_by_name(
    make_world: Callable[..., RunnerWorld],
) -> None:
    other = {WEIGHTS: {"encoder": np.zeros(3, np.float32)}, CONNECTORS: {}}
    world = make_world(frozen={"old": other})
    world.send_frozen()
    with pytest.raises(AssertionError, match="another module's: it has no scale"):
        world.set_up()


def test_large_weights_come_in_parts(make_world: Callable[..., RunnerWorld]) -> None:
    large = playing(2)
    large[WEIGHTS]["value.weight"] = np.arange(3 << 20, dtype=np.float32)
    parts = list(restores("old", large, {}))
    assert len(parts) == 4
    world = make_world(frozen={"old": large})
    for part in parts:
        assert part.ByteSize() < 5 << 20
        world.driver.ask(part, attach_pb2.Done)
    assert isinstance(world.set_up(), training_pb2.Ready)


def test_the_digest_is_of_names_shapes_dtypes_and_numbers() -> None:
    one = np.arange(6, dtype=np.float32)
    same = {"b": {"x": one}, "a": {}}
    assert tree_digest(same) == tree_digest({"a": {}, "b": {"x": one.copy()}})
    others: list[Any] = [
        {"b": {"x": one}},
        {"b": {"y": one}, "a": {}},
        {"b": {"x": one.reshape(2, 3)}, "a": {}},
        {"b": {"x": one.astype(np.float64)}, "a": {}},
        {"b": {"x": one.view(np.int32)}, "a": {}},
        {"b": {"x": one + 1e-6}, "a": {}},
    ]
    digests = {tree_digest(each) for each in (same, *others)}
    assert len(digests) == 7
