"""The stack of `juggler launch swarm`, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.place import options_of

from juggler.cli import driver, launch
from juggler.cli.arguments import parse

COMMON = Path(__file__).resolve().parents[2] / "docker" / "common.yaml"
#: What Swarm does otherwise, or not at all: see the comments in the stack.
_OTHERWISE = {"image", "secrets", "tmpfs", "security_opt", "restart", "healthcheck"}
#: A volume would be left behind on each node, so that a stack has no directory to share.
_COMPOSE_ONLY = {"JUGGLER_SHARED_DIR"}


def _stack(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert launch.run(["swarm", "--dry-run", *options]) == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return found


def test_services_have_what_the_compose_files_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stack = _stack(
        capsys, "cartpole", "--image", "lab/juggler:3", "--env-runners", "7", "--evaluators", "2"
    )
    common = yaml.safe_load(COMMON.read_text())["services"]["juggler"]
    assert common.pop("volumes") == ["shared:/shared"]
    for name in _COMPOSE_ONLY:
        del common["environment"][name]
    for name, service in stack["services"].items():
        assert service["image"] == "lab/juggler:3"
        assert [each["target"] for each in service["secrets"]] == common["secrets"]
        assert {"type": "tmpfs", "target": common["tmpfs"][0]} in service["volumes"]
        for key in common.keys() - _OTHERWISE:
            assert service[key] == common[key], (name, key)
    assert stack["services"]["driver"]["deploy"]["restart_policy"]["condition"] == common["restart"]
    replicas = {name: each["deploy"].get("replicas") for name, each in stack["services"].items()}
    assert replicas == {"driver": None, "learner": 1, "envrunner": 7, "evaluator": 2}
    assert not list(tmp_path.iterdir())


def test_commands_of_the_services_are_what_juggler_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run.toml").write_text('env = "CartPole-v1"\n')
    options = ["my run.toml", "--run-dir", "a $run", "--"]
    stack = _stack(capsys, *options, "--lr", "1e-3")
    words = {
        # As Docker reads it, which puts variables where there is one dollar.
        name: [word.replace("$$", "$") for word in each["command"]]
        for name, each in stack["services"].items()
    }
    assert words["driver"][:2] == ["driver", "/run.toml"]
    assert words["driver"][words["driver"].index("--run-dir") + 1] == str(tmp_path / "a $run")
    for role in ("learner", "envrunner", "evaluator"):
        assert words[role][0] == role
        assert parse(options_of(role), words[role][1:], role).driver == "driver:5005"
    given = driver.read_arguments(["my run.toml", *words["driver"][2:]]).arguments
    assert given.bind == "0.0.0.0:5005"
    assert given.run.driver.num_learners == 1
