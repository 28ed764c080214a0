"""The project that `juggler new` writes."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import status_of

from juggler.driver.given_config import load_config

FILES = {
    *(".gitignore", "README.md", "train.toml", "tests/test_environment.py"),
    *("heat/__init__.py", "heat/environment.py", "heat/module.py"),
}


def new(directory: Path) -> dict[str, str]:
    """The files of a new project, by their names."""
    assert status_of("new", directory) == 0
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in found}


def test_it_is_whole_and_has_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = new(tmp_path / "heat")
    assert files.keys() == FILES
    said = capsys.readouterr().out
    assert {name for name in FILES if f"{tmp_path}/heat/{name}\n" in said} == FILES
    assert "juggler train train.toml" in said
    assert not [name for name, text in files.items() if "my_project" in text]
    for name, text in files.items():
        if name.endswith(".py"):
            ast.parse(text)
    assert "from heat.environment import Thermostat" in files["tests/test_environment.py"]


def test_its_configuration_is_one(tmp_path: Path) -> None:
    new(tmp_path / "heat")
    config = load_config(tmp_path / "heat" / "train.toml")
    assert config.env_runner.env == "heat.environment:Thermostat"
    assert config.module.module == "heat.module:OneTrunk"


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heat").mkdir()
    (tmp_path / "heat" / "thesis.tex").write_text("years of work")
    assert status_of("new", tmp_path / "heat") == 1
    assert "is there, and nothing in it is overwritten" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "heat").iterdir()] == ["thesis.tex"]
    (tmp_path / "living room" / "room").mkdir(parents=True)
    room = tmp_path / "living room" / "room"
    assert status_of("new", room) == 0, "an empty directory is as good as none"
    assert f"cd '{room}'" in capsys.readouterr().out


def test_a_project_is_not_written_again_and_one_within_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = new(tmp_path / "heat")
    monkeypatch.chdir(tmp_path / "heat")
    monkeypatch.syspath_prepend(tmp_path / "heat")  # as commands have it
    capsys.readouterr()
    for same in (".", "../heat"):
        assert status_of("new", same) == 1
        told = f"{same} is a project already: `juggler train train.toml` trains in it"
        assert told in capsys.readouterr().err
    assert status_of("new", "heat") == 1
    assert "heat is there, and nothing in it is overwritten" in capsys.readouterr().err
    assert new(Path("parts/cold")).keys() == {name.replace("heat", "cold") for name in files}
    told = f"parts/cold is within another project, {tmp_path / 'heat'}"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my-project", "such as 'my_project'"),
        ("2fast", "such as 'my_project'"),
        ("class", "such as 'my_project'"),
        ("random", "'random' is the name of another package"),
        ("juggler", "'juggler' is the name of another package"),
        ("tyro", "'tyro' is the name of another package"),
        ("tests", "'tests' is what the project's tests are in"),
        ("runs", "'runs' is what the project's runs are in"),
    ],
)
def test_a_name_that_no_package_can_have_is_told(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("new", tmp_path / name) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_its_commands_and_its_test_work_and_it_is_solved(tmp_path: Path) -> None:
    project = tmp_path / "heat"
    files = new(project)
    (block,) = re.findall(r"^```sh\njuggler train(.*?)^```$", files["README.md"], re.S | re.M)[:1]
    for line in f"juggler train{block}".splitlines():
        _, *command = shlex.split(line, comments=True)
        said = run(project, "-m", "juggler", *command)
        if command[0] == "train":
            assert "solved: return -" in said
    assert (project / "runs" / "first" / "plot.png").exists()
    assert "3 passed" in run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def run(directory: Path, *arguments: str) -> str:
    """A Python program there, without what tests of Juggler are told."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=kept,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
