"""Scripts that start a run at their top level, that a run imports, or that it cannot send."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import pytest

import juggler
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.script_classes import pack
from juggler.runtime.modules.by_name import ImportFailed, found

ENVIRONMENT = """
import juggler
from support.scripted_environments import Scripted


class Own(Scripted):
    pass

"""
SENTENCE = r'file itself is run: if __name__ == "__main__": juggler\.train'


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module that begins with an environment, and ends with a given line."""
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
