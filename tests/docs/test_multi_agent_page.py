"""The page on many agents names real environments and keys."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from support.pages import ROOT, blocks, script

from juggler.driver.agent_tables import with_agents
from juggler.driver.config import RunConfig
from juggler.driver.config_files import shipped_configs
from juggler.driver.league.builders import BUILDERS, Rllib
from juggler.driver.league.config import LeagueConfig
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.options import SimulatorOptions, addresses
from juggler.envrunner.multi_agent.make_envs import has_several_agents, make_multi_agent_envs
from juggler.learner.algorithms.impala import ImpalaConfig

PAGE = "docs/multi-agent.md"
#: Without the name that stands for a class of the reader's.
NAMES = re.findall(r'^\| `"((?!my_package).+?)"` \|', (ROOT / PAGE).read_text(), re.M)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_the_page_makes_several_agents(name: str) -> None:
    if name.startswith("envpool:"):
        pytest.importorskip("envpool", reason="needs juggler[envpool]")
    if name.startswith("tuples:rware:"):
        pytest.importorskip("rware", reason="needs rware")
    config = EnvRunnerConfig(env=name, envs_per_runner=2)
    assert has_several_agents(config)
    envs = make_multi_agent_envs(config)
    assert len(envs.agents) > 1
    envs.close()


def test_the_files_on_the_page_have_only_keys_that_exist() -> None:
    configs = [RunConfig.from_flat(tomllib.loads(file)) for file in blocks("toml", PAGE)]
    assert [config.env_runner.env for config in configs] == [
        "chase:Chase",
        "pettingzoo:mpe2/simple_tag_v3",
        "chase:Chase",
        "chase:Chase",
        "chase:Chase",
        "pettingzoo:mpe2/simple_spread_v3",
    ]
    for config in configs:
        config.agents.validate()
    assert (configs[3].module_ids, configs[3].others) == (("hunter",), ("old_prey", "random"))
    assert configs[5].critics_see == ("state",)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_guide_leads_to_two_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., str]
) -> None:
    game, snippet = blocks("python", PAGE)[:2]
    (who_plays,) = (each for each in blocks("python", PAGE) if "def who_plays" in each)
    monkeypatch.chdir(tmp_path)
    Path("chase.py").write_text(game)
    Path("sides.py").write_text(who_plays)
    files = blocks("toml", PAGE)
    for name, file in zip(("chase", "against", "sides"), (files[0], *files[3:5]), strict=True):
        Path(f"{name}.toml").write_text(file)
    typed = "".join(blocks("sh", PAGE)).splitlines()
    typed.append("juggler train sides.toml --run-dir runs/sides")
    assert len(typed) == 7
    for command in typed:
        name, *options = shlex.split(command)
        assert name == "juggler"
        subprocess.run([sys.executable, "-m", name, *options], check=True, timeout=300)
    summary = json.loads(Path("runs/chase/summary.json").read_text())
    modules = summary["by_module"]
    assert modules["hunter"]["episode_return_mean"] > 0.3, "the cat learns to catch"
    assert summary["episode_return_mean"] == 0
    assert modules["hunter"]["updates"] != modules["prey"]["updates"], "another algorithm"
    assert Path("runs/chase/plot.png").exists()
    for name, others in (("against", {"old_prey", "random"}), ("sides", {"old", "random"})):
        summary = json.loads(Path(f"runs/{name}/summary.json").read_text())
        played = {each for each, said in summary["by_module"].items() if "env_steps_played" in said}
        assert played == others
    Path("snippets.py").write_text(snippet)
    played = run_python(tmp_path / "snippets.py", timeout=300).splitlines()[-1]
    assert re.match(r"{'cat': \d+, 'mouse': \d+} {'cat': [01].0, 'mouse': -[01].0}", played)


# The page on leagues is true.


LEAGUES_PAGE = "docs/leagues.md"


def test_its_python_trains_a_league_with_a_builder_of_ones_own(
    tmp_path: Path, run_shortly: Callable[..., str]
) -> None:
    said = run_shortly(
        script(LEAGUES_PAGE, tmp_path), stop_steps=4_000
    )  # enough for a copy of the main
    assert "column (main-0-v0): return " in said
    (run,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in (run / "frozen").iterdir() if path.name.startswith("main-0")]


def test_its_tables_have_every_builder_and_options_that_exist() -> None:
    text = (ROOT / LEAGUES_PAGE).read_text()
    cells = re.findall(r"^\| `(\w+)` \|", text.partition("## Coming from")[0], re.M)
    assert {*cells} - {"builder"} == BUILDERS.keys()
    own_table, of_simulators = map(tomllib.loads, blocks("toml", LEAGUES_PAGE))
    RunConfig.from_flat(own_table)
    found = with_agents(RunConfig.from_flat(of_simulators), ())
    assert found.agent_names == ("player_0", "player_1")
    assert found.module_ids == ("main-0",)
    own = {each.name for kind in (Rllib, LeagueConfig, ImpalaConfig) for each in fields(kind)}
    said = text.partition("## Coming from")[2].partition("##")[0]
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|.*\|(.*)\|$", said, re.M)))
    assert {name for name in named if name.islower() and name != "historical"} <= own


def test_the_leagues_that_it_names_ship() -> None:
    text = (ROOT / LEAGUES_PAGE).read_text()
    assert {*re.findall(r"juggler train ([\w-]+-league)", text)} == {
        name for name in shipped_configs() if name.endswith("-league")
    }


# What the page on dm_env_rpc tells people to type, works.


DM_ENV_RPC_PAGE = "docs/dm-env-rpc.md"


def test_the_file_has_only_keys_that_exist_and_the_table_has_all() -> None:
    (file,) = blocks("toml", DM_ENV_RPC_PAGE)
    config = RunConfig.from_flat(tomllib.loads(file)).env_runner
    SimulatorOptions.parse(config.env_kwargs)
    assert addresses(config.env) == ["10.0.0.7:5010"]
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / DM_ENV_RPC_PAGE).read_text(), re.M)
    assert {*SimulatorOptions.__struct_fields__} <= {*rows}
