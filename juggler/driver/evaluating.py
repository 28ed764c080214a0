"""Playing with a checkpoint, in this process: needs no workers and no streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.config import RunConfig
from juggler.driver.record import checkpoints
from juggler.driver.restoring import connector_state
from juggler.driver.training import must_be_given_again, own_connectors
from juggler.runtime.episodes.batch import DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Episodes that a checkpoint's policy played deterministically."""

    checkpoint: Path
    returns: list[float]
    lengths: list[int]

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
) -> Evaluated:
    """Play `episodes` whole episodes with the policy in a checkpoint.

    Args:
        checkpoint: a checkpoint, or a run directory: then its newest good one.
        episodes: how many.
        seed: of the environments.
        env: another one than the run's; a callable where the run was trained on a callable.
        module: the class that the run trained, where that has no name to import it by.
        connectors: those of the run again, where classes among them have no such name.

    Raises:
        CheckpointError: there is none, it is damaged, or it is another module's.
        EnvironmentFailed: the environment did.
    """
    # Torch is imported here and not above: the driver does without.
    from juggler.envrunner.behaviour_policy import BehaviourPolicy
    from juggler.envrunner.environments import make_vector_env
    from juggler.envrunner.evaluation import evaluate as play
    from juggler.runtime.connectors.building import build_runner_pipelines
    from juggler.runtime.modules.building import build_module

    found = checkpoints.read(Path(checkpoint))
    where = found.path or Path(checkpoint)
    named = {key: name for key, name in (("env", env), ("module", module)) if type(name) is str}
    keys: dict[str, Any] = {} if connectors is None else {"connectors": connectors}
    own = own_connectors(keys)
    config = RunConfig.from_flat({**found.config, **named, **keys}, where=str(where))
    must_be_given_again(config, env, module, own)
    rows = min(config.env_runner.envs_per_runner, episodes)
    config.env_runner.envs_per_runner = rows
    environments = make_vector_env(config.env_runner, env if callable(env) else None)
    try:
        env_to_module, module_to_env = build_runner_pipelines(
            config.connectors.parsed(),
            environments.single_observation_space,
            environments.single_action_space,
            own,
        )
        built = build_module(
            module if callable(module) else config.module.module,
            env_to_module.module_observation_space,
            module_to_env.action_space,
            config.module.model,
            distribution=config.module.distribution,
        )
        policy = BehaviourPolicy(built, rows, 1, seed, module_to_env)
        _load(policy, env_to_module, found, where)
        returns, lengths = play(environments, policy, episodes, seed, env_to_module)
    finally:
        environments.close()
    return Evaluated(where, returns, lengths)


def _load(policy: Any, connectors: Any, checkpoint: checkpoints.Checkpoint, where: Path) -> None:
    try:
        state: Any = checkpoint.tree[DEFAULT_MODULE]
        policy.load({**state["parameters"], **state["buffers"]})
    except (KeyError, TypeError, ValueError) as error:
        raise checkpoints.CheckpointError(where, f"is another module's: {error}") from error
    try:
        if learned := connector_state(checkpoint):
            connectors.set_state(learned)
    except ValueError as error:
        raise checkpoints.CheckpointError(where, str(error)) from error
