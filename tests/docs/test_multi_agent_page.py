"""The page on many agents names environments that are made, with keys that exist."""

from __future__ import annotations

import re
import tomllib

import pytest
from support.pages import ROOT, blocks

from juggler.driver.config import RunConfig
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.multi_agent.making import has_several_agents, make_multi_agent_envs

PAGE = "docs/multi-agent.md"
#: Without the name that stands for a class of the reader's.
NAMES = re.findall(r'^\| `"((?!my_package).+?)"` \|', (ROOT / PAGE).read_text(), re.M)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_the_page_makes_several_agents(name: str) -> None:
    config = EnvRunnerConfig(env=name, envs_per_runner=2)
    assert has_several_agents(config)
    envs = make_multi_agent_envs(config)
    assert len(envs.agents) > 1
    envs.close()


def test_there_are_names_on_the_page() -> None:
    assert len(NAMES) == 3


def test_the_file_on_the_page_has_only_keys_that_exist() -> None:
    (file,) = blocks("toml", PAGE)
    config = RunConfig.from_flat(tomllib.loads(file)).env_runner
    envs = make_multi_agent_envs(config)
    assert (envs.num_envs, len(envs.agents)) == (64, 4)
