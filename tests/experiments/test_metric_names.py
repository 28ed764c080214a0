"""The names of metrics that are known before a run are those that runs have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.algorithms import action_space_of, keeps_steps, needs_memory

from juggler.driver.config import ConfigError, RunConfig
from juggler.experiments.sweeping import must_be_a_metric
from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
from juggler.runtime.modules.building import build_module
from juggler.testing import sample_for

VECTOR = spaces.Box(-10, 10, (4,), np.float32)
RND = {"intrinsic": {"kind": "rnd"}}


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        *((algorithm, {}) for algorithm in ALGORITHMS),
        ("appo", {"target_kl": 0.01}),
        ("impala", {"replay_share": 0.5, **RND}),
        ("ppo", {"target_kl": 0.01, **RND}),
        ("dqn", {"n_step": 1, "optimizers": {"layers": {"parameters": ["*weight"]}}, **RND}),
    ],
)
def test_a_learner_has_the_metrics_that_its_configuration_names(
    algorithm: str, keys: dict[str, Any]
) -> None:
    model = {"recurrent": "gru"} if needs_memory(algorithm) else {}
    few = {"replay_begin": 8, "replay_capacity": 4096, "replay_ratio": 2.0}
    kept = few if keeps_steps(algorithm) else {}
    acts = action_space_of(algorithm)
    learner = build_learner({"algorithm": algorithm, **kept, **keys}, None, VECTOR, acts, model)
    module = build_module(ALGORITHMS[algorithm].module, VECTOR, acts, model)
    found: set[str] = set()
    for seed in range(6):
        sample = sample_for(module, 4, 32, seed)
        found |= learner.step(sample).keys()
    named = ALGORITHMS[algorithm].config(algorithm=algorithm, **kept, **keys).metric_names()
    assert sorted(named) == sorted(found)


def test_the_metrics_of_ones_own_algorithm_and_of_its_optimizers_are_let_through() -> None:
    own = RunConfig.from_flat({"algorithm": "support.own_algorithms:Learning"})
    must_be_a_metric("modules/default/whatever", own)
    optimizers = {"value": {"parameters": ["value*"], "lr": 1e-3}}
    must_be_a_metric("modules/default/lr_value", RunConfig.from_flat({"optimizers": optimizers}))


def test_what_evaluations_have_needs_evaluations() -> None:
    name, keys = "by_agent/agent_0/evaluation_return_mean", {"env": "pettingzoo:x"}
    for metric in (name, "evaluation_return_mean"):
        with pytest.raises(ConfigError, match="evaluation_seconds"):
            must_be_a_metric(metric, RunConfig.from_flat(keys))
        must_be_a_metric(metric, RunConfig.from_flat({**keys, "evaluation_seconds": 2.0}))


PREY = {"train": False, "from": "somewhere"}
SEVERAL = {
    "agents": {"adversary_*": "hunters", "agent_0": "prey", "*": "random"},
    "modules": {"prey": PREY},
}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("by_module/huntr/updates", "module 'huntr': did you mean 'hunters'? There are 'hunters',"),
        (
            "by_module/x/episodes",
            "there is no module 'x'; there are 'hunters', 'prey' and 'random'",
        ),
        (
            "modules/huntr/entropy",
            "is trained 'huntr': did you mean 'hunters'? There are 'hunters'",
        ),
        ("modules/prey/entropy", "there is no module that is trained 'prey'"),
        ("modules/hunters/entrpy", "impala has no metric 'entrpy'"),
    ],
)
def test_a_module_that_the_table_agents_does_not_name_is_told(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        must_be_a_metric(name, RunConfig.from_flat(SEVERAL))
    assert str(error.value).startswith(f"metric = {name!r}: ")
    assert told in str(error.value)


@pytest.mark.parametrize(
    "name", ["by_module/hunters/updates", "by_module/prey/episodes", "by_module/random/episodes"]
)
def test_the_modules_of_the_table_agents_have_metrics_of_their_own(name: str) -> None:
    must_be_a_metric(name, RunConfig.from_flat(SEVERAL))
    with pytest.raises(ConfigError, match="'hunters'"):
        must_be_a_metric(name, RunConfig.from_flat({"agents": {"*": "hunters"}}))


def test_a_run_of_one_agent_has_no_metrics_by_module() -> None:
    with pytest.raises(ConfigError, match="'default'"):
        must_be_a_metric("by_module/default/updates", RunConfig.from_flat({"env": "CartPole-v1"}))


@pytest.mark.parametrize(
    "keys",
    [
        {"env": "juggler:MatrixGame", "league": {"builder": "alphastar"}},
        {"league": {"builder": "alphastar"}, "agents": {"row": ["main-0"], "column": ["main-0"]}},
        {"env": "pettingzoo:mpe/simple_tag_v3"},
        {"env": "my_games:tag"},
    ],
)
def test_modules_that_only_the_run_settles_are_let_through(keys: dict[str, Any]) -> None:
    for name in ("by_module/adversary/updates", "modules/adversary/entropy"):
        must_be_a_metric(name, RunConfig.from_flat(keys))


@pytest.mark.parametrize(
    ("algorithm", "metric", "told"),
    [
        ("dqn", "policy_loss", "epsilon, grad_norm, lr, mean_error, mean_value, replay_rows, "),
        ("appo", "kl_from_target", "clip_fraction, entropy, explained_variance, grad_norm, kl, "),
        ("bc", "explained_variance", "entropy, grad_norm, lr, policy_loss, skipped"),
    ],
)
def test_a_metric_that_the_algorithm_lacks_is_told_with_those_that_it_has(
    algorithm: str, metric: str, told: str
) -> None:
    dataset = {"dataset": "somewhere"} if algorithm == "bc" else {}
    config = RunConfig.from_flat({"algorithm": algorithm, **dataset})
    with pytest.raises(ConfigError) as error:
        must_be_a_metric(f"modules/default/{metric}", config)
    assert f"{algorithm} has no metric {metric!r} as it is configured" in str(error.value)
    assert f". It has {told}" in str(error.value)
