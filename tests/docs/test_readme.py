"""Commands in the README and the pages on runs work."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from support.pages import ROOT, blocks, links, script
from support.place import REPOSITORY, options_of

from juggler.cli.arguments import parse
from juggler.driver.config import RunConfig
from juggler.driver.core import events
from juggler.driver.core.ledger import Ledger
from juggler.learner.core.learner_core import LearnerCore
from juggler.learner.optim.config import OWN_KEYS

SNIPPETS = {"README.md": 1, "docs/getting-started.md": 1}
RUNS = ["CartPole", "Thermostat"]  # the first one is the README's


def commands() -> list[str]:
    pages = (
        *SNIPPETS,
        "docs/datasets.md",
        "docs/dm-env-rpc.md",
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
    kind = options_of(name)
    if options == ["--help"]:
        with pytest.raises(SystemExit, match="0"):
            parse(kind, options, name)
    else:
        assert isinstance(parse(kind, options, name), kind)


@pytest.mark.parametrize("page", ["docs/getting-started.md", "docs/environments.md"])
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


PAGE = "docs/cores.md"


def test_its_python_runs_as_one_script(tmp_path: Path, run_shortly: Callable[..., str]) -> None:
    assert "'grad_norm'" in run_shortly(script(PAGE, tmp_path))


def test_it_names_every_method_of_a_core() -> None:
    methods = inspect.getmembers(LearnerCore, inspect.isfunction)
    named = set(re.findall(r"`(\w+)\(", (ROOT / PAGE).read_text()))
    assert {name for name, _ in methods if not name.startswith("_")} <= named


LEARNERS = "docs/learners.md"


def test_its_python_runs_as_one_script_and_is_refused_as_it_says(
    tmp_path: Path, run_shortly: Callable[..., str]
) -> None:
    said = run_shortly(script(LEARNERS, tmp_path))
    messages = re.findall(r"^ *refused\(.*\n *# (.*)$", "\n".join(blocks("python", LEARNERS)), re.M)
    assert len(messages) == 4
    for message in messages:
        assert message.removesuffix("…").rstrip() in said


def test_it_names_every_key_of_an_optimizer() -> None:
    text = " ".join((ROOT / LEARNERS).read_text().split())
    keys = text.partition("may override the run's keys")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", keys)) == set(OWN_KEYS)


# The page about the life of a batch lists every end that the driver's books know.


LIFE_OF_A_BATCH = (REPOSITORY / "docs" / "life-of-a-batch.md").read_text()
ENDS = LIFE_OF_A_BATCH.partition("## Every end")[2]

#: What books no end: a batch begins, or goes on; or the books are looked at.
NO_ENDS = {"request", "use", "in_flight", "counters", "check"}
#: What happens to workers and groups, and to no batch.
OF_NO_BATCH = {
    "RunnerJoined",
    "RunnerPlays",
    "LearnerJoined",
    "StartWithFewer",
    "PeersMet",
    "RebuildGroup",
    "StartNextTurn",
    "StopRequested",
}


def test_every_method_of_the_ledger_that_ends_a_batch_or_takes_an_end_back_is_there() -> None:
    methods = {name for name in vars(Ledger) if not name.startswith("_")}
    assert methods >= NO_ENDS
    assert {name for name in methods - NO_ENDS if f"`Ledger.{name}`" not in ENDS} == set()


def test_every_event_of_a_batch_is_there() -> None:
    told = {each.__name__ for each in get_args(events.Event)}
    assert told >= OF_NO_BATCH
    assert {name for name in told - OF_NO_BATCH if f"`{name}`" not in ENDS} == set()


def test_every_reason_for_a_drop_is_there() -> None:
    assert {reason for reason in events.DROP_REASONS if f"dropped: `{reason}`" not in ENDS} == set()


@cache
def definitions() -> dict[str, set[str]]:
    """By file of the package, its functions, classes and methods."""
    defined: dict[str, set[str]] = {}
    for path in (ROOT / "juggler").rglob("*.py"):
        names = defined.setdefault(path.relative_to(ROOT / "juggler").as_posix(), set())
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.FunctionDef | ast.ClassDef):
                names.add(each.name)
            if isinstance(each, ast.ClassDef):
                found = (part.name for part in each.body if isinstance(part, ast.FunctionDef))
                names |= {f"{each.name}.{name}" for name in found}
    return defined


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/life-of-a-batch.md"])
def test_every_method_and_file_that_is_named_is_there(page: str) -> None:
    """Follow each `Class.method`, `file.py` and "`name` in `file.py`" into the package."""
    defined = definitions()
    text = (ROOT / page).read_text()
    methods = set(re.findall(r"`(_?[A-Z]\w+\.\w+)`", text))
    assert "Impala.loss" in methods
    assert methods - set().union(*defined.values()) == set()
    assert set(re.findall(r"`(\w+/[\w/]+\.py)`", text)) - defined.keys() == set()
    places = re.findall(r"`([\w.]+)` in `(\w+/[\w/]+\.py)`", text)
    assert len(places) > 5
    assert [(name, file) for name, file in places if name not in defined[file]] == []
