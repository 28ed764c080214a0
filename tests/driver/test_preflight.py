"""Errors before a run has a directory, found in a process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.rehearsing import rehearse

import juggler
from juggler.driver import preflight, start_run
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.driver import StartSettings
from juggler.driver.preflight import PreflightError, _where_it_was
from juggler.driver.reporting import run_directory
from juggler.driver.reporting.run_directory import CONFIG_FILE, RunDirectoryError
from juggler.driver.script_classes import pack
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.modules.import_by_name import ImportFailed, found
from juggler.runtime.wire.spaces import space_from_message

pytestmark = pytest.mark.usefixtures("local_workers")

_GOOD_STEP = "return self.observation_space.sample(), 0.0, False, False, {}"


def _env(body: str, step: str = _GOOD_STEP) -> type[gymnasium.Env[Any, Any]]:
    """An environment class with this constructor and this `step`."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import gymnasium, os, time\n"
        "class Env(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def __init__(self):\n"
        f"        {body}\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return self.observation_space.sample(), {}\n"
        "    def step(self, action):\n"
        f"        {step}\n",
        names,
    )
    made: type[gymnasium.Env[Any, Any]] = names["Env"]
    return made


def _own(env: object) -> bytes:
    packed: bytes = cloudpickle.dumps((env, None, {}))
    return packed


def _config(**keys: Any) -> RunConfig:
    return RunConfig.from_flat({"env": "__main__:Env", **keys})


@pytest.mark.long
def test_an_environment_that_crashes_says_where() -> None:
    with pytest.raises(PreflightError, match="making the environment") as got:
        rehearse(_config(), _own(_env("os.kill(os.getpid(), 11)")))
    assert "in __init__" in got.value.traceback


@pytest.mark.long
def test_an_environment_that_waits_for_ever_is_given_up() -> None:
    config = _config(worker_timeout_seconds=1.5)
    with pytest.raises(PreflightError, match="__main__:Env hangs: it has done nothing") as got:
        rehearse(config, _own(_env("time.sleep(1000)")))
    first, frame = got.value.traceback.splitlines()[:2]
    assert first == "It was here, in the call of the first line:"
    assert frame.endswith("in __init__")
    for frightening in ("Fatal Python error", "Extension modules", "multiprocessing"):
        assert frightening not in got.value.traceback


def test_where_it_was_is_told_in_lines_of_python_alone() -> None:
    """Python 3.14 writes the stack of C below."""
    written = """Fatal Python error: Aborted

Current thread 0x00007fd02b872200 [juggler] (most recent call first):
  File "my_env.py", line 4 in __init__
  File "juggler/driver/rehearsal.py", line 470 in learner_of
  File "juggler/driver/rehearsal.py", line 70 in main

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3", at _Py_DumpStack+0x4a [0x499c1d]
"""
    assert _where_it_was(written).splitlines() == [
        "It was here, in the call of the first line:",
        '  File "my_env.py", line 4 in __init__',
    ]


@pytest.mark.slow
def test_an_environment_that_computes_for_ever_is_given_up() -> None:
    config = _config(hang_seconds=1.5)
    with pytest.raises(PreflightError, match=r"hangs: it has used 1\.5 s of a proc"):
        rehearse(config, _own(_env("while True: pass")))


def test_a_step_that_raises_is_told_at_once() -> None:
    with pytest.raises(PreflightError, match=r"environment 0 .* failed in step") as got:
        rehearse(_config(), _own(_env("pass", "return 1 / 0")))
    assert "in step" in got.value.traceback


@pytest.mark.parametrize("name", ["CartPole-v1", "__main__:Env"])
def test_env_kwargs_that_a_constructor_does_not_take_are_told_without_calls_of_libraries(
    name: str,
) -> None:
    own = _own(_env("pass")) if name == "__main__:Env" else b""
    with pytest.raises(PreflightError, match="got an unexpected keyword argument 'size'") as got:
        rehearse(_config(env=name, env_kwargs={"size": 3}), own)
    assert got.value.traceback == ""


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("observation, float('nan')", "rewards are nan in step 1 after its first reset"),
        ("observation, float('-inf')", "rewards are -inf in step 1 after its first reset"),
        ("observation * float('nan'), 0.0", "observations are nan in step 1 after its first reset"),
    ],
)
def test_a_number_that_is_not_finite_is_told_before_the_run_with_its_place(
    step: str, told: str
) -> None:
    gives = f"observation = self.observation_space.sample(); return {step}, False, False, {{}}"
    with pytest.raises(PreflightError, match=r"environment 0 .*failed in step") as got:
        rehearse(_config(), _own(_env("pass", gives)))
    assert told in str(got.value)
    assert "_observations" not in str(got.value)


