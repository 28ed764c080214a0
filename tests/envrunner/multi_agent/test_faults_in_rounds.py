"""Rounds of an EnvRunner in which something fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.runner_world import PATIENCE, PLAYED_BY, RunnerWorld
from support.scripted_agents import ScriptedAgents

from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.turns import Turn
from juggler.runtime.actors.attachment import Detached
from juggler.runtime.wire.v1 import training_pb2


def test_steps_that_are_not_finite_are_lost_for_their_module_alone(
    make_world: Callable[..., RunnerWorld], envs: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(row_age=0)
    world.begin()
    shown = envs.observation

    def broken(slot: int, episode: int, step: int) -> np.ndarray:
        seen = shown(slot, episode, step)
        return seen * np.nan if slot == 4 and step == 1 else seen

    monkeypatch.setattr(envs, "observation", broken)
    said: list[Any] = []
    for _ in range(20):
        world.driver.tell(*world.requests(reds=0, blues=0))
        said = [world.driver._answers.get(timeout=PATIENCE) for _ in range(2)]
        if any(isinstance(each, Exception) or each.dropped for each in said):
            said.append(world.driver._answers.get(timeout=PATIENCE))
            break
    # The batch of the others is acknowledged in another thread, while the runner leaves.
    receipts = {each.module_id: each for each in said if isinstance(each, training_pb2.Receipt)}
    (failure,) = [each for each in said if isinstance(each, Exception)]
    assert receipts["blues"].dropped == ""
    assert receipts["blues"].live_steps > 0
    assert receipts["reds"].dropped == "nonfinite"
    named = "observations of agent 'green' in environment 1 at step"
    assert named in receipts["reds"].explanation
    assert named in str(failure)


def test_a_runner_that_leaves_in_the_middle_of_a_round_answers_its_requests(
    make_world: Callable[..., RunnerWorld], envs: ScriptedAgents
) -> None:
    world = make_world()
    world.begin()
    first, _ = world.requests(reds=0, blues=0)
    world.driver.tell(first)
    deadline = time.monotonic() + PATIENCE
    while not world.runner._round.requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    world.driver.inbox.put(Detached("terminated"))
    receipt = world.driver.hear(training_pb2.Receipt)
    assert (receipt.batch_id, receipt.live_steps) == (first.batch_id, 0)
    assert receipt.dropped == "learner_lost"
    assert max(envs._now) == 0


def test_a_runner_that_leaves_while_it_waits_for_weights_answers_its_requests(
    make_world: Callable[..., RunnerWorld], envs: ScriptedAgents
) -> None:
    world = make_world()
    world.begin()
    world.driver.tell(*world.requests(reds=5, blues=5))
    time.sleep(0.2)
    world.driver.inbox.put(Detached("terminated"))
    receipts = [world.driver.hear(training_pb2.Receipt) for _ in range(2)]
    assert {(each.dropped, each.live_steps) for each in receipts} == {("learner_lost", 0)}
    assert max(envs._now) == 0


def test_an_environment_that_fails_costs_no_steps_of_any_module(
    make_world: Callable[..., RunnerWorld], envs: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    world.begin()

    def fails(actions: Any) -> Turn:
        raise EnvironmentFailed("environment 1", "step", "it broke")

    monkeypatch.setattr(envs, "step", fails)
    world.driver.tell(*world.requests(reds=0, blues=0))
    receipt = world.driver.hear(training_pb2.Receipt)
    assert (receipt.module_id, receipt.live_steps, receipt.dropped) == ("reds", 0, "")
    failure = world.driver._answers.get(timeout=PATIENCE)
    assert isinstance(failure, EnvironmentFailed)


@pytest.mark.parametrize(
    ("played_by", "text"),
    [
        ({"red": "reds", "green": "reds"}, "no module plays agent blue"),
        ({**PLAYED_BY, "grey": "reds"}, "the environment has no agent grey"),
        (dict.fromkeys(PLAYED_BY, "all"), "plays agents with different spaces .red, green: .*Box"),
    ],
)
def test_agents_and_modules_that_do_not_fit_are_told(
    make_world: Callable[..., RunnerWorld], played_by: dict[str, str], text: str
) -> None:
    world = make_world(played_by)
    with pytest.raises(AssertionError, match=text):
        world.set_up()
