"""Videos of evaluations during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from juggler.envrunner.environments.video import record_videos
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.envrunner.stage import OwnCode
from juggler.envrunner.stage_building import build_stage
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

_MOST_STEPS = 3000  # of an episode


def film(
    command: training_pb2.Evaluate,
    trees: Mapping[str, Tree],
    told: EnvRunnerSetup,
    env_factory: Any,
    own_code: OwnCode,
    warn: Callable[[str], None],
    progresses: Callable[[], None],
) -> None:
    """Record an episode of the evaluated checkpoint.

    A problem is logged, and the evaluation counts all the same.

    Args:
        command: asks for the evaluation.
        trees: what the modules of the checkpoint play with.
        told: the setup of the evaluator.
        env_factory: as in `EnvRunnerProgram`.
        own_code: likewise.
        warn: shows a warning.
        progresses: called after each step.
    """
    directory, seed, several = Path(command.video), command.seed, bool(told.agents)
    config = replace(told.env_runner, envs_per_runner=1, vectorize="sync", record="")
    try:
        paths = [directory / "episode.mp4"]
        factory = record_videos(config, env_factory, [paths], several_agents=several)
        alone = replace(told, env_runner=config)
        stage = build_stage(alone, seed, factory, own_code, FrozenWeights(), "", 0, warn)
        try:
            stage.load_trees(trees)
            most = min(command.most_steps or _MOST_STEPS, _MOST_STEPS)
            stage.evaluate(1, seed, lambda *_: progresses(), most_steps=most, goal=None)
        finally:
            stage.close()  # which finishes the video
    # It cannot be drawn, the disk or the program that writes videos fails, or the game itself does.
    except (ValueError, OSError, EnvironmentFailed) as error:
        warn(f"could not record {directory.name}: {error}")
