"""The page on leagues is true."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from support.pages import ROOT, blocks, script

from juggler.driver.config import RunConfig
from juggler.driver.league.builders import BUILDERS
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.rllib import Rllib
from juggler.driver.shipped import shipped_configs
from juggler.learner.algorithms.impala.config import ImpalaConfig

PAGE = "docs/leagues.md"


def test_its_python_trains_a_league_with_a_builder_of_ones_own(
    tmp_path: Path, run_shortly: Callable[..., str]
) -> None:
    said = run_shortly(script(PAGE, tmp_path), stop_steps=4_000)  # enough for a copy of the main
    assert "column (main-0-v0): return " in said
    (run,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in (run / "frozen").iterdir() if path.name.startswith("main-0")]


def test_its_tables_have_every_builder_and_options_that_exist() -> None:
    text = (ROOT / PAGE).read_text()
    cells = re.findall(r"^\| `(\w+)` \|", text.partition("## Coming from")[0], re.M)
    assert {*cells} - {"builder"} == BUILDERS.keys()
    (table,) = blocks("toml", PAGE)
    RunConfig.from_flat(tomllib.loads(table))
    own = {each.name for kind in (Rllib, LeagueConfig, ImpalaConfig) for each in fields(kind)}
    said = text.partition("## Coming from")[2].partition("##")[0]
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|.*\|(.*)\|$", said, re.M)))
    assert {name for name in named if name.islower() and name != "historical"} <= own


def test_the_leagues_that_it_names_ship() -> None:
    text = (ROOT / PAGE).read_text()
    assert {*re.findall(r"juggler train ([\w-]+-league)", text)} == {
        name for name in shipped_configs() if name.endswith("-league")
    }
