"""The space of a sweep, and the metrics that it may name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.small_cores import action_space_of, keeps_steps, needs_memory

from juggler.driver.config import ConfigError, RunConfig
from juggler.experiments.space import Axis, parse_space, placed
from juggler.experiments.sweep import must_be_a_metric
from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
from juggler.runtime.modules.module_specs import build_module
from juggler.testing import sample_for

LR_BOUNDS = {"low": 1e-4, "high": 1e-2, "step": None, "whole": False}


@pytest.mark.parametrize(
    ("key", "text", "meant"),
    [
        ("lr", "1e-4..1e-2:log", Axis("lr", log=True, **LR_BOUNDS)),
        ("lr", "1e-4 .. 1e-2", Axis("lr", log=False, **LR_BOUNDS)),
        ("batch-size", "256..1024:256", Axis("batch_size", (), 256, 1024, False, 256, True)),
        ("batch-size", "256..2048:300", Axis("batch_size", (), 256, 1756, False, 300, True)),
        ("gamma", "0.1..0.95:0.2", Axis("gamma", (), 0.1, 0.9, False, 0.2, False)),
        ("gamma", "0.1..0.3:0.2", Axis("gamma", (), 0.1, 0.3, False, 0.2, False)),
        ("gamma", "0..1", Axis("gamma", (), 0, 1, False, None, False)),
        ("entropy_coefficient", "0,0.01", Axis("entropy_coefficient", (0, 0.01))),
        ("model.activation", "relu,tanh", Axis("model.activation", ("relu", "tanh"))),
        ("model.hidden_sizes", "[64],[64, 64]", Axis("model.hidden_sizes", ([64], [64, 64]))),
        ("model.recurrent_size", "8..64", Axis("model.recurrent_size", low=8, high=64, whole=True)),
        ("env_kwargs.size", "3..8", Axis("env_kwargs.size", (), 3, 8, False, None, True)),
        ("env_kwargs.wind", "3.0..8", Axis("env_kwargs.wind", (), 3, 8, False, None, False)),
        ("lr", "[[0,1e-3],[9e5,1e-4]],5e-4", Axis("lr", ([[0, 1e-3], [9e5, 1e-4]], 5e-4))),
    ],
)
def test_what_is_written_is_what_is_meant(key: str, text: str, meant: object) -> None:
    assert parse_space({key: text}, {}) == [meant]


def test_values_are_placed_in_tables_and_what_they_came_from_stays() -> None:
    run: dict[str, Any] = {"lr": 1.0, "model": {"hidden_sizes": [8], "activation": "relu"}}
    values = {"lr": 2.0, "model.hidden_sizes": [64], "env_kwargs.size": 3}
    assert placed(run, values) == {
        "lr": 2.0,
        "model": {"hidden_sizes": [64], "activation": "relu"},
        "env_kwargs": {"size": 3},
    }
    assert run == {"lr": 1.0, "model": {"hidden_sizes": [8], "activation": "relu"}}


def test_a_configuration_of_one_algorithm_is_not_swept_over_several() -> None:
    impala = {"algorithm": "impala", "rho_bar": 1.0}
    with pytest.raises(ConfigError, match="CartPole"):
        parse_space({"algorithm": "ppo,appo"}, impala)
    with pytest.raises(ConfigError, match="did you mean 'appo'"):
        parse_space({"algorithm": "ppo,appoo"}, impala)


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
        ("by_module/huntr/updates", "module 'huntr': did you mean"),
        ("by_module/x/episodes", "there is no module 'x'; there are"),
        ("modules/huntr/entropy", "is trained 'huntr': did you mean"),
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