def test_a_number_of_a_reset_that_is_not_finite_is_told_as_one_of_the_reset() -> None:
    broken = "self.observation_space.sample = lambda: numpy.full(3, numpy.inf, numpy.float32)"
    with pytest.raises(PreflightError, match="failed in reset: observations are inf"):
        rehearse(_config(), _own(_env(f"import numpy; {broken}")))


_FIVE = np.array([5, 1])


@pytest.mark.parametrize(
    ("space", "inside", "beyond", "told"),
    [
        (spaces.Discrete(4, start=1), 4, 0, "holds 0, which is not in its"),
        (spaces.MultiDiscrete([6, 3]), _FIVE, _FIVE + 1, "holds 6, which is not in its space Mult"),
        (
            spaces.Dict(a=spaces.Discrete(4), b=spaces.Box(0, 1, (1,))),
            {"a": 3, "b": np.full(1, 0.5, np.float32)},
            {"a": -1, "b": np.full(1, 0.5, np.float32)},
            "at 'a' holds -1, which is not in",
        ),
    ],
)
@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_observation_outside_of_its_space_is_told_with_the_call_that_gave_it(
    space: Any, inside: Any, beyond: Any, told: str, call: str
) -> None:
    class Env(gymnasium.Env):
        observation_space = space
        action_space = spaces.Discrete(2)

        def reset(self, **_):
            return beyond if call == "reset" else inside, {}

        def step(self, _):
            return beyond if call == "step" else inside, 0.0, False, False, {}

    with pytest.raises(PreflightError, match=r"environment 0 .* failed in") as got:
        rehearse(_config(), _own(Env))
    assert f"failed in {call}: its observation {told}" in str(got.value)


_IMAGE = spaces.Dict(image=spaces.Box(0, 1, (2, 3)), place=spaces.Box(-np.inf, np.inf, (1,)))
_BRIGHT = np.zeros((2, 3), np.float32)
_BRIGHT[1, 2] = 255


@pytest.mark.parametrize(
    ("space", "inside", "beyond", "told"),
    [
        (
            spaces.Box(-1, np.inf, (2,)),
            np.array([-1.000001, 1e30], np.float32),  # rounded
            np.array([0, -1.5], np.float32),
            "one has -1.5 at [1], and the",
        ),
        (
            _IMAGE,
            {"image": _BRIGHT / 255, "place": np.full(1, 9.0, np.float32)},
            {"image": _BRIGHT, "place": np.full(1, 9.0, np.float32)},
            "one at 'image' has 255 at [1, 2]",
        ),
        (spaces.Box(0, 9, (), np.uint8), np.uint8(9), np.uint8(10), "one has 10, and the bounds"),
    ],
)
@pytest.mark.parametrize("call", ["reset", "step", ""])
def test_a_number_outside_of_its_box_is_a_warning_said_once_with_its_place(
    space: Any, inside: Any, beyond: Any, told: str, call: str
) -> None:
    class Env(gymnasium.Env):
        observation_space = space
        action_space = spaces.Discrete(2)

        def reset(self, **_):
            return beyond if call == "reset" else inside, {}

        def step(self, _):
            return beyond if call else inside, 0.0, False, False, {}

    warned: list[str] = []
    (group,) = rehearse(_config(), _own(Env), warn=warned.append)
    assert space_from_message(group.observation) == space
    if call:
        (text,) = warned
        assert text.startswith("environment 0 (__main__:Env) gives observations outside its")
        assert f"after {call}, {told}" in text
    else:
        assert not warned


# A run directory without write permission is reported before anything starts.


BOOKS: dict[str, Any] = {
    "sampled": 100,
    "trained": 100,
    "dropped": {},
    "in_flight": 0,
    "lost_unreported": 0,
    "next_id": 12,
    "wall_time": 1.5,
    "episodes": 0,
    "returns": [],
    "lengths": [],
}


def _protected(**_: object) -> NoReturn:
    raise PermissionError(13, "Permission denied", "somewhere")


