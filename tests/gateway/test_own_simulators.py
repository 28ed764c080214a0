"""Simulators in processes of their own, in any language."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.gateway_world import AgentsWorld, GatewayWorld
from support.network import free_address
from support.place import assert_books_balance, first_of
from support.processes import QUICK, eventually
from support.scripted_agents import Scaled

import juggler
from juggler.client import connect_agents
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.play_checkpoint import evaluate_with_simulators
from juggler.envrunner.config import EnvRunnerConfig
from juggler.gateway import simulators
from juggler.gateway.simulators import SimulatorFailed, Simulators
from juggler.gateway.standalone_gateway import evaluate_with_copies
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.datasets.dataset import Dataset

#: Episodes of five steps; it may stop after some.
SIMULATOR = """
import sys, time
from juggler.client import GatewayError, box, connect_agents, discrete
address, number, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("begins", number, flush=True)
with connect_agents(address, {"one": (box([2]), discrete(3))}) as session:
    for step in range(most):
        session.step({"one": [step, step % 5]})
        if step % 5 == 4:
            session.step(rewards={"one": 1.0}, terminated=True)
    time.sleep(1000)
"""
MANY = 1 << 40


@pytest.fixture
def command(tmp_path: Path) -> str:
    (tmp_path / "simulator.py").write_text(SIMULATOR)
    return f"{sys.executable} {tmp_path / 'simulator.py'} {{address}} {{index}}"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulators, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(simulators, "_LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(simulators, "_POLICY", QUICK)


def of(world: AgentsWorld) -> Any:
    return world.runner._simulators


def pids(world: AgentsWorld) -> dict[str, int]:
    found: dict[str, int] = of(world)._supervisor.pids()
    return found


def heard(world: AgentsWorld, words: str) -> str:
    while words not in (note := world.notes.get(timeout=60.0)):
        pass
    return note


@pytest.mark.usefixtures("soon")
@pytest.mark.slow
def test_copies_play_and_one_that_is_killed_is_started_again(
    make_world: Callable[..., AgentsWorld], command: str
) -> None:
    world = make_world(
        {"*": "all"},
        simulator=f"{command} {MANY}",
        simulators_per_runner=2,
        worker_id="envrunner-3",
    )
    world.begin()
    heard(world, "has the simulator at")
    heard(world, "has the simulator at")
    world.ask("all")
    assert world.receipts("all")["all"].counts["simulator_restarts"] == 0
    before = pids(world)
    assert before.keys() == {"simulator-6", "simulator-7"}
    os.kill(before["simulator-7"], signal.SIGKILL)
    notes = ["simulator-7 (pid", "it did not come back", "has the simulator at"]  # in any order
    while notes:
        note = world.notes.get(timeout=60.0)
        notes = [words for words in notes if words not in note]
    world.ask("all")
    assert world.receipts("all")["all"].counts["simulator_restarts"] == 1
    after: dict[str, int] = eventually(lambda: len(now := pids(world)) == 2 and now)
    assert after["simulator-6"] == before["simulator-6"]
    assert after["simulator-7"] != before["simulator-7"]
    world.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in after.values())


@pytest.mark.usefixtures("soon")
@pytest.mark.slow
def test_a_copy_that_owes_a_message_hangs_and_one_that_waits_for_an_answer_does_not(
    make_world: Callable[..., AgentsWorld], command: str
) -> None:
    world = make_world({"*": "all"}, simulator=f"{command} 7", step_deadline_seconds=20.0)
    world.begin()
    (copy,) = of(world)._copies.values()
    of(world)._deadline = 0.1
    eventually(lambda: copy.seen)
    looks = [of(world)._looked_at]
    while len(looks) < 8:  # it waits for an action of a step that was not requested
        eventually(lambda: of(world)._looked_at != looks[-1])
        looks.append(of(world)._looked_at)
    assert copy.silent == 0.0
    assert of(world).restarts == 0
    world.ask("all", rounds=2)
    assert "it hangs, and is killed" in heard(world, "has sent nothing for")
    assert "killed by SIGKILL. Starting it again" in heard(world, "simulator-0 (pid")
    heard(world, "has the simulator at")


@pytest.mark.usefixtures("soon")
@pytest.mark.slow
def test_a_copy_that_ends_with_the_run_is_neither_reported_nor_started_again() -> None:
    lines: list[str] = []
    command = "sh -c 'exec sleep 100' {address}"
    started = Simulators(command, ["127.0.0.1:1"], 0, "", "", 1.0, lines.append, print)
    try:
        (pid,) = eventually(lambda: started._supervisor.pids().values())
        started.stop_restarting()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not started._supervisor.pids())
    finally:
        started.close()
    assert not lines
    assert not started.restarts


@pytest.mark.usefixtures("soon")
@pytest.mark.slow
def test_one_that_keeps_ending_before_its_first_step_is_an_error(tmp_path: Path) -> None:
    failures: SimpleQueue[BaseException] = SimpleQueue()
    started = Simulators(
        "sh -c 'echo no display for $JUGGLER_TOKEN; exit 4' {address}",
        ["127.0.0.1:1"],
        5,
        str(tmp_path / "logs"),
        "secret",
        1.0,
        lambda text: None,
        failures.put,
    )
    try:
        error = failures.get(timeout=60.0)
    finally:
        started.close()
    assert isinstance(error, SimulatorFailed)
    assert error.lasting
    assert "(the last time: exit code 4, its last output: no display for sec" in str(error)
    log = tmp_path / "logs" / "simulator-5.log"
    assert str(log) in str(error)
    starts = [each for each in log.read_text().splitlines() if " juggler: " in each]
    assert len(starts) == QUICK.quarantine_after - 1
    for number, line in enumerate(starts, 2):
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d juggler: simulator-5 \(pid \d+\)", line)
        assert "ended: exit code 4, " in line
        assert line.endswith(f"Starting it again (start {number})")


@pytest.mark.usefixtures("soon")
@pytest.mark.slow
def test_a_copy_that_ends_right_after_a_few_steps_is_started_again_and_again(
    make_world: Callable[..., AgentsWorld], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulators, "_LOOK_SECONDS", 3600.0)
    (tmp_path / "game.py").write_text(SIMULATOR.replace("time.sleep(1000)", "sys.exit(1)"))
    command = f"{sys.executable} {tmp_path / 'game.py'} {{address}} {{index}} 2"
    world = make_world({"*": "all"}, simulator=command)
    world.begin()
    world.ask("all", rounds=9)
    eventually(lambda: of(world).restarts > QUICK.quarantine_after)


#: Episodes of one step, for which an agent gets the number of its action.
PAYS = """
import sys
from juggler.client import box, connect_agents, discrete
with connect_agents(sys.argv[1], {"one": (box([2]), discrete(3))}) as session:
    while True:
        actions = session.step({"one": [0, 0]})
        session.step(rewards={"one": float(actions["one"])}, terminated=True)
