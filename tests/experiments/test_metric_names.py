"""The names of metrics that are known before a run are those that runs have."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from support.algorithms import action_space_of, keeps_steps, needs_memory

from juggler.driver.config import RunConfig
from juggler.experiments.metric_names import learner_metrics, must_be_a_metric
from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
from juggler.runtime.modules.building import build_module
from juggler.testing import sample_for

VECTOR = spaces.Box(-10, 10, (4,), np.float32)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_numbers_of_a_learner_are_known(algorithm: str) -> None:
    model = {"recurrent": "gru"} if needs_memory(algorithm) else {}
    keys = {"replay_begin": 8, "replay_capacity": 4096} if keeps_steps(algorithm) else {}
    acts = action_space_of(algorithm)
    learner = build_learner({"algorithm": algorithm, **keys}, None, VECTOR, acts, model)
    module = build_module(ALGORITHMS[algorithm].module, VECTOR, acts, model)
    found: set[str] = set()
    for seed in range(20):
        sample = sample_for(module, 4, 32, seed)
        found |= learner.step({"default": sample}).get("default", {}).keys()
    assert "grad_norm" in found
    known = learner_metrics(learner.config)
    assert known is not None
    assert found <= known


def test_the_numbers_of_ones_own_algorithm_and_of_its_optimizers_are_let_through() -> None:
    own = RunConfig.from_flat({"algorithm": "support.own_algorithms:Learning"})
    must_be_a_metric("modules/default/whatever", own)
    optimizers = {"value": {"parameters": ["value*"], "lr": 1e-3}}
    must_be_a_metric("modules/default/lr_value", RunConfig.from_flat({"optimizers": optimizers}))
