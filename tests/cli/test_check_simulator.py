"""`juggler check-simulator`, with working simulators and one for each broken rule."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.gateway_world import RawSimulator, hello, steps_of
from support.place import status_of
from support.processes import eventually

from juggler.cli import check_simulator
from juggler.cli.check_simulator import Arguments, check
from juggler.cli.findings import Finding
from juggler.client import GatewayError, box, connect, connect_agents, discrete
from juggler.driver.config import ConfigError
from juggler.runtime.wire.v1 import simulator_pb2 as pb

ROOT = Path(__file__).parents[2]


def checked(simulate: Callable[[str], Any], **options: Any) -> dict[str, Finding]:
    """What a check finds of a simulator in a thread, by name."""
    threads = []

    def say(text: str) -> None:
        if text.startswith("takes simulators at "):
            threads.append(threading.Thread(target=simulate, args=(text.rpartition(" ")[2],)))
            threads[0].start()

    found = check(Arguments(simulator="127.0.0.1:0", **{"steps": 60, **options}), say)
    threads[0].join(30)
    assert not threads[0].is_alive()
    return {each.name: each for each in found}


def states(found: dict[str, Finding]) -> dict[str, str]:
    """What is not as it should be."""
    return {name: each.state for name, each in found.items() if each.state != "ok"}


def until_the_end(play: Callable[[str], None]) -> Callable[[str], None]:
    def simulate(address: str) -> None:
        with pytest.raises(GatewayError, match="ENDED"):
            play(address)

    return simulate


@until_the_end
def walk(address: str) -> None:
    """Episodes of five steps; every other one is truncated."""
    with connect(address, box([2], 0, 9), discrete(2)) as session:
        for number in range(1_000_000):
            for step in range(5):
                session.step([step, number % 9], float(step > 0))
            session.step([5, 0], 1.0, number % 2 == 0, number % 2 == 1)


def test_a_simulator_that_keeps_the_rules_has_no_problem_and_resumes() -> None:
    found = checked(walk)
    assert states(found) == {}
    assert found.keys() == {
        "default", "steps", "episodes", "returns", "protocol", "cut connection"
    }  # fmt: skip
    assert "of 5 to 5, mean 5 steps" in found["episodes"].said
    assert "5 to 5, mean 5" in found["returns"].said


@until_the_end
def take_turns(address: str) -> None:
    """A game for two whose observations and rewards differ."""
    agents = {"row": (box([1]), discrete(3)), "column": (box([2]), discrete(2))}
    with connect_agents(address, agents) as session:
        for number in range(1_000_000):
            session.step({"row": [number], "column": [number, 1 - number]})
            session.step(rewards={"row": 1.0, "column": -1.0}, terminated=True)


def test_agents_with_spaces_of_their_own_are_reported_one_by_one() -> None:
    found = checked(take_turns)
    assert states(found) == {}
    assert {"row", "column"} <= found.keys()
    assert found["episodes"].said.endswith("100 % terminated, 0 % truncated")


@until_the_end
def stand_still(address: str) -> None:
    """Give no reward and no end, and one observation out of bounds."""
    with connect(address, box([2], 0, 1), discrete(2), environments=3) as session:
        nothing = np.zeros(3)
        for _ in range(1_000_000):
            observations = [[0.5, 0.5], [0.5, 1.25], [0.5, 0.5]]
            session.step(np.float32(observations), nothing, nothing > 0, nothing > 0)


def test_values_are_compared_with_their_space_and_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_simulator, "_FEW_SECONDS", 0.0)
    found = checked(stand_still)
    assert states(found) == {"bounds": "problem", "observations": "warning", "episodes": "warning"}
    assert "environment 1" in found["bounds"].said
    assert "at [1] is 1.25, outside 0 to 1" in found["bounds"].said
    assert "2 of 2 numbers" not in found["observations"].said


@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_the_bounds_of_a_space_are_within_it(dtype: Any) -> None:
    high = np.array([0.1, 7.3] if dtype is np.float64 else [255, 7], dtype)

    @until_the_end
    def at_the_bounds(address: str) -> None:
        with connect(address, box([2], 0, high, dtype), discrete(2)) as session:
            for _ in range(1_000_000):
                session.step(high)
                session.step(np.zeros(2, dtype), 1.0)
                session.step(high, 1.0, True)

    assert states(checked(at_the_bounds)) == {}


def first(**rows: Any) -> dict[str, Any]:
    return {"steps": steps_of(1, **rows)}


def second(**rows: Any) -> dict[str, Any]:
    return {"steps": steps_of(2, **rows)}


NAN = ((0.0, float("nan"), 0.0),)
GREETING = {"hello": hello()}
#: By the code of the error: the messages of a simulator, the last of which breaks a rule. The tests
#: of sessions have every rule.
BROKEN = {
    "EXPECTED_HELLO": [first()],
    "BAD_MESSAGE": [GREETING, {}],
    "NOT_FINITE": [GREETING, first(observations=NAN)],
    "OUT_OF_ORDER": [GREETING, {"steps": steps_of(5)}],
    "OUT_OF_ORDER of a pause": [GREETING, first(), second(paused=[True])],
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_rule_that_a_simulator_breaks_is_named_with_its_numbers(rule: str) -> None:
    *before, last = BROKEN[rule]

    def simulate(address: str) -> None:
        with RawSimulator(address) as simulator:
            for message in before:
                simulator.send(**message)
                assert not simulator.hear().HasField("error")
            simulator.send(**last)
            assert pb.Error.Code.Name(simulator.hear().error.code) == rule.split()[0]

    found = checked(simulate)
    assert states(found) == {"protocol": "problem"}
    assert found["protocol"].said.startswith(f"{rule.split()[0]}: ")


# After a cut.


def step_until_cut(address: str) -> None:
    with RawSimulator(address) as simulator:
        simulator.greet()
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            step_for_ever(simulator)


def step_for_ever(simulator: RawSimulator) -> None:
    for seq in range(1, 1_000_000):
        shown = [[seq, seq % 7, -seq]]
        simulator.step(steps_of(seq, shown, rewards=[1.0], terminated=[seq > 1]))


def test_a_simulator_that_stays_away_after_a_cut_gets_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_simulator, "_RESUME_SECONDS", 0.2)
    found = checked(step_until_cut)
    assert states(found) == {"cut connection": "warning"}
    assert "did not come back" in found["cut connection"].said


def test_a_simulator_that_begins_a_new_session_after_a_cut_gets_advice() -> None:
    def simulate(address: str) -> None:
        step_until_cut(address)
        with RawSimulator(address) as simulator:
            simulator.greet()

    found = checked(simulate)
    assert states(found) == {"cut connection": "warning"}
    assert "new session" in found["cut connection"].said


# Simulators that do not play.


def test_a_simulator_that_sends_no_steps_or_does_not_come_has_a_problem() -> None:
    def greets(address: str) -> None:
        with RawSimulator(address) as simulator:
            simulator.greet()
            assert simulator.hear().error.code == pb.Error.ENDED

    found = checked(greets, seconds=3.0)
    assert states(found) == {"steps": "problem"}
    assert "a session began" in found["steps"].said
    found = checked(lambda address: None, seconds=0.1)
    assert "no simulator connected" in found["steps"].said


@pytest.mark.parametrize("steps", [0, 2])
def test_a_simulator_that_hangs_is_reported_long_before_the_end_of_the_check(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_simulator, "_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(check_simulator, "_END_SECONDS", 0.1)

    def hangs(address: str) -> None:
        with RawSimulator(address) as simulator:
            simulator.greet()
            for seq in range(1, steps + 1):
                simulator.step(steps_of(seq))
            assert simulator.hear().error.code == pb.Error.ENDED

    found = checked(hangs, seconds=20.0)
    assert found["steps"].state == "problem"
    said = "none came in the last 0 s" if steps else "a session began, and in 0 s no step was taken"
    assert said in found["steps"].said


def test_a_simulator_may_say_goodbye_before_the_check_is_over() -> None:
    def simulate(address: str) -> None:
        with connect(address, box([1]), discrete(2)) as session:
            session.step([0.0])
            session.step([1.0], 1.0, True)

    found = checked(simulate)
    assert states(found) == {}
    assert found["steps"].said.startswith("1 in ")


def test_a_simulator_that_leaves_without_a_goodbye_has_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_simulator, "_RESUME_SECONDS", 0.1)

    def simulate(address: str) -> None:
        with RawSimulator(address) as simulator:
            simulator.greet()
            simulator.step(steps_of(1))
            simulator.step(steps_of(2, rewards=[1.0], terminated=[True]))

    assert states(checked(simulate)) == {"connection": "problem"}


@pytest.mark.slow
def test_a_command_that_fails_after_some_steps_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(
        "import sys\n"
        "from juggler.client import box, connect, discrete\n"
        "with connect(sys.argv[1], box([1]), discrete(2)) as session:\n"
        "    session.step([0.0])\n"
        "    sys.exit(3)\n"  # which says goodbye
    )
    command = f"{sys.executable} {tmp_path / 'game.py'} {{address}}"
    *_, last = check(Arguments(simulator=command), lambda text: None)
    assert (last.name, last.state) == ("command", "problem")
    assert "exit code 3" in last.said


@pytest.mark.slow
def test_a_command_that_ends_without_a_goodbye_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(
        "import os, sys\n"
        "from juggler.client import box, connect, discrete\n"
        "connect(sys.argv[1], box([1]), discrete(2)).step([0.0])\n"
        "os._exit(0)\n"
    )
    command = f"{sys.executable} {tmp_path / 'game.py'} {{address}}"
    found = {each.name: each for each in check(Arguments(simulator=command), lambda text: None)}
    assert found["connection"].state == "problem"
    assert "Goodbye" in found["connection"].advice
    assert "command" not in found


@pytest.mark.parametrize("number", ["warm", [], [[0, 1], [5]], None, True])
def test_parameters_are_numbers_or_schedules(number: Any) -> None:
    with pytest.raises(ConfigError, match="simulator_parameters"):
        check(Arguments(simulator="./game {address}", parameters={"wind": number}), print)


@pytest.mark.parametrize("command", ["./game", "./game --fast", "./game {adress}", "game {}"])
def test_a_command_takes_the_address(command: str) -> None:
    with pytest.raises(ConfigError, match=r"put \{address\} where"):
        check(Arguments(simulator=command), print)


@pytest.mark.parametrize("given", [{"steps": 0}, {"seconds": -1.0}, {"seconds": float("nan")}])
def test_a_check_needs_steps_and_time(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--steps"):
        check(Arguments(simulator="127.0.0.1:0", **given), print)


@pytest.mark.slow
def test_a_signal_ends_the_check_and_its_command_at_once(tmp_path: Path) -> None:
    written = tmp_path / "pid"

    def interrupt() -> None:
        eventually(lambda: written.exists() and written.read_text().endswith("\n"))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    command = f"sh -c 'echo $$ > {written}; exec sleep 100' {{address}}"
    with pytest.raises(KeyboardInterrupt):
        check(Arguments(simulator=command), lambda text: None)
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)


@pytest.mark.slow
def test_a_command_that_never_dials_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_simulator, "_END_SECONDS", 0.1)
    command = "sh -c 'exec sleep 100' {address}"
    steps, ended = check(Arguments(simulator=command, seconds=0.1), lambda text: None)
    assert (steps.state, ended.state) == ("problem", "warning")
    assert "no simulator connected" in steps.said
    assert "was killed" in ended.said


@pytest.mark.slow
def test_a_template_in_javascript_is_started_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUGGLER_PROTOS", str(ROOT / "proto"))
    here = shutil.copytree(ROOT / "examples" / "simulators" / "node", tmp_path / "node")
    subprocess.run(["npm", "install"], cwd=here, check=True, capture_output=True)
    command = f"node {here / 'simulator.js'} {{address}}"
    assert status_of("check-simulator", command, "--steps", "500") == 0
    said = capsys.readouterr().out
    assert "observes Box(-inf, inf, (2,), float32), acts in Discrete(2)" in said
    assert "no rule was broken" in said
