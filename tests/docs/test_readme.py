"""What the README and the pages on runs tell people to type works."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from support.pages import ROOT, blocks, links, script

from juggler.cli import COMMANDS
from juggler.cli.arguments import parse
from juggler.driver.config import RunConfig

SNIPPETS = {"README.md": 1, "docs/getting-started.md": 3}
RUNS = ["CartPole", "CartPole", "CartPole", "Thermostat"]  # the first one is the README's


def commands() -> list[str]:
    pages = (
        *SNIPPETS,
        "docs/configuration.md",
        "docs/datasets.md",
        "docs/leagues.md",
        "docs/operations.md",
        "docs/security.md",
        "docs/sweeps.md",
    )
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


@pytest.mark.parametrize(
    "page", ["docs/getting-started.md", "docs/configuration.md", "docs/environments.md"]
)
def test_a_file_has_only_keys_that_exist(page: str) -> None:
    files = blocks("toml", page)
    assert files
    for file in files:
        RunConfig.from_flat(tomllib.loads(file))


def test_the_python_snippets_run(tmp_path: Path, run_shortly: Callable[..., str]) -> None:
    assert {page: len(blocks("python", page)) for page in SNIPPETS} == SNIPPETS
    for page in SNIPPETS:
        run_shortly(script(page, tmp_path))
    runs = sorted(path.name.partition("-")[0] for path in (tmp_path / "runs").iterdir())
    assert runs == RUNS


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/README.md"])
def test_links_lead_to_files(page: str) -> None:
    targets = links(page)
    assert len(targets) > 10
    assert [link for link in targets if not link.exists()] == []


def test_contributors_are_led_to_files_that_exist() -> None:
    named = re.findall(
        r"\b(?:tests|examples|benchmarks|juggler|docs)/[\w/.-]*\w",
        (ROOT / "CONTRIBUTING.md").read_text(),
    )
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_index_and_the_readme_show_every_page() -> None:
    index = {link.resolve() for link in links("docs/README.md")}
    assert {*(ROOT / "docs").glob("*.md")} - {ROOT / "docs/README.md"} <= index
    assert ROOT / "docs/processes.svg" in links("README.md")


def test_the_glossary_is_in_alphabetical_order() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs/glossary.md").read_text(), re.M)
    assert len(rows) > 40
    assert rows == sorted(rows, key=str.lower)
