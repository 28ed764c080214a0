"""Evaluates a checkpoint in this process, without workers or streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.record.candidates import Played
from juggler.driver.script_classes import must_be_given_again
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.connectors.pipeline import own_connectors


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Episodes that a checkpoint's policy played deterministically.

    Attributes:
        checkpoint: path of the policy's checkpoint.
        returns: undiscounted returns, by environment and then by time.
        lengths: numbers of steps, in the same order.
        videos: paths of the videos, in the same order; empty if none were recorded.
    """

    checkpoint: Path
    returns: list[float]
    lengths: list[int]
    videos: list[Path]

    @property
    def mean(self) -> float:
        """Mean of the returns."""
        return Played.of(self.returns).mean

    @property
    def deviation(self) -> float:
        """Standard deviation of the returns."""
        return Played.of(self.returns).deviation


def evaluate(
    checkpoint: str | Path,
    episodes: int = 20,
    seed: int = 0,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    connectors: Mapping[str, Any] | None = None,
    video: str | Path | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Evaluated:
    """Play whole episodes with the policy in a checkpoint, without exploration.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest good checkpoint is taken, with a
            warning if it is not the newest.
        episodes: number of episodes.
        seed: of the environments.
        env: another environment than the run's; required if the run was trained on a callable.
        module: the class that the run trained, if it cannot be imported by name.
        connectors: the run's connectors again, if some of their classes cannot be imported by name.
        video: a directory for a video of each episode. Environments are then stepped one after
            the other.
        watch: called after each step of all environments, with the number of finished episodes and
            of steps so far.

    Raises:
        ConfigError: `episodes` is below 1, or the run needs something of a script again.
        CheckpointError: there is no checkpoint, it is damaged, or it is another module's.
        EnvironmentFailed: an environment failed.
        ValueError: the environment cannot be recorded, or a package for videos is missing.
    """
    # Imported here because they import torch, which the driver does without.
    from juggler.envrunner.behaviour_policy import BehaviourPolicy
    from juggler.envrunner.environments.vector import make_vector_env
    from juggler.envrunner.environments.video import record_videos
    from juggler.envrunner.evaluation import evaluate as play
    from juggler.policies.loading import PolicyConfig, restore_parts

    if episodes < 1:
        raise ConfigError(f"episodes = {episodes}: must be at least 1")
    found = read(Path(checkpoint))
    for problem in found.problems:
        warnings.warn(f"passed over, for the one before: {problem}", stacklevel=2)
    where = found.path or Path(checkpoint)
    if found.config.get("agents"):
        modules = ", ".join(map(repr, found.module_ids))
        raise ConfigError(
            f"{where}: this run has several agents, and their episodes cannot be evaluated yet: "
            f"act with juggler.load_policy(checkpoint, module_id=...), of which there are {modules}"
        )
    named = {key: name for key, name in (("env", env), ("module", module)) if type(name) is str}
    keys: dict[str, Any] = {} if connectors is None else {"connectors": connectors}
    own = own_connectors(keys)
    config = RunConfig.to_act({**found.config, **named, **keys}, where=str(where))
    must_be_given_again(config, env, module, own)
    rows = min(config.env_runner.envs_per_runner, episodes)
    config.env_runner.envs_per_runner = rows
    factory = env if callable(env) else None
    videos: list[Path] = []
    if video is not None:
        factory, videos = record_videos(config.env_runner, factory, Path(video), episodes)
        config.env_runner.vectorize = "sync"
    environments = make_vector_env(config.env_runner, factory)
    try:
        policy_config = PolicyConfig(
            config.module, config.connectors.parsed(), module if callable(module) else None, own
        )
        built, env_to_module, module_to_env = restore_parts(
            found,
            policy_config,
            environments.single_observation_space,
            environments.single_action_space,
        )
        policy = BehaviourPolicy(built, rows, 1, seed, module_to_env)
        returns, lengths = play(environments, policy, episodes, seed, env_to_module, watch)
    finally:
        environments.close()
    return Evaluated(where, returns, lengths, videos)
