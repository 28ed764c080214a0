"""Playing with a checkpoint, in this process: needs no workers and no streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.training import must_be_given_again
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.connectors.pipeline import own_connectors


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Episodes that a checkpoint's policy played deterministically.

    Attributes:
        checkpoint: where the policy is from.
        returns: undiscounted, by environment and then by time.
        lengths: in steps, in the same order.
        videos: one for each episode, in the same order; none where none were asked for.
    """

    checkpoint: Path
    returns: list[float]
    lengths: list[int]
    videos: list[Path]

    @property
    def mean(self) -> float:
        return sum(self.returns) / len(self.returns)

    @property
    def deviation(self) -> float:
        """Standard deviation of the returns."""
        variance = sum((each - self.mean) ** 2 for each in self.returns) / len(self.returns)
        return float(variance**0.5)


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
    """Play `episodes` whole episodes with the policy in a checkpoint.

    Args:
        checkpoint: a checkpoint, or a run directory: then its newest good one, with a warning if
            that is not the newest.
        episodes: how many.
        seed: of the environments.
        env: another one than the run's; a callable where the run was trained on a callable.
        module: the class that the run trained, where that has no name to import it by.
        connectors: those of the run again, where classes among them have no such name.
        video: a directory for a video of each episode. Environments are then stepped one after
            the other, whatever the run says.
        watch: called after each step of all environments, with the episodes that have ended, and
            the steps so far.

    Raises:
        ConfigError: there is nothing to play, or the run needs something of a script again.
        CheckpointError: there is none, it is damaged, or it is another module's.
        EnvironmentFailed: the environment did.
        ValueError: `video`: the environment shows no pictures, or a package is missing.
    """
    # Torch is imported here and not above: the driver does without.
    from juggler.envrunner.behaviour_policy import BehaviourPolicy
    from juggler.envrunner.environments.vector import make_vector_env
    from juggler.envrunner.environments.video import recorded
    from juggler.envrunner.evaluation import evaluate as play
    from juggler.policies.loading import Recipe, restored

    if episodes < 1:
        raise ConfigError(f"episodes = {episodes}: must be at least 1")
    found = read(Path(checkpoint))
    for problem in found.problems:
        warnings.warn(f"passed over, for the one before: {problem}", stacklevel=2)
    where = found.path or Path(checkpoint)
    named = {key: name for key, name in (("env", env), ("module", module)) if type(name) is str}
    keys: dict[str, Any] = {} if connectors is None else {"connectors": connectors}
    own = own_connectors(keys)
    config = RunConfig.from_flat({**found.config, **named, **keys}, where=str(where))
    must_be_given_again(config, env, module, own)
    rows = min(config.env_runner.envs_per_runner, episodes)
    config.env_runner.envs_per_runner = rows
    factory = env if callable(env) else None
    videos: list[Path] = []
    if video is not None:
        factory, videos = recorded(config.env_runner, factory, Path(video), episodes)
        config.env_runner.vectorize = "sync"
    environments = make_vector_env(config.env_runner, factory)
    try:
        recipe = Recipe(
            config.module, config.connectors.parsed(), module if callable(module) else None, own
        )
        built, env_to_module, module_to_env = restored(
            found,
            recipe,
            environments.single_observation_space,
            environments.single_action_space,
        )
        policy = BehaviourPolicy(built, rows, 1, seed, module_to_env)
        returns, lengths = play(environments, policy, episodes, seed, env_to_module, watch)
    finally:
        environments.close()
    return Evaluated(where, returns, lengths, videos)
