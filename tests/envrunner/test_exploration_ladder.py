"""Environments that explore less than others, as in Ape-X."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support.scripted_agents import FOUR, Collected, Scaled, ScriptedAgents, at_random, sampler_of
from support.vectors import MODES, vector_of_functions
from torch import Tensor

from juggler.driver.config import RunConfig
from juggler.driver.workers.module_setups import acting_setup, exploration_exponents
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.environments_in_turn import EnvironmentsInTurn
from juggler.envrunner.evaluation import evaluate
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.sampler import Sampler
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.envrunner.stage import SingleAgentStage, UserCode
from juggler.learner.algorithms.td3 import Td3Config
from juggler.learner.algorithms.td3.core import Td3
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.acting_part import weights_of
from juggler.runtime.modules.models import ActorCritic, DeterministicActorCritic
from juggler.runtime.wire.structures import tree_map

RUNNERS, ENVIRONMENTS, ACTIONS = 2, 4, 5
EPSILON, ALPHA = 0.4, 7.0
PLACES = [i / (RUNNERS * ENVIRONMENTS - 1) for i in range(RUNNERS * ENVIRONMENTS)]


class Still(gymnasium.Env[Any, Any]):
    """Shows the same for ever."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(ACTIONS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.ones(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.ones(3, np.float32), 0.0, False, False, {}


class Reaching(Still):
    """Takes two numbers."""

    action_space = spaces.Box(-1, 3, (2,), np.float32)


def config_of(algorithm: str, **keys: Any) -> RunConfig:
    return RunConfig.from_flat(
        {
            "algorithm": algorithm,
            "num_env_runners": RUNNERS,
            "envs_per_runner": ENVIRONMENTS,
            "exploration_ladder": ALPHA,
            "model": {"hidden_sizes": [8], "recurrent": "lstm" if algorithm == "r2d2" else "none"},
            **keys,
        }
    )


def stage_of(
    config: RunConfig, runner: int, steps: int, kind: type[Still] = Still
) -> SingleAgentStage:
    """The environments of one EnvRunner, with weights as its learner sends them."""
    exponents = exploration_exponents(config, runner, ENVIRONMENTS)
    acting = replace(acting_setup(config), exploration_exponents=exponents)
    module = replace(acting.module, module=config.module.module)
    runner_config = EnvRunnerConfig(envs_per_runner=ENVIRONMENTS, fragment_steps=steps)
    setup = EnvRunnerSetup(
        env_runner=runner_config, modules={"default": replace(acting, module=module)}
    )
    env = SyncVectorEnv([kind] * ENVIRONMENTS, autoreset_mode=AutoresetMode.SAME_STEP)
    return SingleAgentStage(setup, env, runner, UserCode())


@pytest.mark.parametrize("algorithm", ["dqn", "r2d2"])
def test_each_environment_explores_as_much_as_the_paper_says(algorithm: str) -> None:
    config, steps = config_of(algorithm), 400
    seen: list[float] = []
    for runner in range(RUNNERS):
        stage = stage_of(config, runner, steps)
        module = stage._parts["default"].module
        sent = {name: x.numpy().copy() for name, x in weights_of(module).items()}
        sent["epsilon"] = np.array(EPSILON, np.float32)  # [], of the learner
        stage.load("default", sent)
        batch = stage.play({"default"}, {"default": Version(1, 1)}).modules["default"].batch
        # The best action is always the same; its log-probability says what is left for ε.
        for row in range(ENVIRONMENTS):
            likeliest = float(np.exp(batch.action_logp[row]).max())
            seen.append((1 - likeliest) / (1 - 1 / ACTIONS))
    count = RUNNERS * ENVIRONMENTS
    expected = [EPSILON ** (1 + i / (count - 1) * ALPHA) for i in range(count)]
    np.testing.assert_allclose(seen, expected, atol=1e-5)
    assert seen[0] == pytest.approx(0.4)
    assert expected[-1] == pytest.approx(0.4**8)


def test_noise_around_actions_is_less_in_some_environments() -> None:
    config, steps = config_of("td3"), 2000
    for runner in range(RUNNERS):
        stage = stage_of(config, runner, steps, Reaching)
        module = stage._parts["default"].module
        sent = {name: x.numpy().copy() for name, x in weights_of(module).items()}
        sent["exploration_noise"] = np.array(EPSILON, np.float32)  # [], of the learner
        stage.load("default", sent)
        batch = stage.play({"default"}, {"default": Version(1, 1)}).modules["default"].batch
        places = PLACES[runner * ENVIRONMENTS :][:ENVIRONMENTS]
        noise = torch.tensor([EPSILON ** (1 + ALPHA * place) for place in places])  # [N]
        seen = {"observations": torch.from_numpy(batch.observations[:, 0])}
        with torch.no_grad():
            inputs = module.forward_inference(seen)["action_dist_inputs"]  # [N, 4]
            inputs[:, 2:] = noise.log()[:, None]
            policy = module.action_distribution()(inputs[:, None].expand(-1, steps, -1))
            logp = policy.log_prob(torch.from_numpy(batch.actions))  # [N, T]
        np.testing.assert_allclose(batch.action_logp, logp, rtol=1e-3, atol=1e-3)
        spread = batch.actions.std(1).mean(-1) / 2  # [N] in halves of the distance between bounds
        # What is beyond the bounds is clipped, which takes a little off the largest.
        np.testing.assert_allclose(spread, noise, rtol=0.06)


