"""What a run takes for keys that nobody gave: by its algorithm, and by what its environment shows.

The dataclasses have general defaults. Those here are for an environment that somebody tries for the
first time, chosen by measurement over fifteen of them: benchmarks/defaults.py, and the table in
benchmarks/README.md. They make the most of few steps, by small samples and many steps of the
optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from juggler.driver.config import RunConfig
from juggler.runtime.wire.v1 import spaces_pb2
from juggler.runtime.wire.v1.tensors_pb2 import DType

#: By algorithm, whatever the environment.
CHOSEN: dict[str, dict[str, Any]] = {
    "impala": {
        "envs_per_runner": 8,
        "fragment_steps": 16,
        "lr": 1e-3,
        # A value function that lags behind its policy is what makes runs fall after they were
        # solved: see "What was learned" in benchmarks/README.md.
        "value_lr_scale": 3.0,
        "lambda_": 0.95,
        "grad_clip": 0.5,
    },
    "appo": {
        "envs_per_runner": 8,
        "fragment_steps": 16,
        "lr": 1e-3,
        "value_lr_scale": 3.0,
        "lambda_": 0.95,
        "grad_clip": 0.5,
        "batch_uses": 4,
    },
    "pqn": {"envs_per_runner": 8, "fragment_steps": 32, "lr": 1e-3},
    "ppo": {
        "envs_per_runner": 8,
        "fragment_steps": 64,
        # With so many steps of the optimizer a policy of the update before is far: requests wait
        # until an update is done.
        "max_staleness": 2,
        "epochs": 10,
        "entropy_coefficient": 0.0,
        "value_coefficient": 1.0,
    },
}
#: In place of some of these, where a vector of floats is observed. With IMPALA's above, CartPole
#: fell after it was solved; where choices are observed, those above learn more from few steps.
CHOSEN_FOR_VECTORS: dict[str, dict[str, Any]] = {"impala": {"lr": 5e-4, "value_lr_scale": 6.0}}
#: Steps in an update, at least; PPO's is learned from in minibatches of `_MINIBATCH`.
_BATCH = {"impala": 128, "appo": 128, "ppo": 2048, "pqn": 256}
_MINIBATCH = 64
_UNKNOWN = (
    "the environment is not known on this host: what was not given has its general default, as in "
    "docs/configuration.md"
)
_FLOATS = (DType.DTYPE_FLOAT16, DType.DTYPE_FLOAT32, DType.DTYPE_FLOAT64)


def settled(
    config: RunConfig, given: Collection[str], observation: spaces_pb2.Space | None
) -> tuple[RunConfig, str]:
    """A configuration with what was chosen for keys that nobody gave, and words about it.

    Args:
        config: with the general defaults for those keys.
        given: keys that somebody gave a value to, be it the default.
        observation: what one environment shows; none: nobody here knows.
    """
    if config.learner.algorithm not in CHOSEN:
        return config, ""  # one of somebody's own, whose defaults are its own
    if observation is None:
        open_keys = CHOSEN[config.learner.algorithm].keys() - set(given)
        return config, _UNKNOWN if open_keys else ""
    chosen = _chosen(config, given, observation)
    config = RunConfig.from_flat({**config.flat(), **chosen})
    values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in chosen.items())
    return config, f"chosen for {config.learner.algorithm}: {values}" if chosen else ""


def _chosen(
    config: RunConfig, given: Collection[str], observation: spaces_pb2.Space
) -> dict[str, Any]:
    """Values by key; none of a key that was given."""
    chosen: dict[str, Any] = {}

    def choose(key: str, value: Any) -> None:
        if key not in given:
            chosen[key] = value

    algorithm = config.learner.algorithm
    vector = len(observation.box.shape) == 1 and observation.box.dtype in _FLOATS
    special = CHOSEN_FOR_VECTORS.get(algorithm, {}) if vector else {}
    for key, value in {**CHOSEN[algorithm], **special}.items():
        choose(key, value)
    if config.flat().get("burn_in") or config.module.model.get("recurrent", "none") != "none":
        chosen.pop("fragment_steps", None)  # what is remembered is learned within a fragment
    if config.learner.weights_interval > 1:
        chosen.pop("max_staleness", None)
    if "reward_scale" not in given:
        choose("connectors", _connectors(vector, config))
    flat = {**config.flat(), **chosen}
    # Requests stop once some updates' worth is open: with more EnvRunners than two, larger ones.
    fragment = flat["envs_per_runner"] * flat["fragment_steps"]
    batch = max(_BATCH[algorithm], fragment * max(1, config.driver.num_env_runners // 2))
    choose("batch_size", batch * config.driver.learners)
    if algorithm == "ppo":
        choose("minibatches", max(1, {**flat, **chosen}["batch_size"] // _MINIBATCH))
    return chosen


def _connectors(vector: bool, config: RunConfig) -> dict[str, Any]:
    pieces: dict[str, Any] = {}
    # Returns of whatever size become some that a value function learns soon. Learners of a group
    # would each estimate their size by themselves, and not make the updates of one learner.
    if config.driver.learners == 1:
        pieces["learner"] = [{"use": "normalize_rewards", "gamma": config.learner.gamma}]
    # Alone: side by side with choices, as they are in a Dict, numbers were learned from more slowly
    # behind a filter. Pictures have a scale of their own.
    if vector:
        pieces["env_to_module"] = ["mean_std_filter"]
    return pieces
