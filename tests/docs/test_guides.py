"""The pages on modules and connectors, and the guides, are true."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from support.pages import ROOT, TO_THE_END, blocks, links, script

import juggler
from juggler.driver.config import RunConfig
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.runtime.connectors.config import BUILT_IN, ConnectorsConfig
from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.other_libraries import MODEL_KEYS, RUN_KEYS

FROM_ELSEWHERE = [
    "docs/from-cleanrl.md",
    "docs/from-rllib.md",
    "docs/from-stable-baselines3.md",
    "docs/from-acme.md",
]
ABOUT_RUNS = [
    "README.md",
    "docs/architecture.md",
    "docs/cores.md",
    "docs/datasets.md",
    "docs/dm-env-rpc.md",
    "docs/docker.md",
    "docs/environments.md",
    "docs/external-simulators.md",
    "docs/getting-started.md",
    "docs/glossary.md",
    "docs/leagues.md",
    "docs/learners.md",
    "docs/life-of-a-batch.md",
    "docs/multi-agent.md",
    "docs/operations.md",
    "docs/python.md",
    "docs/run-directory.md",
    "docs/security.md",
    "docs/sweeps.md",
]
BENCHMARKS = sorted(f"benchmarks/{page.name}" for page in (ROOT / "benchmarks").glob("*.md"))
GUIDES = ["docs/modules.md", "docs/connectors.md", "docs/policies.md", *FROM_ELSEWHERE]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param("docs/getting-started.md", marks=pytest.mark.slow),
        *(
            pytest.param(page, marks=pytest.mark.long)
            for page in ["README.md", "docs/sweeps.md", *GUIDES]
            if blocks("python", page)
        ),
    ],
)
def test_the_python_of_a_page_runs_as_one_script_and_reaches_what_it_says(
    page: str, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    print(run_python(script(page, tmp_path, before=TO_THE_END), timeout=1800))
    assert list((tmp_path / "runs").iterdir()), "it trains something"


@pytest.mark.parametrize("page", ["docs/connectors.md", "docs/from-rllib.md", "docs/from-acme.md"])
def test_a_file_has_only_keys_that_exist(page: str) -> None:
    (file,) = blocks("toml", page)
    RunConfig.from_flat(tomllib.loads(file))


@pytest.mark.parametrize("page", FROM_ELSEWHERE)
def test_a_moved_configuration_gives_the_connectors_that_a_run_would_choose(page: str) -> None:
    text = (ROOT / page).read_text()
    (file, *_) = [*blocks("toml", page), ""]
    moved = tomllib.loads(file)
    assert moved.get("connectors") == {} or '"connectors": {}' in text


def test_what_is_called_missing_is_missing() -> None:
    missing = (ROOT / "docs/from-rllib.md").read_text().partition("## Not supported")[2]
    (line,) = [each for each in missing.splitlines() if each.startswith("- Offline algorithms")]
    there = {name.upper() for name, algorithm in ALGORITHMS.items() if algorithm.offline}
    assert set(re.findall(r"\b[A-Z\d]{2,}\b", line)) == there
    schedules = RunConfig.from_flat({"algorithm": "td3"}).learner.schedules()
    assert ("noise schedules" in missing) == ("exploration_noise" not in schedules)
    assert ("loop of your own" in missing) == (not hasattr(juggler, "start"))


@pytest.mark.parametrize("page", [*GUIDES, *ABOUT_RUNS, *BENCHMARKS])
def test_links_lead_to_files_and_headings(page: str) -> None:
    assert [link for link in links(page) if not link.exists()] == []
    for target, heading in re.findall(
        r"\]\((?!https?:)([^)#]*)#([^)]+)\)", (ROOT / page).read_text()
    ):
        other = (ROOT / page).parent / target if target else ROOT / page
        titles = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
        slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert heading in slugs, f"{page} leads to #{heading} of {other.name}"


def test_the_page_on_connectors_has_every_one_that_ships_with_its_options() -> None:
    text = (ROOT / "docs/connectors.md").read_text()
    rows = [row.split("|") for row in text.splitlines() if row.startswith("| `")]
    listed = {row[1].strip(" `"): re.findall(r"`(\w+)`", row[2]) for row in rows}
    halves = {each.runner_half for each in BUILT_IN.values()}  # no guide shows these
    for name in BUILT_IN.keys() - halves:
        assert listed[name] == list(BUILT_IN[name].options), name


TABLES = [
    ("docs/from-rllib.md", "Keys"),
    ("docs/from-cleanrl.md", "Arguments"),
    ("docs/from-stable-baselines3.md", "Arguments"),
    ("docs/from-stable-baselines3.md", "policy_kwargs"),
    ("docs/from-acme.md", "Hyper-parameters"),
]


@pytest.mark.parametrize(("page", "title"), TABLES)
def test_keys_that_others_are_translated_to_exist(page: str, title: str) -> None:
    known = {key for name in ALGORITHMS for key in RunConfig.from_flat({"algorithm": name}).flat()}
    known |= {key.name for key in fields(ConnectorsConfig)} | {*BUILT_IN}
    known |= {option for each in BUILT_IN.values() for option in each.options}
    known |= {key.name for key in fields(ModelConfig)}
    for theirs, keys in translated(page, title):
        assert keys <= known, f"{theirs} is said to be {keys - known}"


def test_keys_of_other_libraries_are_answered_as_the_pages_translate_them() -> None:
    assert not RUN_KEYS.keys() & MODEL_KEYS.keys()
    answers = RUN_KEYS | MODEL_KEYS
    known = {key for name in ALGORITHMS for key in RunConfig.from_flat({"algorithm": name}).flat()}
    known |= {key.name for key in fields(ModelConfig)} | {*BUILT_IN}
    seen = set()
    for page, title in TABLES:
        for theirs, keys in translated(page, title):
            for name in re.findall(r"`([a-z][a-z0-9_]+)[`=]", theirs):
                if "×" in theirs or (name in known and name not in answers):
                    continue  # a product of two, or the same name here
                seen.add(name)
                assert name in answers, f"{page}: {name}"
                answered = set(re.findall(r"\w+", answers[name].partition("=")[0])) & known
                if not answers[name].startswith("none"):
                    assert answered, name
                    assert answered <= keys, f"{page}: {name} is {keys}, and {answers[name]}"
    pages = "".join((ROOT / page).read_text() for page in FROM_ELSEWHERE)
    for name in answers.keys() - seen:  # of other tables
        assert re.search(rf"\b{name}\b", pages), f"no page has {name}"


def test_a_key_of_ours_is_never_taken_for_one_of_another_library() -> None:
    for algorithm in ALGORITHMS:
        assert not RunConfig.from_flat({"algorithm": algorithm}).flat().keys() & RUN_KEYS.keys()
    assert not {key.name for key in fields(ModelConfig)} & MODEL_KEYS.keys()


@pytest.mark.usefixtures("local_workers")
def test_metrics_that_others_are_translated_to_are_written(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    result = juggler.train("cartpole", algorithm="ppo", stop_steps=1, run_dir=run_dir)
    line = json.loads((result.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    known = {*line, *line["modules"]["default"], *RunConfig(learner=PpoConfig()).flat()}
    for page in ("docs/from-cleanrl.md", "docs/from-stable-baselines3.md"):
        for theirs, keys in translated(page, "Metrics"):
            assert keys <= known, f"{theirs} is said to be {keys - known}"


def translated(page: str, title: str) -> list[tuple[str, set[str]]]:
    """A table's rows: foreign names, and the keys that they match here."""
    section = (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in section.splitlines() if row.startswith("| ")]
    assert len(rows) > 3, f"{title} has a table"
    return [(row[1].strip(), set(re.findall(r"`([a-z_]+)(?: = [^`]+)?`", row[2]))) for row in rows]
