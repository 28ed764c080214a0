"""What a command finds on a machine is wrong or missing, and it says so."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.place import Place, status_of

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


@pytest.mark.slow
def test_a_damaged_or_foreign_checkpoint_is_named(place: Place) -> None:
    run = place.run("train", "cartpole", "--run-dir", "run", "--stop-steps", 20_000)
    assert run.status == 0, run.output
    (good,) = (place.path / "run" / "checkpoints").iterdir()

    for algorithm in ("appo", "ppo"):  # the latter has no key that the run has
        other = place.run("train", "--resume", "run", "--algorithm", algorithm)
        assert other.status != 0
        assert "a resumed run keeps its algorithm" in other.output

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
    assert "was trained in another environment: its observation space is Box([-4.8" in played.output
    assert "Traceback" not in played.output

    record = json.loads((good / "checkpoint.json").read_text())
    del record["sha256"]
    record["counters"]["trained"] += 1
    (good / "checkpoint.json").write_text(json.dumps({**record, "sha256": digest(record)}))
    resumed = place.run("train", "--resume", "run")
    assert resumed.status == 1
    assert len(resumed.output.splitlines()) == 1, resumed.output
    assert "its counters are invalid" in resumed.output

    state = good / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])
    resumed = place.run("train", "--resume", "run")
    assert resumed.status == 1
    assert "none of the checkpoints here is good" in resumed.output
    place.assert_nothing_is_left()