def _rehearsed(*_: object) -> NoReturn:
    raise AssertionError("the run was rehearsed first")


@pytest.mark.parametrize("how", ["resumed", "started over"])
def test_a_run_that_may_not_write_in_its_directory_is_told_so_before_its_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / CONFIG_FILE).write_text('env = "CartPole-v1"\n')
    monkeypatch.setattr(run_directory, "TemporaryDirectory", _protected)  # root may do anything
    monkeypatch.setattr(start_run, "rehearse", _rehearsed)
    config = RunConfig.from_flat({"env": "CartPole-v1", "run_dir": str(tmp_path)})
    checkpoint = Checkpoint((1, 7), {}, {}, BOOKS, config.flat(), {})
    go_on: dict[str, Callable[[], object]] = {
        "resumed": lambda: start_run.resume_run(tmp_path, checkpoint, config, StartSettings(0.0)),
        "started over": lambda: start_run.start_run(config, [], StartSettings(0.0), over=True),
    }
    told = f"^cannot write in the run directory {tmp_path}: Permission denied$"
    with pytest.raises(RunDirectoryError, match=told):
        go_on[how]()


# Scripts that start a run at their top level, that a run imports, or that it cannot send.


ENVIRONMENT = """
import juggler
from support.scripted_environments import Scripted


class Own(Scripted):
    pass

"""
SENTENCE = r'file itself is run: if __name__ == "__main__": juggler\.train'


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module with an environment and a last line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"unguarded_{abs(hash(request.param))}"
    (tmp_path / f"{name}.py").write_text(ENVIRONMENT + request.param.format(name))
    return name


@pytest.mark.parametrize(
    "script",
    [
        'juggler.train("cartpole")',
        'juggler.start("cartpole")',
        'juggler.train_seeds("cartpole", seeds=2)',
        'juggler.sweep("cartpole", space={{"lr": "1e-4..1e-2"}}, stop_steps=1000)',
    ],
    indirect=True,
)
def test_what_a_run_imports_starts_nothing(script: str, tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match=rf"{script} starts a run whenever.*{SENTENCE}"):
        found(f"{script}:Own", "module")
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "__pycache__"] == [".py"]


@pytest.mark.slow
@pytest.mark.parametrize("script", ['juggler.train(env="{}:Own")'], indirect=True)
def test_a_run_of_a_script_without_a_guard_is_told_before_it_begins(
    script: str, tmp_path: Path
) -> None:
    with pytest.raises(juggler.ConfigError, match=rf"{script} starts a run whenever.*{SENTENCE}"):
        juggler.train(env=f"{script}:Own", stop_steps=100, progress="off")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "script",
    ["from juggler.runtime.importing import must_not_be_imported\nmust_not_be_imported()"],
    indirect=True,
)
def test_a_module_that_the_program_itself_imports_may_start_a_run(script: str) -> None:
    __import__(script)


LOCK = threading.Lock()


class Guarded(gymnasium.Env[Any, Any]):
    def reset(self, **_: Any) -> Any:
        with LOCK:
            return 0, {}


def _guarded() -> Any:
    return LOCK


@pytest.mark.parametrize("env", [Guarded, _guarded])
def test_what_cannot_be_sent_to_workers_is_named(env: Any, request: pytest.FixtureRequest) -> None:
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # as of a script
    request.addfinalizer(lambda: cloudpickle.unregister_pickle_by_value(here))
    with pytest.raises(ConfigError, match=rf"env = {env.__name__} cannot be sent.*`LOCK`, a lock"):
        pack(RunConfig(), env, None, {})


def test_a_forkserver_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, reports = threading.Event(), list[str]()
    monkeypatch.setattr(preflight.WorkerProgram, "start", lambda *_: hangs.wait(60))
    monkeypatch.setattr(preflight, "forkserver_pid", os.getpid)
    monkeypatch.setattr(preflight, "_LOOK_SECONDS", 0.0)
    idle = "it has done nothing for 60 s (worker_timeout_seconds)"
    answers = iter(["", idle])
    monkeypatch.setattr(preflight._Progress, "problem", lambda _: next(answers))
    with pytest.raises(PreflightError, match="the forkserver does not answer: it has done nothing"):
        preflight._started(cast(Any, None), RunConfig().driver, reports.append)
    hangs.set()
    assert reports == ["importing torch"] * 2
