"""What the README and the configuration page tell people to type, works."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from juggler.cli import COMMANDS
from juggler.cli.arguments import parse
from juggler.driver.config import RunConfig

ROOT = Path(__file__).parents[2]

#: The snippets as they stand would train until solved; here each of them trains for an update.
SHORTLY = """
import juggler
train, resume = juggler.train, juggler.resume
juggler.train = lambda *args, **keys: train(*args, **{**keys, "stop_steps": 1})
juggler.resume = lambda *args, **keys: resume(*args, **{**keys, "stop_steps": 1})
"""


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M)


def commands() -> list[str]:
    pages = ("README.md", "docs/configuration.md")
    lines = [line for page in pages for block in blocks("sh", page) for line in block.splitlines()]
    return [line for line in lines if line.startswith("juggler ")]


@pytest.mark.parametrize("command", commands())
def test_a_command_has_only_options_that_exist(command: str) -> None:
    _, name, *options = shlex.split(command, comments=True)
    kind = importlib.import_module(COMMANDS[name][0]).Arguments
    if options == ["--help"]:
        with pytest.raises(SystemExit, match="0"):
            parse(kind, options, name)
    else:
        assert isinstance(parse(kind, options, name), kind)


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md"])
def test_a_file_has_only_keys_that_exist(page: str) -> None:
    files = blocks("toml", page)
    assert files
    for file in files:
        RunConfig.from_flat(tomllib.loads(file))


def test_the_python_snippets_run(tmp_path: Path) -> None:
    snippets = blocks("python")
    assert len(snippets) == 3
    script = tmp_path / "snippets.py"
    script.write_text("\n".join([SHORTLY, *snippets]))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {path.name.partition("-")[0] for path in (tmp_path / "runs").iterdir()}
    assert runs == {"CartPole", "Thermostat"}


def test_links_lead_to_files() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert "docs/processes.svg" in links
    assert [link for link in links if not (ROOT / link).exists()] == []
