"""docs/external-simulators.md, as people would follow it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.gateway_world import AgentsWorld, GatewayWorld
from support.network import free_address
from support.place import first_of
from support.processes import eventually

from juggler.client import connect_agents, play
from juggler.driver.play_checkpoint import evaluate_with_simulators
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.episodes.version import Version

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "external-simulators.md").read_text()


def commands(beginning: str) -> list[str]:
    """Those of the page's block in which one begins so."""
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.S | re.M):
        if any(line.startswith(beginning) for line in block.splitlines()):
            found: list[str] = block.splitlines()
            return found
    raise AssertionError(f"no command begins with {beginning!r}")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A simulator's part of the repository, with a free port."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copytree(
        ROOT / "examples" / "simulators",
        tmp_path / "examples" / "simulators",
        ignore=shutil.ignore_patterns("node_modules"),
    )
    return tmp_path


@pytest.mark.slow
def test_stubs_for_go_are_packages_of_the_module_that_the_command_makes(tmp_path: Path) -> None:
    (block,) = [
        each for each in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.S | re.M) if "go" in each
    ]
    said = tmp_path / "said"
    for program in ("go", "protoc"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@" >> {said}\n')
        (tmp_path / program).chmod(0o700)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-e", "-c", block], check=True, env=path, timeout=60, cwd=ROOT)
    (module,) = re.findall(r"^go mod init (\S+)$", said.read_text(), re.M)
    packages = dict(re.findall(r"M([^ ,=]+\.proto)=([^ ,]+)", said.read_text()))
    protoc = said.read_text().partition("protoc ")[2]
    assert f"--go_opt=module={module}," in protoc
    assert f"--go-grpc_opt=module={module}," in protoc
    assert all(package.startswith(f"{module}/") for package in packages.values())
    assert all((ROOT / "proto" / file).is_file() for file in packages)
    assert all(f" {file}" in protoc for file in packages)


def test_templates_read_seeds_and_parameters_and_dial_without_a_proxy() -> None:
    here = ROOT / "examples" / "simulators"
    templates = [*here.glob("node/*.js"), *here.glob("cpp/*.cc")]
    assert len(templates) == 4
    for template in templates:
        said = re.search(r"(?i)enable_http_proxy'?[:,] 0", template.read_text())
        assert said, f"{template} dials loopback through http_proxy"
        seeds = r"answer.welcome\(\).seed\(\)|\(\{ seed, parameters \} = message.welcome\)"
        assert re.search(seeds, template.read_text())
        changed = r"(actions\(\)|actions|answer)\.parameters(\(\))?;"
        assert re.search(changed, template.read_text())


@contextmanager
def learning(
    command: str, place: Path, steps: int = 1_000_000, said: str = "solved: return"
) -> Iterator[str]:
    """The page's run with simulators, which must end as solved."""
    address = free_address()
    for config in (place / "examples" / "simulators").glob("*.toml"):
        config.write_text(config.read_text().replace("127.0.0.1:5005", address))
    (found,) = [each for each in commands(command) if each.startswith(command)]
    arguments = shlex.split(found.replace("127.0.0.1:5005", address))[1:]
    arguments += ["--run-dir", "run", "--stop-steps", str(steps)]
    output = place / "output"
    with output.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "juggler", *arguments],
            cwd=place,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: "takes simulators at" in output.read_text())
        yield address
        assert run.wait(300) == 0, output.read_text()
        assert said in output.read_text(), output.read_text()
    finally:
        run.kill()
        run.wait()


