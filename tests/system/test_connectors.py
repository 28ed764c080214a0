"""Runs with connectors, from a configuration to checkpoints and back."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from support.commands import status_of
from support.place import Place, assert_books_balance, summary

from juggler.runtime.checkpoints.checkpoint import STATE_FILE, read
from juggler.runtime.connectors.moments import Moments

RUN = """
env = "Pendulum-v1"
synchronous = true
num_env_runners = 2
envs_per_runner = 4
fragment_steps = 16
batch_size = 200
stop_steps = 3000

[connectors]
env_to_module = ["mean_std_filter", {use = "frame_stack", k = 3}, "previous_actions_and_rewards"]
module_to_env = ["rescale_actions"]
learner = ["normalize_rewards", "mine:Negate"]
"""

MINE = """
from juggler.runtime.connectors.connector import LearnerConnector, ObservationConnector


class Negate(LearnerConnector):
    def __call__(self, columns):
        return columns | {"rewards": -columns["rewards"]}


class Halve(ObservationConnector):
    def __call__(self, observations):
        return observations / 2
"""


def state_of(place: Place, run: str) -> bytes:
    checkpoint = Path(summary(place.path / run)["checkpoint"])
    content: bytes = (place.path / checkpoint / STATE_FILE).read_bytes()
    return content


def samples_behind_the_filter(path: Path) -> float:
    return float(Moments.from_tree(read(path).tree["connectors"]["mean_std_filter"]).count)


@pytest.mark.long
def test_a_synchronous_run_with_connectors_gives_the_same_numbers_every_time(place: Place) -> None:
    place.write("run.toml", RUN)
    place.write("mine.py", MINE)
    for name in ("one", "two"):
        run = place.run("train", "run.toml", "--run-dir", name)
        assert run.status == 0, run.output
        assert_books_balance(place.path / name)
    assert state_of(place, "one") == state_of(place, "two")
    config = tomllib.loads((place.path / "one" / "config.toml").read_text())
    assert config["connectors"] == tomllib.loads(RUN)["connectors"]

    learned = samples_behind_the_filter(place.path / "one")
    assert learned == summary(place.path / "one")["env_steps_trained"]
    played = place.run("evaluate", "one", "--episodes", 2)
    assert played.status == 0, played.output
    again = place.run("train", "--resume", "one", "--stop-steps", 6000)
    assert again.status == 0, again.output
    gone_on = samples_behind_the_filter(place.path / "one")
    assert gone_on == summary(place.path / "one")["env_steps_trained"] > learned
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_connectors_of_a_module_work_on_workers_that_dial_in(place: Place) -> None:
    place.write("run.toml", RUN.replace("synchronous = true\n", ""))
    place.write("mine.py", MINE)
    driver = place.start("driver", "run.toml", "--bind", "127.0.0.1:0", "--run-dir", "run")
    driver.wait_for("waiting for workers at")
    line = next(line for line in driver.output.splitlines() if "waiting for workers" in line)
    address = line.split()[-1]
    workers = [place.start(role, "--driver", address) for role in ("learner", "envrunner")]
    assert driver.wait(110) == 0, driver.output
    for worker in workers:
        assert worker.wait(60) == 0, worker.output
    assert summary(place.path / "run")["env_steps_trained"] >= 3000
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_script_may_use_classes_of_its_own(place: Place) -> None:
    script = place.write(
        "script.py",
        f"import juggler\n{MINE}\n"
        "connectors = dict(\n"
        "    env_to_module=['mean_std_filter', {'use': Halve, 'before': 'mean_std_filter'}],\n"
        "    learner=[Negate],\n"
        ")\n"
        "result = juggler.train(\n"
        "    env='Pendulum-v1', num_env_runners=1, stop_steps=3000, batch_size=256,\n"
        "    run_dir='run', progress='off', connectors=connectors,\n"
        ")\n"
        "print(len(juggler.evaluate('run', episodes=2, connectors=connectors).returns), 'played')\n"
        "try:\n"
        "    juggler.resume('run', stop_steps=6000)\n"
        "except juggler.ConfigError as error:\n"
        "    print(error)\n"
        "juggler.resume('run', stop_steps=6000, connectors=connectors)\n",
    )
    run = place.start_program([sys.executable, str(script)])
    assert run.wait(110) == 0, run.output
    assert "2 played" in run.output
    assert "this run's connector 'Halve' is of a script: pass connectors=" in run.output
    assert summary(place.path / "run")["env_steps_trained"] >= 6000
    config = tomllib.loads((place.path / "run" / "config.toml").read_text())
    assert config["connectors"]["learner"] == ["__main__:Negate"]
    place.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ('"frame_stak"', "there is no connector 'frame_stak': did you mean 'frame_stack'?"),
        ('{"use": "frame_stack", "k": 1}', "connector 'frame_stack': k = 1 frames to stack"),
    ],
)
@pytest.mark.usefixtures("local_workers")
def test_a_connector_that_is_none_or_cannot_be_built_is_told_before_a_run_begins(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str], wrong: str, words: str
) -> None:
    pieces = f'{{"env_to_module": [{wrong}]}}'
    assert status_of("train", "cartpole", "--connectors", pieces, "--run-dir", "run") == 2
    assert words in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.usefixtures("local_workers")
def test_rewards_that_are_scaled_twice_are_a_warning_when_a_run_starts(
    in_a_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pieces = '{"learner": ["normalize_rewards"]}'
    assert status_of("train", "pendulum", "--connectors", pieces, "--stop-steps", 1) == 0
    warning = "warning: rewards are scaled twice: reward_scale = 0.02 multiplies what"
    said = "".join(capfd.readouterr())
    assert f"{warning} normalize_rewards in connectors.learner makes" in said