"""


@pytest.mark.slow
def test_copies_play_whole_episodes_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(PAYS)
    command = f"{sys.executable} {tmp_path / 'game.py'} {{address}}"
    config = EnvRunnerConfig(simulator=command, simulators_per_runner=2)

    def parts_of(module_id: str, observed: Any, acted: Any) -> Any:
        connectors, to_env = build_runner_pipelines(ConnectorsConfig.parse({}), observed, acted)
        module = Scaled(connectors.module_observation_space, to_env.action_space, {})
        module.scale.data.fill_({"trained": 2.0}[module_id])
        return module, connectors, to_env

    lines: list[str] = []
    seen: list[int] = []
    played = evaluate_with_copies(
        config,
        {"*": "trained"},
        "",
        parts_of,
        episodes=9,
        seed=0,
        steps_trained=0,
        report=lines.append,
        watch=lambda ended, steps: seen.append(ended),
    )
    assert (played.returns, played.lengths) == ([2.0] * 9, [1] * 9)
    assert played.agent_returns == {("one", "trained"): [2.0] * 9}
    assert seen
    assert not lines


@pytest.mark.usefixtures("soon")
def test_a_gateway_that_starts_simulators_needs_no_address() -> None:
    assert EnvRunnerConfig(simulator="./game {address}").gateway == "127.0.0.1:0"
    assert EnvRunnerConfig(simulator="./game {address}", gateway="unix:/g").gateway == "unix:/g"


@pytest.mark.usefixtures("soon")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ends_by_a_signal_leaves_no_simulator(
    tmp_path: Path, number: signal.Signals
) -> None:
    game = tmp_path / "game.py"
    game.write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True, cwd=sys.argv[2])\n"
        "from juggler.client import play\n"
        "play('CartPole-v1', sys.argv[1])\n"
        "time.sleep(1.0)\n"
        "open('left', 'w')\n"
    )
    command = f"{sys.executable} {game} {{address}} {tmp_path}"
    options = ["--simulator", command, "--num-env-runners", "1", "--envs-per-runner", "1"]
    run = subprocess.Popen(
        [sys.executable, "-m", "juggler", "train", "--env", "game", *options, "--run-dir", "run"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        events = tmp_path / "run" / "events.jsonl"
        eventually(lambda: events.exists() and "has the simulator at" in events.read_text())
        assert len(_in(tmp_path)) > 4
        run.send_signal(number)
        run.wait(60)
    finally:
        run.kill()
        run.wait()
    eventually(lambda: not _in(tmp_path))
    assert (tmp_path / "left").exists() == (number != signal.SIGKILL)


def _in(directory: Path) -> list[int]:
    """Processes that work in a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if path.readlink() == directory:
                found.append(int(path.parent.name))
    return found


