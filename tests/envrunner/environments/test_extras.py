"""What an environment needs beside Juggler, and what is said where that is missing."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.extras import EXTRAS, extra_for
from juggler.envrunner.environments.vector import make_vector_env
from juggler.runtime.installing import installing

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("env", "extra"),
    [
        ("Hopper-v5", "mujoco"),
        ("gymnasium:Hopper-v5", None),
        ("gymnasium.envs.mujoco.hopper_v5:HopperEnv", "mujoco"),
        ("LunarLander-v3", "box2d"),
        ("ale_py:ALE/Pong-v5", "atari"),
        ("ale_python:Pong", None),
        ("CartPole-v1", None),
        ("NoSuchThing-v0", None),
    ],
)
def test_the_extra_of_an_environment_is_known_by_where_it_is_made(
    env: str, extra: str | None
) -> None:
    assert extra_for(env) == extra


def test_every_extra_is_one_of_the_package() -> None:
    assert set(EXTRAS.values()) <= PROJECT["optional-dependencies"].keys()


def test_developers_have_the_packages_of_every_extra_with_environments() -> None:
    extras = {  # without what they say of versions of Python
        extra: {package.partition(";")[0] for package in packages}
        for extra, packages in PROJECT["optional-dependencies"].items()
    }
    for extra in set(EXTRAS.values()) - {"envpool"}:  # which takes most of a gigabyte
        assert extras[extra] <= extras["dev"], extra


@pytest.mark.parametrize(
    ("env", "package", "extra"),
    [
        ("Hopper-v5", "mujoco", "mujoco"),
        ("Hopper-v5", "imageio", "mujoco"),
        ("LunarLander-v3", "Box2D", "box2d"),
        ("LunarLander-v3", "pygame", "box2d"),
        ("ale_py:ALE/Pong-v5", "ale_py", "atari"),
        ("envpool:Pong-v5", "envpool", "envpool"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, env: str, package: str, extra: str
) -> None:
    if package == "pygame":
        pytest.importorskip("Box2D", reason="the environment asks for Box2D first")
    for name in [*sys.modules]:
        if name.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # which makes its import fail
    with pytest.raises(ValueError, match="needs the package") as wrong:
        make_vector_env(EnvRunnerConfig(env=env, envs_per_runner=1))
    said = str(wrong.value)
    assert repr(env) in said
    assert f"needs the package {package}: {installing(extra)}" in said
