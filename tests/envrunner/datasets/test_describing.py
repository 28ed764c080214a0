"""What a data set says of its environment is enough to make it again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces
from support.datasets import CHOICES, VECTOR, random_episodes

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.datasets.describing import spec_of
from juggler.envrunner.datasets.writing import writing
from juggler.runtime.datasets.finding import environment_of
from juggler.runtime.modules.by_name import name_of


class Arm(gymnasium.Env[Any, Any]):
    """An environment of one's own."""

    observation_space = VECTOR
    action_space = spaces.Discrete(3, start=1)

    def __init__(self, joints: int = 1) -> None:
        self.joints = joints


NAME = f"{__name__}:Arm"
KWARGS = {"joints": 3}


def described(
    place: Path, factory: Callable[..., Any] | None = None, **config: Any
) -> dict[str, Any]:
    """What a data set with the episodes of this environment says of it."""
    pytest.importorskip("minari", reason="needs juggler[datasets]")
    spec = spec_of(EnvRunnerConfig(**config), factory)
    with writing(place, "juggler/arm-v0", VECTOR, CHOICES, spec, {}) as writer:
        writer.add(*random_episodes([3]))
    return environment_of(str(place))


def test_a_class_of_ones_own_is_named(tmp_path: Path) -> None:
    named = {"env": NAME, "env_kwargs": KWARGS}
    assert described(tmp_path / "by-name", **named) == named
    assert described(tmp_path / "by-class", Arm, **named) == named


def test_minari_makes_an_environment_of_ones_own_again(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari", reason="needs juggler[datasets]")
    described(tmp_path / "mine", env=NAME, env_kwargs=KWARGS, max_episode_steps=7)
    env = minari.MinariDataset(tmp_path / "mine" / "data").recover_environment()
    assert env.unwrapped.joints == 3
    assert env.spec.max_episode_steps == 7


def test_what_makes_a_whole_vector_is_not_named(tmp_path: Path) -> None:
    assert described(tmp_path / "poles", env="juggler:CartPoles") == {}


@pytest.mark.parametrize(
    ("env", "factory"),
    [
        ("__main__:Arm", Arm),
        (name_of(functools.partial(Arm, 2)), functools.partial(Arm, 2)),
        (NAME, lambda: Arm(2)),
        (f"{__name__}:test.<locals>.Arm", Arm),
        ("a_module_that_is_not_there:Arm", Arm),
    ],
)
def test_what_others_would_not_find_by_this_name_is_not_named(
    env: str, factory: Callable[..., Any], tmp_path: Path
) -> None:
    assert described(tmp_path / "mine", factory, env=env) == {}


def test_an_environment_that_a_module_registers_is_named_with_the_module(tmp_path: Path) -> None:
    told = described(tmp_path / "mine", env="gymnasium:CartPole-v1")
    assert told == {"env": "gymnasium:CartPole-v1", "env_kwargs": {}}