def tells_speed(place: Path) -> bool:
    """Whether the run has what its simulator told of speed."""
    last = (place / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    speed = json.loads(last)["info"]["speed"]
    return 0 < speed["least"] < speed["mean"] < speed["most"] < 10


def follow(lines: list[str], place: Path, address: str) -> str:
    """Run a block's commands in one shell; return their output."""
    script = "\n".join(["set -e", *lines]).replace("127.0.0.1:5005", address)
    done = subprocess.run(
        ["bash", "-c", script], cwd=place, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_simulator_in_javascript_is_started_and_learned_from(place: Path) -> None:
    assert shutil.which("npm"), "no npm here: apt-get install nodejs npm"
    install, _ = commands("npm install --prefix")
    follow([install], place, "")
    with learning("juggler train examples/simulators/bal", place):
        pass
    assert "ENDED: the gateway leaves" in (place / "run/logs/simulator-0.log").read_text()
    assert tells_speed(place)
    simulator = f"node {place}/examples/simulators/node/simulator.js {{address}}"
    played = evaluate_with_simulators(place / "run", simulator, 20)
    assert len(played.returns) == 20
    assert played.mean > 100


@pytest.mark.slow
@pytest.mark.parametrize("play", first_of(["build/nim/nim", "node nim.js"]))
def test_a_game_for_two_is_learned_from_over_tls(
    place: Path, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(place / "tls", (), 1.0)
    monkeypatch.setenv("JUGGLER_TLS", str(place / "tls"))
    monkeypatch.setenv("JUGGLER_TOKEN", (place / "tls" / "token").read_text().strip())
    *build, last = commands(play)
    if "cmake" in build[0]:
        follow(build, place, "")
        build = []
    nim, ended = "juggler train examples/simulators/nim", "ended (stop_steps)"
    with learning(nim, place, 20_000, ended) as address:
        assert "ENDED: the gateway leaves" in follow([*build, last], place, address)
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert summary["episode_return_mean"] == 0  # what one wins, the other loses
    assert summary["env_steps_trained"] >= 20_000
    assert summary["env_steps_sampled"] == (
        summary["env_steps_trained"] + sum(summary["env_steps_dropped"].values())
    )


@pytest.mark.long
def test_cartpole_in_cpp_is_learned_from(place: Path) -> None:
    install, *build, simulate = commands("apt-get")
    tools = ("cmake", "g++", "pkg-config", "grpc_cpp_plugin", "protoc")
    missing = [tool for tool in tools if not shutil.which(tool)]
    assert not missing, f"{missing} missing: {install}"
    follow(build, place, "")
    with learning("juggler train cartpole", place) as address:
        assert "ENDED: the gateway leaves" in follow([simulate], place, address)
    assert tells_speed(place)


def test_the_game_for_two_in_python_is_played(make_world: Callable[..., AgentsWorld]) -> None:
    scope = page_in_python()
    world = make_world({"row": "rows", "column": "columns"})
    spaces = {name: (scope["box"]([1]), scope["discrete"](3)) for name in ("row", "column")}
    with connect_agents(world.address, spaces):
        world.begin()
    world.learners["columns"].publish(2)  # scissors, and rock for the other
    for _ in range(2):
        world.driver.tell(*world.requests(rows=0, columns=2))
    assert scope["play_rock_paper_scissors"](world.address, 5) == [1.0] * 5
    receipts = world.receipts("rows", "columns")
    assert world.batch("rows").rewards.tolist() == [[1, 1, 1, 1]]
    assert world.batch("columns").rewards.tolist() == [[-1, -1, -1, -1]]
    assert [total for each in receipts.values() for total in each.env_returns] == [0.0] * 4


def page_in_python() -> dict[str, Any]:
    """What the page's Python has defined."""
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M):
        exec(block, scope)
    return scope


async def at_once(simulate: Callable[[str, int], Awaitable[None]], address: str) -> None:
    """Five sessions of seven steps."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(5))
    await asyncio.gather(*(simulate(address, 7) for _ in range(5)))


def test_the_simulators_in_python_play() -> None:
    scope = page_in_python()
    with GatewayWorld(module_of_any_size, rows=1, steps=4) as world:
        world.ask(100)
        scope["simulate"](world.address, 2)
        assert world.count("episodes") == 2
        assert world.count("steps") == 20
        scope["simulate_with_seeds"](world.address, 3)
        assert world.count("episodes") == 5
        before = world.count("steps")
        asyncio.run(at_once(scope["simulate_in_a_loop"], world.address))
        assert world.count("steps") - before == 5 * 6
        scope["simulate_with_numbers"](world.address)
        with world._server.at_work():
            told = world._server.manager.pop_played().infos
        assert told == {"left": [(4.5, 0.0, 9.0)]}
    with GatewayWorld(module_of_any_size, rows=1, steps=4) as world:
        world.ask(1000)
        returns = scope["simulate_cartpole"](world.address)
        assert len(returns) == 2
        assert world.count("steps") == sum(returns)
    with GatewayWorld(module_of_any_size, rows=1, steps=4) as world:
        world.ask(100)
        assert scope["hand_in"](world.address) == 10
        assert world.count("episodes") == 1


@pytest.mark.long
def test_a_simulator_in_python_acts_by_itself() -> None:
    scope = page_in_python()
    with GatewayWorld(module_of_any_size, rows=1, steps=4) as world:
        world.ask(1000)
        scope["simulate_cartpole"](world.address)
        world.keep(Version(1, 0))
        returns = play("CartPole-v1", world.address, mode="local", episodes=2)
        assert len(returns) == 2
        assert world.count("steps_recorded") == sum(returns)


def module_of_any_size(observation_space: Any, action_space: Any) -> Any:
    from juggler.runtime.modules.config import ModuleConfig
    from juggler.runtime.modules.module_specs import build_module

    return build_module(ModuleConfig().module, observation_space, action_space, {})
