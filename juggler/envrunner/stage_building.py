"""Builds the stage of an EnvRunner from the driver's setup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.datasets.sampled_episodes import recorded_while_played
from juggler.envrunner.environments.find_environment import VectorEnvironment
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.environments.video import record_videos
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.envrunner.single_agent_stage import SingleAgentStage
from juggler.envrunner.stage import Stage, UserCode
from juggler.envrunner.worker_process import step_back
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


def build_stage(
    setup: EnvRunnerSetup,
    seed: int,
    env_factory: Any,
    own_code: UserCode,
    frozen: FrozenWeights,
    worker_id: str,
    index: int,
    report: Callable[[str], None],
) -> Stage:
    """Make the environments, and the modules that act in them.

    Args:
        setup: from the driver.
        seed: of the worker.
        env_factory: makes the environments; None: the name in `setup` does.
        own_code: may be used in the setup.
        frozen: weights of modules that are not trained.
        worker_id: of the worker.
        index: of the worker.
        report: logs a problem with the recorded data set.
    """
    with ExitStack() as undo:
        stage: Stage
        if setup.agents:
            # Imported here, because a run of environments with one agent does not need it.
            from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
            from juggler.envrunner.multi_agent.multi_agent_stage import MultiAgentStage

            envs = make_multi_agent_envs(
                setup.env_runner, env_factory, critics_see=setup.critics_see
            )
            undo.callback(envs.close)
            stage = MultiAgentStage(setup, envs, seed, own_code, frozen)
            step_back()
        else:
            env: VectorEnvironment
            if setup.env_runner.dataset:
                env = RecordedEnvs.of(setup.env_runner)
            else:
                env = make_vector_env(setup.env_runner, env_factory, index)
                env = recorded_while_played(env, setup.env_runner, worker_id, env_factory, report)
            undo.callback(env.close)
            stage = SingleAgentStage(setup, env, seed, own_code)
            step_back(env)
        undo.pop_all()
        return stage


_MOST_STEPS = 3000  # of an episode


def film(
    command: training_pb2.Evaluate,
    trees: Mapping[str, Tree],
    setup: EnvRunnerSetup,
    env_factory: Any,
    own_code: UserCode,
    warn: Callable[[str], None],
    progresses: Callable[[], None],
) -> None:
    """Record an episode of the evaluated checkpoint.

    A problem is logged, and the evaluation still counts.

    Args:
        command: asks for the evaluation.
        trees: weights and connectors of the checkpoint's modules.
        setup: of the evaluator.
        env_factory: as in `build_stage`.
        own_code: may be used in the setup.
        warn: logs a warning.
        progresses: called after each step.
    """
    directory, seed, several = Path(command.video), command.seed, bool(setup.agents)
    config = replace(setup.env_runner, envs_per_runner=1, vectorize="sync", record="")
    try:
        paths = [directory / "episode.mp4"]
        factory = record_videos(config, env_factory, [paths], several_agents=several)
        alone = replace(setup, env_runner=config)
        stage = build_stage(alone, seed, factory, own_code, FrozenWeights(), "", 0, warn)
        try:
            stage.load_trees(trees)
            most = min(command.most_steps or _MOST_STEPS, _MOST_STEPS)
            stage.evaluate(1, seed, lambda *_: progresses(), most_steps=most, goal=None)
        finally:
            stage.close()  # finishes the video
    # It cannot be rendered, the disk or ffmpeg fails, or the environment itself does.
    except (ValueError, OSError, EnvironmentFailed) as error:
        warn(f"could not record {directory.name}: {error}")
