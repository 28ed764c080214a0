"""Builds what an EnvRunner plays with, from what the driver tells it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.datasets.sampled_episodes import recorded_while_played
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.process import step_back
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.envrunner.single_agent_stage import SingleAgentStage
from juggler.envrunner.stage import OwnCode, Stage


def build_stage(
    told: EnvRunnerSetup,
    seed: int,
    env_factory: Any,
    own_code: OwnCode,
    frozen: FrozenWeights,
    worker_id: str,
    index: int,
    tell: Callable[[str], None],
) -> Stage:
    """Make the environments, and the modules that act in them.

    Args:
        told: by the driver.
        seed: of the worker.
        env_factory: makes the environments instead of the name in `told`; None: that does.
        own_code: may be used in the setup.
        frozen: what modules play with that are not trained.
        worker_id: of the worker.
        index: of the worker.
        tell: people, of a problem with what it records.
    """
    with ExitStack() as undo:
        stage: Stage
        if told.agents:
            # A run of environments with one agent needs none of it.
            from juggler.envrunner.multi_agent.making import make_multi_agent_envs
            from juggler.envrunner.multi_agent.multi_agent_stage import MultiAgentStage

            envs = make_multi_agent_envs(told.env_runner, env_factory, critics_see=told.critics_see)
            undo.callback(envs.close)
            stage = MultiAgentStage(told, envs, seed, own_code, frozen)
            step_back()
        else:
            env: VectorEnvironment
            if told.env_runner.dataset:
                env = RecordedEnvs.of(told.env_runner)
            else:
                env = make_vector_env(told.env_runner, env_factory, index)
                env = recorded_while_played(env, told.env_runner, worker_id, env_factory, tell)
            undo.callback(env.close)
            stage = SingleAgentStage(told, env, seed, own_code)
            step_back(env)
        undo.pop_all()
        return stage
