"""Environments that explore less than others, as in Ape-X."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from juggler.driver.config import RunConfig
from juggler.driver.workers.module_setups import acting_setup, exploration_exponents
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.envrunner.single_agent_stage import SingleAgentStage
from juggler.envrunner.stage import OwnCode
from juggler.learner.algorithms.td3.config import Td3Config
from juggler.learner.algorithms.td3.core import Td3
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.deterministic_actor_critic import DeterministicActorCritic
from juggler.runtime.modules.stepping import weights_of
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
    return SingleAgentStage(setup, env, runner, OwnCode())


@pytest.mark.parametrize("algorithm", ["dqn", "r2d2"])
def test_each_environment_explores_as_much_as_the_paper_says(algorithm: str) -> None:
    config, steps = config_of(algorithm), 400
    seen: list[float] = []
    for runner in range(RUNNERS):
        stage = stage_of(config, runner, steps)
        sent = {name: x.numpy().copy() for name, x in weights_of(stage._parts.module).items()}
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
        module = stage._parts.module
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
        words = "is a key of dqn, r2d2 and td3, and algorithm = 'sac': its policy is as random"
        with pytest.raises(ValueError, match=words):
            config_of("sac", **own)
    with pytest.raises(ValueError, match="is a key of dqn, r2d2 and td3, and algorithm = 'iql'"):
        config_of("iql")
    with pytest.raises(ValueError, match=r"exploration_noise = 1.5 with exploration_ladder = 7"):
        config_of("td3", exploration_noise=1.5)
    assert config_of("td3", exploration_noise=1.5, exploration_ladder=0.0)


def test_all_environments_of_an_env_runner_are_alike_where_rows_are_not_theirs() -> None:
    several = config_of("dqn", agents={"a": "default", "b": "default"})
    assert [exploration_exponents(several, runner, 4) for runner in (0, 1)] == [(1.0,), (8.0,)]
    gateway = config_of("dqn", gateway="localhost:0")
    assert exploration_exponents(gateway, 1, 4) == (8.0,)
    # One that was added later explores least.
    assert exploration_exponents(gateway, 5, 4) == (8.0,)


def test_without_a_ladder_nothing_changes() -> None:
    assert exploration_exponents(config_of("dqn", exploration_ladder=0.0), 1, 4) == ()
    assert exploration_exponents(RunConfig.from_flat({"algorithm": "sac"}), 1, 4) == ()
    with pytest.raises(ValueError, match="exploration_ladder = -1"):
        config_of("dqn", exploration_ladder=-1)