# CartPole, learned from simulators in processes of their own.


#: Of four environments, which acts by itself.
LOCAL = """
import sys
from gymnasium import make
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from juggler.client import GatewayError, connect

env = SyncVectorEnv([lambda: make("CartPole-v1")] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
spaces = env.single_observation_space, env.single_action_space
try:
    with connect(sys.argv[1], *spaces, environments=4, mode="local") as session:
        observations, _ = env.reset(seed=int(sys.argv[2]))
        actions = session.step(observations)
        while True:
            observations, *rest, infos = env.step(actions)
            actions = session.step(observations, *rest, infos.get("final_obs"))
except GatewayError as error:
    sys.exit(error.code != "ENDED")
"""


#: Hands in what a random policy does.
LOGGED = """
import sys
import numpy as np
from gymnasium import make
from juggler.client import GatewayError, connect

env, generator = make("CartPole-v1"), np.random.default_rng(int(sys.argv[2]))
try:
    with connect(sys.argv[1], env.observation_space, env.action_space, mode="logged") as session:
        env.reset(seed=int(sys.argv[2]))
        while True:
            observations, actions, over = [env.reset()[0]], [], False
            while not over:
                actions.append(int(generator.integers(2)))
                observation, _, terminated, truncated, _ = env.step(actions[-1])
                observations.append(observation)
                over = terminated or truncated
            ones = np.ones(len(actions))
            session.record(
                np.array(observations), actions, ones, ones * np.log(0.5),
                terminated=terminated, truncated=truncated,
            )
except GatewayError as error:
    sys.exit(error.code != "ENDED")
"""


@pytest.mark.slow
def test_simulators_that_act_by_themselves_teach_cartpole(tmp_path: Path) -> None:
    run = "cartpole-ppo --stop-return 450 --stop-steps 1500000"
    assert learned_from(tmp_path, run, LOCAL, 4)["solved"]
    assert not any(inferences(tmp_path)), "the gateway does not act"


def inferences(tmp_path: Path) -> list[Any]:
    """What each line of a run's metrics tells of its gateway's inferences."""
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["inference"] for line in lines]


