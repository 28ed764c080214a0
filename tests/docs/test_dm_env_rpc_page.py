"""What the page on dm_env_rpc tells people to type, works."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest
from support.pages import ROOT, blocks, links

from juggler.cli import COMMANDS
from juggler.cli.arguments import parse
from juggler.driver.config import RunConfig
from juggler.envrunner.dm_env_rpc.options import SimulatorOptions, addresses
from juggler.envrunner.dm_env_rpc.server import GymServer

PAGE = "docs/dm-env-rpc.md"


def test_commands_have_only_options_that_exist() -> None:
    lines = [line for block in blocks("sh", PAGE) for line in block.splitlines()]
    for line in lines:
        _, name, *options = shlex.split(line)
        kind = importlib.import_module(COMMANDS[name][0]).Arguments
        assert isinstance(parse(kind, options, name), kind)
    assert len(lines) == 5


def test_the_file_has_only_keys_that_exist_and_the_table_has_all() -> None:
    (file,) = blocks("toml", PAGE)
    config = RunConfig.from_flat(tomllib.loads(file)).env_runner
    SimulatorOptions.parse(config.env_kwargs)
    assert addresses(config.env) == ["10.0.0.7:5010"]
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / PAGE).read_text(), re.M)
    assert {*SimulatorOptions.__struct_fields__} <= {*rows}


@pytest.mark.long
def test_the_python_runs_beside_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., str]
) -> None:
    (code,) = blocks("python", PAGE)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = GymServer(functools.partial(gymnasium.make, "CartPole-v1"), "127.0.0.1:0")
    script = tmp_path / "client.py"
    script.write_text(code.replace("127.0.0.1:5010", server.address))
    assert "array(" in run_python(script)
    assert server.close()


def test_links_lead_to_files() -> None:
    assert [link for link in links(PAGE) if not link.exists()] == []
