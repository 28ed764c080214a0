"""Observations outside a Discrete, MultiDiscrete or MultiBinary space are found where they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from support.paced_sampling import Collected, Scaled, sampler_of
from support.scripted_agents import FOUR, ScriptedAgents, at_random
from support.vectors import MODES

from juggler.envrunner.environments.environments_in_turn import EnvironmentsInTurn
from juggler.envrunner.evaluation import evaluate
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.modules.models import ActorCritic

FLATTEN = {"env_to_module": ["flatten"]}
STEPS, ACTIONS = 4, spaces.Discrete(2)
WRONG = {
    "Discrete": (spaces.Discrete(3), -1, "holds -1"),
    "MultiDiscrete": (spaces.MultiDiscrete([3, 3]), [0, -1], "holds -1"),
    "MultiBinary": (spaces.MultiBinary(2), [0, 2], "holds 2"),
}


class Late(gymnasium.Env[Any, Any]):
    """Shows a value outside its space after some steps of its first episode, of six steps."""

    action_space = ACTIONS

    def __init__(self, space: spaces.Space[Any], wrong: Any = None, at: int = -1) -> None:
        self.observation_space = space
        self.wrong, self.at = np.asarray(wrong), at
        self.episode = -1

    def reset(self, **options: Any) -> Any:
        super().reset(seed=options.get("seed"))
        self.step_of_episode, self.episode = 0, self.episode + 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.step_of_episode += 1
        wrong = self.episode == 0 and self.step_of_episode == self.at
        shown = self.wrong if wrong else self.observation_space.sample()
        return shown, 1.0, False, self.step_of_episode == 6, {}


def parts(kind: str, at: int, connectors: dict[str, Any], mode: AutoresetMode) -> tuple[Any, Actor]:
    space, wrong, _ = WRONG[kind]
    functions = [lambda: Late(space), lambda: Late(space, wrong, at)]
    env = EnvironmentsInTurn(functions, mode, "Late")
    to_module, to_env = build_runner_pipelines(ConnectorsConfig.parse(connectors), space, ACTIONS)
    module = ActorCritic(to_module.module_observation_space, ACTIONS, {})
    return env, Actor(module, 2, STEPS, 0, to_env, to_module)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("connectors", [{}, FLATTEN], ids=["plain", "flatten"])
@pytest.mark.parametrize("at", [1, 4, 5, 6])
@pytest.mark.parametrize("kind", WRONG)
def test_a_late_value_is_an_error_of_the_environment_with_its_step(
    kind: str, at: int, connectors: dict[str, Any], mode: AutoresetMode
) -> None:
    env, policy = parts(kind, at, connectors, mode)
    sampler = Sampler(env, policy, STEPS, 0)
    if at > STEPS:
        sampler.sample((0, 0))
    with pytest.raises(EnvironmentFailed, match=r"environment 1 failed in step") as caught:
        sampler.sample((0, 0))
    step = at if at <= STEPS else at - STEPS
    assert f"before step {step} of a fragment" in str(caught.value)
    assert WRONG[kind][2] in str(caught.value)
    assert caught.value.lasting
    with pytest.raises(RuntimeError, match="call reset first"):
        sampler.sample((0, 0))


@pytest.mark.parametrize("fails", ["environment", "module"])
def test_what_fails_in_a_fragment_is_not_blamed_on_steps_that_it_does_not_have(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(Late):
        def step(self, action: Any) -> Any:
            if fails == "environment" and self.step_of_episode == 2:
                raise ValueError("its own mistake")
            return super().step(action)

    space = spaces.Discrete(3, start=5)  # 0, with which columns begin, is not in it
    env = EnvironmentsInTurn([lambda: Breaks(space)], AutoresetMode.SAME_STEP, "Breaks")
    to_module, to_env = build_runner_pipelines(ConnectorsConfig.parse({}), space, ACTIONS)
    module = ActorCritic(to_module.module_observation_space, ACTIONS, {})
    policy = Actor(module, 1, STEPS, 0, to_env, to_module)
    if fails == "module":
        act, steps = policy.act, iter(range(STEPS))

        def fail(*given: Any, **kept: Any) -> Any:
            if next(steps) == 2:
                raise ValueError("its own mistake")
            return act(*given, **kept)

        monkeypatch.setattr(policy, "act", fail)
    with pytest.raises((EnvironmentFailed, ValueError), match="its own mistake"):
        Sampler(env, policy, STEPS, 0).sample((0, 0))


@pytest.mark.parametrize("connectors", [{}, FLATTEN], ids=["plain", "flatten"])
@pytest.mark.parametrize("kind", WRONG)
def test_evaluations_find_it_too(kind: str, connectors: dict[str, Any]) -> None:
    env, policy = parts(kind, 2, connectors, AutoresetMode.SAME_STEP)
    with pytest.raises(EnvironmentFailed, match=r"environment 1 .* before step 2 of an evaluation"):
        evaluate(env, policy, 2, 0)


class Choosing(ScriptedAgents):
    """Agents that see choices; those of green in environment 1 may be outside their space."""

    wrong = False

    def __init__(self) -> None:
        super().__init__(2, dict.fromkeys(("red", "green"), FOUR), at_random(("red", "green"), 4))
        (group,) = self.groups
        self.groups = (replace(group, observation_space=spaces.MultiDiscrete([3, 3])),)

    def _turn(self, *args: Any) -> Any:
        turn = super()._turn(*args)
        (group,) = turn.groups
        seen = np.zeros((len(group.acting), 2), np.int64)
        seen[(group.acting == 3) & self.wrong] = 3
        lasts = np.zeros((len(group.ended), 2), np.int64)
        return replace(turn, groups=(replace(group, observations=seen, last_observations=lasts),))


@pytest.mark.parametrize(
    "connectors", [{}, {"env_to_module": ["one_hot"]}], ids=["plain", "one_hot"]
)
def test_of_several_agents_the_one_that_sees_it_is_named(connectors: dict[str, Any]) -> None:
    envs = Choosing()
    played_by = dict.fromkeys(("red", "green"), "all")
    sampler = sampler_of(envs, played_by, STEPS, module=Scaled, connectors=connectors)
    collected = Collected(sampler)
    collected.play("all")
    envs.wrong = True
    with pytest.raises(EnvironmentFailed, match=r"'green' of environment 1 .* holds 3, which"):
        collected.play("all")