@pytest.mark.parametrize("ladder", [ALPHA, 0.0], ids=["with a ladder", "without one"])
def test_until_learning_begins_actions_are_uniform_in_every_environment(ladder: float) -> None:
    config, steps = config_of("td3", exploration_ladder=ladder), 3000
    stage = stage_of(config, 1, steps, Reaching)
    space, acts = Reaching.observation_space, Reaching.action_space
    make = partial(DeterministicActorCritic, space, acts, {"hidden_sizes": [8]})
    core = Td3(make, Td3Config())
    stage.load("default", tree_map(Tensor.numpy, core.get_params(core.init(0))))
    batch = stage.play({"default"}, {"default": Version(0, 0)}).modules["default"].batch
    np.testing.assert_allclose(batch.action_logp, -2 * np.log(4), rtol=1e-6)
    for row in range(ENVIRONMENTS):
        counts, _ = np.histogram(batch.actions[row], 8, (-1, 3))
        np.testing.assert_allclose(counts / counts.sum(), 1 / 8, rtol=0.12)
    beside = np.corrcoef(batch.actions.reshape(ENVIRONMENTS, -1))  # [N, N]
    assert np.abs(beside - np.eye(ENVIRONMENTS)).max() < 0.06
    one, other = batch.actions[..., 0], batch.actions[..., 1]  # [N, T] each
    for before, after in ((one[:, :-1], one[:, 1:]), (one, other)):
        assert abs(np.corrcoef(before.ravel(), after.ravel())[0, 1]) < 0.03


def test_where_no_number_says_how_much_a_policy_explores_there_is_no_ladder() -> None:
    for own in ({}, {"temperature": 0.1}):
        words = "is a key of dqn, r2d2 and td3, but algorithm = 'sac': its policy is as random"
        with pytest.raises(ValueError, match=words):
            config_of("sac", **own)
    with pytest.raises(ValueError, match="is a key of dqn, r2d2 and td3"):
        config_of("iql")
    with pytest.raises(ValueError, match=r"exploration_noise = 1.5 with"):
        config_of("td3", exploration_noise=1.5)
    assert config_of("td3", exploration_noise=1.5, exploration_ladder=0.0)


def test_all_environments_of_an_env_runner_are_alike_where_rows_are_not_theirs() -> None:
    several = config_of("dqn", agents={"a": "default", "b": "default"})
    assert [exploration_exponents(several, runner, 4) for runner in (0, 1)] == [(1.0,), (8.0,)]
    gateway = config_of("dqn", gateway="localhost:0")
    assert exploration_exponents(gateway, 1, 4) == (8.0,)
    # One that was added later explores least.
    assert exploration_exponents(gateway, 5, 4) == (8.0,)


# Observations outside a Discrete, MultiDiscrete or MultiBinary space are found where they are.


FLATTEN = {"env_to_module": ["flatten"]}
STEPS, OBSERVED_CHOICES_ACTIONS = 4, spaces.Discrete(2)
WRONG = {
    "Discrete": (spaces.Discrete(3), -1, "holds -1"),
    "MultiDiscrete": (spaces.MultiDiscrete([3, 3]), [0, -1], "holds -1"),
    "MultiBinary": (spaces.MultiBinary(2), [0, 2], "holds 2"),
}


class Late(gymnasium.Env[Any, Any]):
    """Shows a value out of bounds in its first episode."""

    action_space = OBSERVED_CHOICES_ACTIONS

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
    env = vector_of_functions("in turn", mode, functions)
    to_module, to_env = build_runner_pipelines(
        ConnectorsConfig.parse(connectors), space, OBSERVED_CHOICES_ACTIONS
    )
    module = ActorCritic(to_module.module_observation_space, OBSERVED_CHOICES_ACTIONS, {})
    return env, Actor(module, 2, STEPS, 0, to_env, to_module)


@pytest.mark.parametrize(
    ("kind", "at", "connectors", "mode"),
    [
        ([*WRONG][(i + j) % 3], at, [{}, FLATTEN][(i + j) % 2], mode)  # each pair comes
        for i, at in enumerate([1, 4, 5, 6])
        for j, mode in enumerate(MODES)
    ],
)
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
    env = EnvironmentsInTurn([lambda: Breaks(space)], "Breaks")
    to_module, to_env = build_runner_pipelines(
        ConnectorsConfig.parse({}), space, OBSERVED_CHOICES_ACTIONS
    )
    module = ActorCritic(to_module.module_observation_space, OBSERVED_CHOICES_ACTIONS, {})
    policy = Actor(module, 1, STEPS, 0, to_env, to_module)
    if fails == "module":
        act, steps = policy.act, itertools.count()

        def fail(seen: Any, **options: Any) -> Any:
            if next(steps) == 2:
                raise ValueError("its own mistake")
            return act(seen, **options)

        monkeypatch.setattr(policy, "act", fail)
    with pytest.raises((EnvironmentFailed, ValueError), match="its own mistake"):
        Sampler(env, policy, STEPS, 0).sample((0, 0))


@pytest.mark.parametrize("connectors", [{}, FLATTEN], ids=["plain", "flatten"])
@pytest.mark.parametrize("kind", WRONG)
def test_evaluations_find_it_too(kind: str, connectors: dict[str, Any]) -> None:
    env, policy = parts(kind, 2, connectors, AutoresetMode.SAME_STEP)
    with pytest.raises(EnvironmentFailed, match=r"environment 1 .* before step 2 of"):
        evaluate(env, policy, 2, 0)


class Choosing(ScriptedAgents):
    """Agents that see choices; green's may be out of bounds."""

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
