"""What a command finds on a machine is wrong or missing, and it says so."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
from support.commands import status_of
from support.place import Place, checkpoints, eventually

from juggler.runtime.checkpoints.checkpoint import digest
from juggler.runtime.installing import installing


@pytest.mark.usefixtures("no_forkserver")
def test_a_run_directory_in_use_is_not_written_over(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("mine")
    assert status_of("train", "cartpole", "--run-dir", "run") == 1
    assert "not empty" in capsys.readouterr().err
    assert Path("run/thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("package", "env", "extra"),
    [("Box2D", "LunarLander-v3", "box2d"), ("mujoco", "Hopper-v5", "mujoco")],
)
@pytest.mark.usefixtures("no_forkserver")
def test_a_missing_extra_is_told_before_anything_starts(
    in_a_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    env: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # Python's way to say that it is not there
    assert status_of("train", "--env", env) == 2
    said = capsys.readouterr().err
    assert f"env {env!r} needs the package {package}: {installing(extra)}" in said
    assert list(in_a_directory.iterdir()) == []


@pytest.mark.usefixtures("local_workers")
def test_an_extra_that_is_not_installed_is_named(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process may have imported the package already.
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    assert status_of("train", "hopper") == 2
    said = "".join(capsys.readouterr())
    assert not (in_a_directory / "runs").exists()
    last = said.splitlines()[-1]
    assert f"'Hopper-v5' needs the package mujoco: {installing('mujoco')}" in last
    assert "Traceback" not in said


def test_a_port_in_use_is_named(in_a_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert status_of("driver", "cartpole", "--bind", f"127.0.0.1:{port}") == 1
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said


def test_a_limit_of_open_files_is_named_before_anything_starts(place: Place) -> None:
    limited = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", sys.executable, "-m", "juggler"]
    run = place.start_program([*limited, "train", "cartpole", "--run-dir", "run"])
    assert run.wait(60) == 1, run.output
    assert "a process may have 24 files open at once here" in run.output
    assert len(run.output.splitlines()) == 1, run.output
    assert not (place.path / "run").exists()


@pytest.mark.long
def test_nobody_is_sent_to_a_checkpoint_that_is_gone(place: Place) -> None:
    run = place.start("train", "cartpole", "--run-dir", "run", "--checkpoint-seconds", 1)
    eventually(lambda: checkpoints(place.path / "run"), 60, lambda: run.output)
    (place.path / "run").rename(place.path / "elsewhere")
    place.write("run", "a file")
    run.process.terminate()
    assert run.wait(60) == 1, run.output
    assert "was not written" in run.output
    assert run.output.splitlines()[-1] == "There is no checkpoint to go on from"
    assert "Traceback" not in run.output
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_damaged_or_foreign_checkpoint_is_named(place: Place) -> None:
    run = place.run("train", "cartpole", "--run-dir", "run", "--stop-steps", 20_000)
    assert run.status == 0, run.output
    (good,) = (place.path / "run" / "checkpoints").iterdir()

    for algorithm in ("appo", "ppo"):  # the latter has no key that the run has
        other = place.run("train", "--resume", "run", "--algorithm", algorithm)
        assert other.status != 0
        assert "a run that is resumed keeps its algorithm" in other.output

    truncated = place.path / "truncated" / good.name
    shutil.copytree(good, truncated)
    state = truncated / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])
    played = place.run("evaluate", truncated)
    assert played.status == 1
    assert "state.safetensors" in played.output
    assert "Traceback" not in played.output

    played = place.run("evaluate", good, "--env", "Acrobot-v1")
    assert played.status == 1
    assert "learned in another environment: its observation space is Box([-4.8" in played.output
    assert "Traceback" not in played.output

    record = json.loads((good / "checkpoint.json").read_text())
    del record["sha256"]
    record["counters"]["trained"] += 1
    (good / "checkpoint.json").write_text(json.dumps({**record, "sha256": digest(record)}))
    resumed = place.run("train", "--resume", "run")
    assert resumed.status == 1
    assert len(resumed.output.splitlines()) == 1, resumed.output
    assert "its counters cannot be those of a run" in resumed.output

    state = good / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])
    resumed = place.run("train", "--resume", "run")
    assert resumed.status == 1
    assert "none of the checkpoints here is good" in resumed.output
    place.assert_nothing_is_left()
