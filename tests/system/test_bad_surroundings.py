"""Commands report wrong or missing parts of a machine."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from support.place import status_of

from juggler.runtime.install_commands import installing


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
def test_an_address_for_metrics_that_is_taken_ends_the_command_and_leaves_nothing(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert status_of("train", "cartpole", "--run-dir", "run", "--metrics-bind", address) == 1
    said = capsys.readouterr().err
    assert f"cannot serve metrics on {address}: Address already in use" in said
    assert not Path("run").exists()
