"""Simulators that a gateway starts itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.gateway_world import AgentsWorld
from support.processes import QUICK, eventually
from support.scripted_agents import Scaled

from juggler.envrunner.config import EnvRunnerConfig
from juggler.gateway import simulators
from juggler.gateway.simulators import SimulatorFailed, Simulators
from juggler.gateway.standalone_gateway import evaluate_with_copies
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines

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
#: Saves its work at the end, which takes a moment.
LEAVES = """
import sys, time
from pathlib import Path

def leave(kind, error, traceback):
    time.sleep(0.5)
    Path(__file__).with_name("left").write_text(error.code)

sys.excepthook = leave
"""


@pytest.fixture
def command(tmp_path: Path) -> str:
    (tmp_path / "simulator.py").write_text(SIMULATOR)
    return f"{sys.executable} {tmp_path / 'simulator.py'} {{address}} {{index}}"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
def test_copies_may_leave_by_themselves_when_the_run_ends(
    make_world: Callable[..., AgentsWorld], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulators, "_LEAVE_SECONDS", 60.0)
    (tmp_path / "game.py").write_text(SIMULATOR.replace("import sys, time", LEAVES))
    command = f"{sys.executable} {tmp_path / 'game.py'} {{address}} {{index}} {MANY}"
    world = make_world({"*": "all"}, simulator=command)
    world.begin()
    world.close()
    assert (tmp_path / "left").read_text() == "ENDED"


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


def test_a_gateway_that_starts_simulators_needs_no_address() -> None:
    assert EnvRunnerConfig(simulator="./game {address}").gateway == "127.0.0.1:0"
    assert EnvRunnerConfig(simulator="./game {address}", gateway="unix:/g").gateway == "unix:/g"


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