@pytest.mark.slow
def test_simulators_evaluate_checkpoints_and_confirm_that_a_run_is_solved(tmp_path: Path) -> None:
    run = "cartpole-ppo --stop-return 50 --evaluation-seconds 1 --evaluation-episodes 5"
    summary = learned_from(tmp_path, run, LOCAL.replace(', mode="local"', ""), 4)
    assert summary["solved"]
    assert summary["confirmation"]["confirmed"]
    assert summary["confirmation"]["episodes"] >= 100
    assert summary["confirmation"]["return_mean"] >= 50
    assert summary["best"]["episodes"] == 5
    assert (tmp_path / "run" / "best").is_dir()
    rows = [each["rows"] for each in inferences(tmp_path) if each]
    assert rows
    assert all(1 <= each <= 4 * 4 for each in rows)


@pytest.mark.long
def test_what_a_random_policy_did_teaches_impala_and_is_recorded(tmp_path: Path) -> None:
    sampled = tmp_path / "sampled"
    options = f"cartpole --stop-steps 100000 --record {sampled}"
    summary = learned_from(tmp_path, options, LOGGED, 2)
    assert not summary["solved"]  # returns of another policy are none of this one
    played = juggler.evaluate(tmp_path / "run", episodes=20)
    assert sum(played.returns) / 20 > 60  # of 22 where actions are random
    recorded = Dataset(str(sampled))
    steps = sum(len(recorded.episode(index)) for index in range(len(recorded)))
    assert steps > 95_000


def learned_from(tmp_path: Path, run_of: str, simulator: str, count: int) -> dict[str, Any]:
    """Train with simulators in processes; return the checked summary."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output, run_dir = tmp_path / "output", tmp_path / "run"
    options = [*run_of.split(), "--gateway", "127.0.0.1:0", "--run-dir", str(run_dir)]
    started: list[subprocess.Popen[bytes]] = []
    with output.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "juggler", "train", *options],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        said = r"takes simulators at (\S+);"
        (address,) = eventually(lambda: re.findall(said, output.read_text()))
        started += [
            subprocess.Popen([sys.executable, "-c", simulator, address, str(i)], env=environment)
            for i in range(count)
        ]
        assert run.wait(300) == 0, output.read_text()
        assert [each.wait(60) for each in started] == [0] * count
    finally:
        for process in (run, *started):
            process.kill()
            process.wait()
    assert_books_balance(run_dir)
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gateway": "5005"}, 'gateway must be "HOST:PORT"'),
        ({"gateway": "127.0.0.1:99999"}, 'gateway must be "HOST:PORT"'),
        ({"gateway_max_batch": 0}, "gateway_max_batch = 0: must be at least 1"),
        ({"gateway_max_wait_ms": -1.0}, "gateway_max_wait_ms = -1.0: must be at least 0"),
        (
            {"gateway": "127.0.0.1:0", "evaluation_seconds": 5.0, "evaluation_video": 1},
            "evaluation_video = 1",
        ),
        (
            {"gateway": "127.0.0.1:0", "simulator_parameters": {"wind": [[5, 1], [2, 3]]}},
            r"simulator_parameters.wind = .*: expected a number, or \[step, value\] pairs",
        ),
        (
            {"gateway": "127.0.0.1:0", "simulator_parameters": {"wind": float("nan")}},
            "simulator_parameters.wind = nan: expected a number",
        ),
        ({"gateway": "127.0.0.1:0", "simulator_parameters": {"wind": "a"}}, "expected a table of"),
        ({"simulator_parameters": {"wind": 1}}, "environments in Python have env_kwargs"),
        ({"simulators_per_runner": 0}, "simulators_per_runner = 0: must be at least 1"),
    ],
)
def test_settings_that_no_gateway_could_have_are_refused(
    keys: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        RunConfig.from_flat(keys)


# docs/external-simulators.md, as people would follow it.


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


def module_of_any_size(observation_space: Any, action_space: Any) -> Any:
    from juggler.runtime.modules.config import ModuleConfig
    from juggler.runtime.modules.module_specs import build_module

    return build_module(ModuleConfig().module, observation_space, action_space, {})
