"""What may be an algorithm, and what is said of what is none."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.driver.config import ConfigError, RunConfig
from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.registry import (
    ALGORITHMS,
    build_learner,
    find_algorithm,
    give_algorithm,
)
from juggler.learner.config import LearnerConfig
from juggler.learner.core.gradient_core import GradientCore
from juggler.runtime.modules.building import build_module

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
TWO = spaces.Discrete(2)


@dataclass(kw_only=True)
class MyConfig(LearnerConfig):
    lr: float = 0.25
    sharpness: float = 2.0
    """How sharp."""

    def validate(self) -> None:
        super().validate()
        self.check_above("sharpness", 0)


class MyCore(GradientCore):
    name = "mine"

    def loss(self, *_: Any) -> Any:
        raise NotImplementedError


class Mine(Algorithm):
    config = MyConfig
    core = MyCore


def test_the_help_lists_every_algorithm_that_ships() -> None:
    words = Path(inspect.getfile(LearnerConfig)).read_text().partition('"""The algorithm: ')[2]
    assert words.startswith(", ".join(sorted(ALGORITHMS)))


def test_a_class_that_was_given_is_found_by_its_name_with_its_keys_and_defaults() -> None:
    name = give_algorithm(Mine)
    assert find_algorithm(name) is Mine
    config = RunConfig.from_flat({"algorithm": name, "sharpness": 3.0})
    assert isinstance(config.learner, MyConfig)
    assert (config.learner.algorithm, config.learner.lr, config.learner.sharpness) == (
        name,
        0.25,
        3.0,
    )
    learner = build_learner(config.learner, None, VECTOR, TWO, {})
    assert isinstance(learner.core, MyCore)
    for keys, said in (
        ({"sharpnes": 1.0}, "unknown key 'sharpnes': did you mean 'sharpness'"),
        ({"sharpness": 0}, "sharpness = 0.0: must be above 0"),
        ({"sharpness": "very"}, "sharpness: Expected `float`, got `str`"),
        ({"burn_in": 2}, "'burn_in' is a key of appo and impala and ppo"),
    ):
        with pytest.raises(ConfigError, match=said):
            RunConfig.from_flat({"algorithm": name, **keys})


class NoAlgorithm:
    config = MyConfig
    core = MyCore


class Undecorated(LearnerConfig):
    pass


@dataclass(kw_only=True)
class Incomplete(LearnerConfig):
    depth: int


@dataclass(kw_only=True)
class Colliding(LearnerConfig):
    seed: int = 3


def algorithm(name: str, **attributes: Any) -> type[Algorithm]:
    return type(name, (Algorithm,), {"config": MyConfig, "core": MyCore, **attributes})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (NoAlgorithm, "must be a class derived from juggler.Algorithm"),
        (Mine(), "expected a name, or a class derived from juggler.Algorithm"),
        (algorithm("Bare", config=Undecorated), r"with @dataclass\(kw_only=True\) above it"),
        (algorithm("Other", config=dict), "must be a class derived from juggler.LearnerConfig"),
        (algorithm("Lacking", config=Incomplete), "the key 'depth' of its config has no default"),
        (algorithm("Coreless", core=None), "`core` must be a LearnerCore class, or its name"),
    ],
)
def test_what_is_no_algorithm_is_refused_with_what_it_lacks(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        give_algorithm(given)


def test_a_key_that_every_run_has_is_refused() -> None:
    name = give_algorithm(algorithm("Twice", config=Colliding))
    with pytest.raises(ConfigError, match="has a key 'seed', which every run has: rename it"):
        RunConfig.from_flat({"algorithm": name})


def test_a_class_of_a_script_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="this run's algorithm is Lost, of a script"):
        find_algorithm("__main__:Lost")


def test_a_core_needs_a_name() -> None:
    class Nameless(GradientCore):
        loss = Impala.loss

    make = partial(build_module, None, VECTOR, TWO, {})
    with pytest.raises(ValueError, match="Nameless needs a name, which its checkpoints carry"):
        Nameless({"default": make}, LearnerConfig())
