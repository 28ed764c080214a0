"""The pages on modules and connectors, and the one for people who come from RLlib, are true."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from pages import ROOT, blocks, links, run_python

from juggler.driver.config import RunConfig
from juggler.runtime.connectors.built_in import BUILT_IN
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.modules.model_config import ModelConfig

GUIDES = ["docs/modules.md", "docs/connectors.md", "docs/from-rllib.md"]


@pytest.mark.parametrize("page", GUIDES)
def test_the_python_of_a_page_runs_as_one_script(page: str, tmp_path: Path) -> None:
    run_python(page, tmp_path)
    assert list((tmp_path / "runs").iterdir()), "it trains something"


@pytest.mark.parametrize("page", ["docs/connectors.md", "docs/from-rllib.md"])
def test_a_file_has_only_keys_that_exist(page: str) -> None:
    (file,) = blocks("toml", page)
    RunConfig.from_flat(tomllib.loads(file))


@pytest.mark.parametrize("page", [*GUIDES, "docs/architecture.md", "docs/life-of-a-batch.md"])
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
    halves = {each.runner_half for each in BUILT_IN.values()}  # nobody asks for these
    for name in BUILT_IN.keys() - halves:
        assert listed[name] == list(BUILT_IN[name].options), name


def test_keys_that_rllibs_are_translated_to_exist() -> None:
    text = (ROOT / "docs/from-rllib.md").read_text()
    known = RunConfig().flat().keys() | {key.name for key in fields(ConnectorsConfig)} | {*BUILT_IN}
    known |= {key.name for key in fields(ModelConfig)}
    for title in ("## Keys of the model", "## Configuration"):
        section = text.partition(title)[2].partition("\n## ")[0]
        rows = [row.split("|") for row in section.splitlines() if row.startswith("| `")]
        assert rows
        for row in rows:
            for key in re.findall(r"`([a-z_]+)(?: = [^`]+)?`", row[2]):
                assert key in known, f"{row[1].strip()} is said to be {key!r}"
