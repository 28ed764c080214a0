"""What the page on dm_env_rpc tells people to type, works."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib

from support.pages import ROOT, blocks, links

from juggler.cli import COMMANDS
from juggler.cli.arguments import parse
from juggler.driver.config import RunConfig
from juggler.envrunner.dm_env_rpc.options import SimulatorOptions, addresses

PAGE = "docs/dm-env-rpc.md"


def test_commands_have_only_options_that_exist() -> None:
    lines = [line for block in blocks("sh", PAGE) for line in block.splitlines()]
    for line in lines:
        program, name, *options = shlex.split(line)
        if program != "juggler":
            continue
        kind = importlib.import_module(COMMANDS[name][0]).Arguments
        assert isinstance(parse(kind, options, name), kind)
    assert any(line.startswith("juggler") for line in lines)


def test_the_file_has_only_keys_that_exist_and_the_table_has_all() -> None:
    (file,) = blocks("toml", PAGE)
    config = RunConfig.from_flat(tomllib.loads(file)).env_runner
    SimulatorOptions.parse(config.env_kwargs)
    assert addresses(config.env) == ["10.0.0.7:5010"]
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / PAGE).read_text(), re.M)
    assert {*SimulatorOptions.__struct_fields__} <= {*rows}


def test_links_lead_to_files() -> None:
    assert [link for link in links(PAGE) if not link.exists()] == []
