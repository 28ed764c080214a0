"""What the README and the configuration page tell people to type, works."""

from __future__ import annotations

import importlib
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from support.pages import ROOT, blocks, links, script

from juggler.cli import COMMANDS
from juggler.cli.arguments import parse
from juggler.driver.config import RunConfig


def commands() -> list[str]:
    pages = ("README.md", "docs/configuration.md", "docs/operations.md", "docs/security.md")
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


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md", "docs/environments.md"])
def test_a_file_has_only_keys_that_exist(page: str) -> None:
    files = blocks("toml", page)
    assert files
    for file in files:
        RunConfig.from_flat(tomllib.loads(file))


def test_the_python_snippets_run(tmp_path: Path, run_python: Callable[..., str]) -> None:
    assert len(blocks("python", "README.md")) == 3
    run_python(script("README.md", tmp_path))
    runs = {path.name.partition("-")[0] for path in (tmp_path / "runs").iterdir()}
    assert runs == {"CartPole", "Thermostat"}


def test_links_lead_to_files() -> None:
    targets = links("README.md")
    assert ROOT / "docs/processes.svg" in targets
    assert [link for link in targets if not link.exists()] == []
