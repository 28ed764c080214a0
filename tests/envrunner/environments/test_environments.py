from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec, WrapperSpec, registry
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support.scripted_environments import NativeScripted, Scripted

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.script_classes import is_of_a_script, own_classes, pack
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.environments.simulator_extras import EXTRAS, extra_for
from juggler.envrunner.environments.vector import (
    autoreset_mode,
    make_vector_env,
    reset_environments,
)
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.actors.worker import worker_seed
from juggler.runtime.install_commands import installing

SCRIPTED = "support.scripted_environments:Scripted"


def config(env: str = SCRIPTED, **changes) -> EnvRunnerConfig:
    return EnvRunnerConfig(env=env, **({"envs_per_runner": 2} | changes))


@pytest.fixture
def registered() -> Iterator[None]:
    native = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
    wrapper = WrapperSpec("Flat", "gymnasium.wrappers:FlattenObservation", {})
    gymnasium.register("OnlyVector-v0", vector_entry_point=native)
    gymnasium.register("ScriptedPlain-v0", entry_point=SCRIPTED, kwargs={"box": True})
    gymnasium.register(
        "ScriptedWrapped-v0",
        entry_point=SCRIPTED,
        vector_entry_point=native,
        additional_wrappers=(wrapper,),
    )
    yield
    for name in ("OnlyVector-v0", "ScriptedPlain-v0", "ScriptedWrapped-v0"):
        del registry[name]


def test_an_id_with_a_vector_entry_point_is_native() -> None:
    env = make_vector_env(config("CartPole-v1", envs_per_runner=3))
    assert type(env.unwrapped).__name__ == "CartPoleVectorEnv"
    assert env.num_envs == 3
    assert autoreset_mode(env) is AutoresetMode.NEXT_STEP
    assert reset_environments(env, 0).shape == (3, 4)


def test_an_id_without_one_is_stepped_in_turn() -> None:
    env = make_vector_env(config("Pendulum-v1", env_kwargs={"g": 5.0}))
    assert isinstance(env.unwrapped, SyncVectorEnv)
    assert env.unwrapped.envs[1].unwrapped.g == 5.0


def test_an_id_may_name_the_module_that_registers_it() -> None:
    env = make_vector_env(config("gymnasium.envs:Pendulum-v1"))
    assert env.single_observation_space.shape == (3,)


def test_gymnasiums_checks_run_in_the_first_environment_alone() -> None:
    config = EnvRunnerConfig(env="Acrobot-v1", envs_per_runner=3)
    envs = make_vector_env(config)
    names = [str(each) for each in envs.envs]  # type: ignore[attr-defined]
    for check in ("PassiveEnvChecker", "OrderEnforcing"):
        assert [check in name for name in names] == [True, False, False]
    assert all("TimeLimit" in name for name in names)
    envs.close()


def test_wrappers_stand_in_the_way_of_a_vector_entry_point(registered) -> None:
    env = make_vector_env(config("ScriptedWrapped-v0"))
    assert isinstance(env.unwrapped, SyncVectorEnv)
    with pytest.raises(ValueError, match="ScriptedWrapped-v0 has wrappers"):
        make_vector_env(config("ScriptedWrapped-v0", vectorize="native"))


def test_a_vectorization_that_cannot_be_had_is_refused(registered) -> None:
    with pytest.raises(ValueError, match="Pendulum-v1 has no vector entry point"):
        make_vector_env(config("Pendulum-v1", vectorize="native"))
    with pytest.raises(ValueError, match="Scripted makes single environments"):
        make_vector_env(config(vectorize="native"))
    with pytest.raises(ValueError, match="OnlyVector-v0 must be native"):
        make_vector_env(config("OnlyVector-v0", vectorize="sync"))
    with pytest.raises(ValueError, match="makes a VectorEnv"):
        make_vector_env(config(vectorize="async"), make_native)


def make_native() -> NativeScripted:
    return NativeScripted([((3, "terminated"),)] * 2, AutoresetMode.DISABLED)


def test_a_native_vector_resets_in_its_own_way() -> None:
    assert autoreset_mode(make_vector_env(config(), make_native)) is AutoresetMode.DISABLED


def test_a_vector_must_say_when_it_resets() -> None:
    def silent() -> NativeScripted:
        env = make_native()
        env.metadata = {}
        return env

    with pytest.raises(ValueError, match="autoreset_mode"):
        make_vector_env(config(), silent)


def test_a_vector_must_have_as_many_environments_as_the_config_says() -> None:
    with pytest.raises(ValueError, match="2 environments, and envs_per_runner is 3"):
        make_vector_env(config(envs_per_runner=3), make_native)


