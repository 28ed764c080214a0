"""Videos of evaluations beside training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.envrunner.stage import OwnCode
from juggler.envrunner.stage_building import build_filmed_stage
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
    """Record an episode of the checkpoint that an evaluation plays. People are told of a problem,
    and the evaluation counts all the same.

    Args:
        command: asks for the evaluation.
        trees: what the modules of the checkpoint play with.
        told: the setup of the evaluator.
        env_factory: as in `EnvRunnerProgram`.
        own_code: likewise.
        warn: tells people.
        progresses: called after each step.
    """
    directory = Path(command.video)
    try:
        stage = build_filmed_stage(told, command.seed, env_factory, own_code, warn, directory)
        try:
            stage.load_trees(trees)
            most = min(command.most_steps or _MOST_STEPS, _MOST_STEPS)
            stage.evaluate(1, command.seed, lambda *_: progresses(), most_steps=most, goal=None)
        finally:
            stage.close()  # which finishes the video
    # It cannot be drawn, the disk or the program that writes videos fails, or the game itself does.
    except (ValueError, OSError, EnvironmentFailed) as error:
        warn(f"could not record {directory.name}: {error}")