def test_a_vector_with_a_parameter_for_their_number_gets_it() -> None:
    def make(length: int, num_envs: int = 7) -> NativeScripted:
        return NativeScripted([((length, "truncated"),)] * num_envs, AutoresetMode.NEXT_STEP)

    assert make_vector_env(config(envs_per_runner=3, env_kwargs={"length": 4}), make).num_envs == 3
    told = {"length": 4, "num_envs": 7}
    with pytest.raises(ValueError, match="7 environments, and envs_per_runner is 3"):
        make_vector_env(config(envs_per_runner=3, env_kwargs=told), make)


def test_a_factory_makes_each_environment_once() -> None:
    made: list[Scripted] = []

    def factory(**kwargs: object) -> Scripted:
        made.append(Scripted(**kwargs))
        return made[-1]

    env = make_vector_env(config(envs_per_runner=3, env_kwargs={"box": True}), factory)
    assert [single.unwrapped for single in env.unwrapped.envs] == made
    assert isinstance(env.single_action_space, gymnasium.spaces.Box)


def test_a_factory_must_make_environments() -> None:
    with pytest.raises(ValueError, match=r"must make a gymnasium\.Env.*, not a dict"):
        make_vector_env(config(), lambda: {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cartpole-v1", "Nearest: CartPole-v1"),
        ("CartPole", "Nearest: CartPole-v1"),
        ("Acrobat-v1", "Nearest: Acrobot-v1"),
        (
            "support.scripted_environments:Scriptd",
            "Nearest: support.scripted_environments:Scripted",
        ),
        ("support.scripted_environments:CartPol-v1", "CartPole-v1"),
        (  # not any callable of the file
            "support.scripted_environments:Nope",
            r"'Nope'. Nearest: support.scripted_environments:Scripted, support.*:\w+. Name an",
        ),
        ("support.scripted_environments:np", "no callable 'np'"),
        ("support.scripted_environments", "Nearest: support.scripted_environments:Scripted"),
        ("support.scripted_environments.py", "Nearest: support.scripted_environments:Scripted"),
        ("no_such_module:Thing-v0", "no Python module 'no_such_module'"),
        ("gymnasium.nothing:Thing-v0", "no Python module 'gymnasium.nothing'"),
    ],
)
def test_an_environment_that_does_not_exist_is_refused_with_what_is_near(name, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_vector_env(config(name))
    assert name in str(caught.value)


@pytest.mark.parametrize("line", ["import a_module_that_is_not_there", "raise OSError('no GPU')"])
def test_a_module_that_cannot_be_imported_shows_its_own_error(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_simulator.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFailed, match=r"broken_simulator.*import") as caught:
        make_vector_env(config("broken_simulator:make"))
    assert line in caught.value.traceback
    sys.modules.pop("broken_simulator", None)


@pytest.mark.parametrize("call", ["constructor", "reset", "step"])
@pytest.mark.parametrize("vectorize", ["sync", "async"])
def test_what_an_environment_raises_is_kept_with_its_traceback(vectorize, call) -> None:
    bad = config(
        "support.scripted_environments:Failing",
        vectorize=vectorize,
        envs_per_runner=1,
        env_kwargs={"call": call, "at": int(call == "step")},
    )
    with pytest.raises(EnvironmentFailed) as caught:
        fail(bad)
    failure = caught.value
    assert re.fullmatch(
        rf"environment 0 \(Failing\) failed in {call}: RuntimeError: the cube fell off the table "
        r"\(scripted_environments\.py, line \d+, in the_guilty_line\)",
        str(failure),
    )
    assert (failure.call, failure.reason.split(":")[0]) == (call, "RuntimeError")
    assert "in the_guilty_line" in failure.traceback
    assert failure.__notes__ == [failure.traceback]


def fail(bad: EnvRunnerConfig) -> None:
    env = make_vector_env(bad)
    try:
        reset_environments(env, 0)
        for _ in range(3):
            env.step(np.zeros(1, int))
    finally:
        env.close()


def test_a_vector_that_raises_is_reported_too() -> None:
    class Broken(NativeScripted):
        def step(self, actions):
            raise KeyError("wheel")

    def make() -> Broken:
        return Broken([((3, "terminated"),)] * 2, AutoresetMode.NEXT_STEP)

    env = make_vector_env(config(), make)
    env.reset()
    with pytest.raises(EnvironmentFailed, match="KeyError: 'wheel'") as caught:
        env.step(np.zeros(2, int))
    assert 'raise KeyError("wheel")' in caught.value.traceback


# Wrappers that a config names, and environments that a script registers.


CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
TIMED = ["TimeAwareObservation", {"use": "ReshapeObservation", "shape": [5, 1]}]


class Doubled(gymnasium.RewardWrapper[Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], factor: float) -> None:
        super().__init__(env)
        self._factor = factor

    def reward(self, reward: Any) -> Any:
        return self._factor * reward


@pytest.mark.parametrize("env", ["CartPole-v1", CARTPOLE])
def test_the_last_one_is_the_outermost_and_options_reach_them(env: str) -> None:
    own = {"use": f"{__name__}:Doubled", "factor": 3.0}
    limit = {"use": "TimeLimit", "max_episode_steps": 2}
    config = EnvRunnerConfig(env=env, envs_per_runner=2, env_wrappers=[limit, *TIMED, own])
    made = make_vector_env(config)
    try:
        assert made.single_observation_space.shape == (5, 1), "its shape came as a tuple"
        made.reset(seed=1)
        _, rewards, *_ = made.step(np.zeros(2, np.int64))
        _, _, _, truncated, _ = made.step(np.zeros(2, np.int64))
        assert rewards.tolist() == [3.0, 3.0]
        assert truncated.all()
    finally:
        made.close()


@pytest.mark.parametrize(
    ("wrappers", "said"),
    [
        (["TimeAwareObservatio"], "did you mean 'TimeAwareObservation'?"),
        ([{"factor": 2}], "a table with a 'use'"),
        ([3], "not 3"),
    ],
)
def test_a_name_that_is_none_is_told_by_the_config(wrappers: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match="env_wrappers: ") as wrong:
        EnvRunnerConfig(env_wrappers=wrappers).validate()
    assert said in str(wrong.value)


@pytest.mark.parametrize(
    "elsewhere",
    [{"env": "dm_env_rpc://h:1"}, {"env": "envpool:Pong-v5"}, {"gateway": "127.0.0.1:0"}],
)
def test_what_python_does_not_step_is_not_wrapped(elsewhere: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave them out"):
        EnvRunnerConfig(env_wrappers=TIMED, **elsewhere).validate()


def test_vectors_are_not_wrapped() -> None:
    def vector() -> CartPoleVectorEnv:
        return CartPoleVectorEnv(num_envs=2)

    config = EnvRunnerConfig(envs_per_runner=2, env_wrappers=TIMED)
    with pytest.raises(EnvironmentFailed, match="makes a CartPoleVectorEnv: let it wrap its own"):
        make_vector_env(config, vector)
    config.vectorize = "native"
    with pytest.raises(ValueError, match="CartPole-v1 has wrappers; use auto, sync or async"):
        make_vector_env(config)


def test_options_that_a_wrapper_does_not_take_are_told() -> None:
    config = EnvRunnerConfig(envs_per_runner=1, env_wrappers=[{"use": "TimeLimit", "steps": 5}])
    with pytest.raises(EnvironmentFailed, match="failed in constructor: TypeError"):
        make_vector_env(config)


class OwnWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    pass


def test_a_class_among_wrappers_is_named_if_other_processes_can_import_it() -> None:
    keys: dict[str, Any] = {"env_wrappers": [OwnWrapper, {"use": OwnWrapper, "k": 2}, "ClipReward"]}
    own_classes(keys)
    name = f"{__name__}:OwnWrapper"
    assert keys["env_wrappers"] == [name, {"use": name, "k": 2}, "ClipReward"]
    script = type("Script", (OwnWrapper,), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match="Script is of a"):
        own_classes({"env_wrappers": [script]})


@pytest.mark.parametrize("entry_point", ["__main__:OfScript", CartPoleEnv])
def test_an_environment_that_a_script_registers_is_there_in_workers(
    entry_point: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "OfScript", CartPoleEnv, raising=False)
    spec = EnvSpec("OfScript-v0", entry_point)
    monkeypatch.setitem(gymnasium.registry, "OfScript-v0", spec)
    config = RunConfig.from_flat({"env": "OfScript-v0"})
    own_code = pack(config, "OfScript-v0", None, {})
    assert is_of_a_script(config)
    monkeypatch.delitem(gymnasium.registry, "OfScript-v0")
    cloudpickle.loads(own_code)
    assert gymnasium.make("OfScript-v0").unwrapped.__class__ is CartPoleEnv


# What an environment needs beside Juggler, and what is said where that is missing.


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


@pytest.mark.slow
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


def seeds_of_a_run(run_seed: int) -> list[int]:
    workers = [
        worker_seed(run_seed, role, index, restarts)
        for role in ("envrunner", "evaluator")
        for index in range(8)
        for restarts in range(2)
    ]
    return [seed for worker in workers for seed in environment_seeds(worker, 64)]


def test_every_environment_of_a_run_and_of_another_has_a_seed_of_its_own() -> None:
    runs = [seeds_of_a_run(run_seed) for run_seed in (0, 1, 7, 12345)]
    assert seeds_of_a_run(7) == runs[2]
    seeds = [seed for run in runs for seed in run]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_vector_of_environments_gets_one_seed() -> None:
    env = NativeScripted([((3, "terminated"),)] * 2, AutoresetMode.NEXT_STEP)
    observations = reset_environments(env, 9)
    alone, _ = Scripted().reset(seed=environment_seeds(9, 2)[0])
    np.testing.assert_array_equal(observations[0], alone)
