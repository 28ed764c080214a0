"""Broken processes, links, members of a group and replays in runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.network import Network
from support.place import (
    REPOSITORY,
    Command,
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    first_of,
    metrics,
    status,
    status_of,
    summary,
    train_beyond_a_checkpoint,
    trained_steps,
    trains_on,
)

from juggler.runtime.checkpoints.checkpoint import read

ENVIRONMENT = '''
import ctypes, gymnasium, numpy as np, os, time

class Robot(gymnasium.Env):
    """Falls over where and when it is told to."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, where="", at=10**9):
        self.where, self.at, self.steps = where, at, 0
        if where == "constructor":
            raise OSError("no robot is plugged in")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.where == "reset":
            raise OSError("the robot does not stand up")
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = np.zeros(3, np.float32)
        if self.steps == self.at and self.where == "step":
            raise ZeroDivisionError("the robot fell over")
        if self.where == "print":
            print("the robot moves", flush=True)
            os.write(1, b"its motors, too")
        if self.steps == self.at and self.where == "exit":
            os._exit(7)
        if self.steps == self.at and self.where == "nan":
            observation[1] = np.nan
        if self.steps == self.at and self.where == "hang":
            time.sleep(3600)  # waits for the robot
        if self.steps == self.at and self.where == "hang in C":
            ctypes.PyDLL(None).sleep(3600)  # with the interpreter's lock
        return observation, 1.0, self.steps % 20 == 0, False, {}
'''
SMALL = ["--envs-per-runner", 4, "--fragment-steps", 16, "--batch-size", 60]


def _robot(directory: Path, where: str, at: int = 10**9) -> list[object]:
    (directory / "robots.py").write_text(ENVIRONMENT)
    kwargs = f'{{"where": "{where}", "at": {at}}}'
    return ["--env", "robots:Robot", "--env-kwargs", kwargs, "--run-dir", "run", *SMALL]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_ends_a_run_in_order(place: Place, number: int, reason: str) -> None:
    """To all processes, as terminals and service managers send it."""
    run = place.start("train", "cartpole", "--run-dir", "run", "--stop-return", 501)
    directory = place.path / "run"
    trains_on(directory, run)
    os.killpg(run.process.pid, number)
    assert run.wait(30) == 128 + number, run.output
    place.assert_nothing_is_left()
    assert_books_balance(directory)
    end = summary(directory)
    assert end["reason_for_stop"] == reason
    assert end["env_steps_lost_unreported"] == 0
    assert Path(place.path, end["checkpoint"]).name == f"{end['updates']:09d}"


@pytest.mark.slow
def test_two_signals_end_a_run_at_once(place: Place) -> None:
    run = place.start("train", "cartpole", "--run-dir", "run", "--stop-return", 501)
    trains_on(place.path / "run", run)
    for worker in ("envrunner 0", "learner 0"):
        place.worker(worker).suspend()  # it answers no more
    run.interrupt()
    for _ in range(2):  # the first may be handled late, so that the second counts as the same
        time.sleep(1.0)
        if run.status is None:
            run.interrupt()
    assert run.wait(30) == 130, run.output
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_killed_envrunner_is_replaced_and_what_it_held_is_counted(place: Place) -> None:
    directory = place.path / "run"
    run = place.start("train", "cartpole", "--run-dir", "run", "--stop-return", 501)
    for number in (1, 2):
        trains_on(directory, run)
        place.worker("envrunner 0").kill()
        told = "killed by SIGKILL. Starting it again"
        eventually(lambda: run.output.count(told) == number, 60, lambda: run.output)  # noqa: B023
    trains_on(directory, run)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(directory)
    end = summary(directory)
    own = end["learner_steps"]["learner-0"]
    assert own["trained"] == end["env_steps_trained"], "the learner counts for itself"
    assert end["restarts"] == 2
    assert end["env_steps_lost_unreported"] > 0
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_run_whose_only_learner_is_killed_goes_on_from_its_checkpoint(place: Place) -> None:
    directory = place.path / "run"
    options = ["--run-dir", "run", "--stop-return", 501, "--checkpoint-seconds", 4]
    run = place.start("train", "cartpole", *options)
    learner = place.worker("learner 0")
    train_beyond_a_checkpoint(directory, lambda: run.output)
    learner.kill()
    run.wait_for("the learners' weights are lost: learner-0 continues from update ")
    assert "killed by SIGKILL. Starting it again" in run.output
    trains_on(directory, run)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    place.assert_nothing_is_left()
    assert_books_balance(directory)
    end = summary(directory)
    assert end["weights_version"][0] == 2
    assert end["env_steps_dropped"]["learner_lost"] > 0
    assert end["learner_steps"]["learner-0"]["trained"] == end["env_steps_trained"]
    versions = [line["weights_version"] for line in metrics(directory)]
    assert versions == sorted(versions), "weights never go backwards"


@pytest.mark.usefixtures("local_workers")
def test_an_environment_that_cannot_start_ends_the_run_with_its_own_traceback(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"constructor": "no robot is plugged in", "reset": "the robot does not stand up"}
    one = ("--num-env-runners", 1)
    for where, words in told.items():
        status = status_of("train", *_robot(in_a_directory, where), *one)
        said = "".join(capsys.readouterr())
        assert status == 2, said
        assert f'raise OSError("{words}")' in said
        assert f"failed in {where}: OSError: {words}" in said.splitlines()[-1]
    assert not (in_a_directory / "run").exists()


@pytest.mark.usefixtures("local_workers")
def test_an_environment_that_always_raises_ends_the_run_with_a_clear_message(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-env-runners", 2]
    assert status_of("train", *_robot(in_a_directory, "step", at=5), *options) == 1
    said = "".join(capsys.readouterr())
    last = [line for line in said.splitlines() if "no EnvRunner is left" in line][-1]
    assert "robots:Robot" in last
    assert "the robot fell over" in last
    assert summary(in_a_directory / "run")["reason_for_stop"] == "no_envrunner"


@pytest.mark.slow
def test_json_of_a_run_is_alone_on_stdout(place: Place) -> None:
    options = ["--num-env-runners", 1, "--stop-steps", 600, "--progress", "json"]
    command = ["-m", "juggler", "train", *_robot(place.path, "print"), *options]
    variables = {**os.environ, "PYTHONPATH": f"{place.path}{os.pathsep}{REPOSITORY}"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=place.path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert all(isinstance(json.loads(line), dict) for line in done.stdout.splitlines())
    assert "the robot moves" in done.stderr
    assert "its motors, too" in done.stderr


@pytest.mark.long
def test_enough_steps_of_an_environment_that_always_exits_are_no_success(place: Place) -> None:
    options = ["--num-env-runners", 1, "--stop-steps", 1200]
    run = place.run("train", *_robot(place.path, "exit", at=100), *options)
    assert run.status == 1
    failure = summary(place.path / "run")["failure"]
    assert "it reached stop_steps, but robots:Robot kept failing in every EnvRunner" in failure
    assert "envrunner-0 ended: exit code 7" in failure
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_step_that_hangs_is_named_and_its_envrunner_replaced(place: Place) -> None:
    options = ["--num-env-runners", 1, "--hang-seconds", 4, "--stop-steps", 600]
    run = place.run("train", *_robot(place.path, "hang", at=100), *options)
    assert run.status == 0, run.output
    assert "envrunner-0 left: hung in step of environment 0 (Robot): no progress for" in run.output
    assert "time.sleep(3600)  # waits for the robot" in run.output
    assert_books_balance(place.path / "run")
    assert summary(place.path / "run")["restarts"] > 0
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_step_that_lets_nothing_else_run_shows_where_it_was(place: Place) -> None:
    options = ["--num-env-runners", 1, "--stop-steps", 600]
    run = place.run("train", *_robot(place.path, "hang in C", at=100), *options)
    assert run.status == 0, run.output
    assert "envrunner-0 left: no heartbeat for 10 s" in run.output
    line = next(i for i, text in enumerate(ENVIRONMENT.splitlines(), 1) if "PyDLL" in text)
    assert f'robots.py", line {line} in step' in run.output
    assert "ended: killed by SIGABRT (" in run.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


@pytest.mark.usefixtures("local_workers")
def test_gradients_that_are_not_finite_end_the_run_and_name_the_module(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_a_directory / "diverging.py").write_text(
        "import torch\n"
        "from juggler.runtime.modules.models import ActorCritic\n"
        "class Diverging(ActorCritic):\n"
        "    passes = 0\n"
        "    def _forward_train(self, batch):\n"
        "        outputs = super()._forward_train(batch)\n"
        "        Diverging.passes += 1\n"
        "        factor = torch.inf if Diverging.passes > 10 else 1.0  # after the rehearsal\n"
        "        return {**outputs, 'values': outputs['values'] * factor}\n"
    )
    options = ["--module", "diverging:Diverging", "--run-dir", "run", "--stop-steps", 3_000_000]
    status = status_of("train", "cartpole", *options)
    said = "".join(capsys.readouterr())
    assert status == 1, said
    last = [line for line in said.splitlines() if "not finite" in line][-1]
    assert "module 'default'" in last
    kept = summary(in_a_directory / "run")
    assert kept["checkpoint"] is not None, "the state before the first bad update is good"
    assert "To resume from update" in said


_ENDLESS = ["cartpole", "--stop-return", 501, "--run-dir"]


@pytest.mark.slow
def test_a_run_whose_sockets_are_removed_says_so_and_ends_in_order(place: Place) -> None:
    run = place.start("train", *_ENDLESS, "run")
    trains_on(place.path / "run", run)
    for path in (place.path / "tmp").iterdir():
        shutil.rmtree(path)
    assert run.wait(60) == 1, run.output
    assert "Traceback" not in run.output
    last = run.output.splitlines()[-2:]
    assert last[0].endswith(f"the directory of this run's sockets in {place.path}/tmp was removed")
    assert last[1].startswith("To resume from update ")
    assert checkpoints(place.path / "run")
    assert_books_balance(place.path / "run")
    assert summary(place.path / "run")["failure"]
    place.assert_nothing_is_left()


def _forkserver(place: Place) -> psutil.Process | None:
    for process in place.processes():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "multiprocessing.forkserver" in line or line.strip() == "juggler: forkserver":
                return process
    return None


def _start(place: Place, *options: object) -> Command:
    return place.start("train", "cartpole", "--run-dir", "run", "--stop-return", 501, *options)


@pytest.mark.slow
def test_a_run_ends_with_an_envrunner_that_stands_still(place: Place) -> None:
    run = _start(place, "--num-env-runners", 1)
    trains_on(place.path / "run", run)
    place.worker("envrunner 0").suspend()
    run.interrupt()
    assert run.wait(60) == 130, run.output
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_run_goes_on_after_its_forkserver_was_killed_with_all_its_workers(place: Place) -> None:
    run = _start(place, "--checkpoint-seconds", 600)
    trains_on(place.path / "run", run)
    server = _forkserver(place)
    assert server is not None
    server.kill()  # and its workers with it
    run.wait_for("the learners' weights are lost: learner-0 continues from new weights", 60)
    trains_on(place.path / "run", run)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


# A learner whose connection to the driver breaks, and which has newer weights than the disk.


@pytest.mark.slow
def test_learners_that_lost_their_driver_go_on_from_the_weights_they_had(place: Place) -> None:
    directory = place.path / "run"
    options = ["--run-dir", "run", "--stop-return", 501, "--checkpoint-seconds", 600]
    options += ["--num-learners", 2]
    with Network() as network:
        driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
        address = driver.address()
        links = [network.link(address) for _ in range(2)]
        workers = [place.start("learner", "--driver", link) for link in links]
        workers.append(place.start("envrunner", "--driver", address))

        def said() -> str:
            return "\n".join(command.output for command in (driver, *workers))

        eventually(lambda: trained_steps(directory) > 10_000, 60, said)
        network.cut("there")  # learners still read, and make the requested updates
        eventually(lambda: status(directory)["queues"]["updates_in_flight"] == 2, 5, said)
        time.sleep(2)  # and it is all the same before a silent learner counts as lost, in 6
        heard = metrics(directory)[-1]["weights_version"][1]
        for link in links:
            network.break_one(link, random.Random())
        network.heal()
        driver.wait_for("is back with its weights of update ")
        back = re.search(
            r"of update (\d+), and with (\d+) unreported steps trained on", driver.output
        )
        assert back is not None, said()
        update, reached = int(back[1]), trained_steps(directory)
        eventually(lambda: trained_steps(directory) > reached + 5000, 60, said)

        def all_are_back() -> bool:
            return {worker["state"] for worker in status(directory)["workers"]} == {"ready"}

        eventually(all_are_back, 60, said)  # one that waits for a driver would not learn of the end
        driver.process.terminate()
        assert driver.wait(30) == 143, said()
        for worker in workers:
            assert worker.wait(30) == 0, said()
    assert "weights are lost" not in driver.output
    assert_books_balance(directory)
    versions = [line["weights_version"] for line in metrics(directory)]
    assert versions == sorted(versions)
    assert update > heard, "the newest weights, which were never reported"
    end = summary(directory)
    assert end["weights_version"][0] >= 2
    assert end["weights_version"][1] > update
    own = sum(counts["trained"] for counts in end["learner_steps"].values())
    assert own == end["env_steps_trained"]
    place.assert_nothing_is_left()


# The books of a replay, in a run that is resumed too.


SETTINGS = """
env = "CartPole-v1"
algorithm = "dqn"
progress = "off"
envs_per_runner = 4
fragment_steps = 16
batch_size = 64
replay_begin = 400
replay_capacity = 600
replay_batch_size = 16
replay_ratio = 2.0
model = {hidden_sizes = [8]}
"""


def arrived(line: dict[str, Any]) -> float:
    """Rows that came into the replay, by what became of them."""
    told = line["modules"].get("default", {})
    return sum(told.get(f"replay_rows_{what}", 0) for what in ("drawn", "waiting", "unused"))


@pytest.mark.usefixtures("local_workers", "in_a_directory")
@pytest.mark.parametrize("saved", [True, False])
def test_trained_is_used_and_stored_and_left_unused_in_every_line_of_a_resumed_run_too(
    saved: bool,
) -> None:
    settings = f"{SETTINGS}save_replay = {str(saved).lower()}\n"
    Path("run.toml").write_text(settings)
    assert status_of("train", "run.toml", "--run-dir", "run", "--stop-steps", "1000") == 0
    lines = metrics(Path("run"))
    before = len(lines)
    for line in lines:
        assert arrived(line) == line["env_steps_trained"]
    told = lines[-1]["modules"]["default"]
    assert told["replay_rows_drawn"] > 0
    assert told["replay_rows_unused"] > 0
    assert told["replay_steps_missing"] == 0
    trained: int = read(checkpoints(Path("run"))[-1]).counters["trained"]
    assert status_of("train", "--resume", "run", "--stop-steps", "1200") == 0
    assert_books_balance(Path("run"))
    later = [line for line in metrics(Path("run"))[before:] if line["modules"]]
    assert later
    for line in later:
        assert arrived(line) == line["env_steps_trained"] - (0 if saved else trained)
    missing = later[-1]["modules"]["default"]["replay_steps_missing"]
    assert missing == (0 if saved else max(0, 400 - arrived(later[-1])))


# Runs with several learners: what they reach, and what becomes of them when members go.


#: Two learners with a batch of the runner each make up the batch of one.
HALVES = ["--envs-per-runner", 32, "--num-learners", 2, "--devices", "fake:2"]


def assert_learners_agree(directory: Path) -> None:
    """With the driver, about how many steps were trained on."""
    end = summary(directory)
    own = sum(counts["trained"] for counts in end["learner_steps"].values())
    assert own == end["env_steps_trained"]
    assert_books_balance(directory)


def goes_on(directory: Path, seconds: float) -> None:
    reached = trained_steps(directory)
    eventually(lambda: trained_steps(directory) > reached, seconds, "no training any more")


@pytest.mark.slow
@pytest.mark.parametrize("rank", first_of([0, 1]))
def test_a_group_goes_on_without_a_member_that_is_killed_until_it_is_back(
    place: Place, rank: int
) -> None:
    directory = place.path / "run"
    run = place.start("train", "cartpole", "--run-dir", "run", "--stop-return", 501, *HALVES)
    goes_on(directory, 60)
    place.worker(f"learner {rank}").kill()
    run.wait_for(f"learner group 2: learner-{1 - rank} on fake:{1 - rank}", 30)
    run.wait_for("learner group 3: ", 60)
    goes_on(directory, 30)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    place.assert_nothing_is_left()
    assert_learners_agree(directory)
    end = summary(directory)
    assert end["num_learners"] == 2
    assert end["env_steps_dropped"]["learner_lost"] > 0
    updates = [line["updates"] for line in metrics(directory)]
    assert updates == sorted(updates), "no update was lost"
    assert "weights are lost" not in run.output


@pytest.mark.slow
@pytest.mark.parametrize("rank", first_of([2, 0]))
def test_a_member_that_hangs_is_replaced(place: Place, rank: int) -> None:
    directory = place.path / "run"
    options = ["--num-learners", 3, "--stop-return", 501, "--run-dir", "run"]
    run = place.start("train", "cartpole", *options)
    goes_on(directory, 60)
    place.worker(f"learner {rank}").send_signal(signal.SIGSTOP)
    run.wait_for("learner group 2: ", 60)
    goes_on(directory, 30)
    run.wait_for("learner group 3: ", 60)
    goes_on(directory, 30)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    place.assert_nothing_is_left()
    assert_learners_agree(directory)
    assert f"learner-{rank} left: no heartbeat for 6 s" in run.output


# Children of environments end with them, whichever process is killed.


#: Each environment starts a game of two processes that it never ends: a child, and one that has
#: left the session and lost its parent, as daemons do.
_GAMES = """
import subprocess, sys
from gymnasium.envs.classic_control import CartPoleEnv

SLEEP = "import time; time.sleep(600)"
DAEMON = f"import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); {SLEEP}"

class Game(CartPoleEnv):
    def __init__(self):
        super().__init__()
        for program in (SLEEP, DAEMON):
            subprocess.Popen([sys.executable, "-c", program, MARK])
"""


def _start_games(place: Place, *options: object) -> Command:
    place.write("games.py", _GAMES.replace("MARK", repr(str(place.path))))
    several = ["--num-env-runners", 2, "--envs-per-runner", 2, "--fragment-steps", 16]
    return place.start(
        "train", "cartpole", "--env", "games:Game", "--run-dir", "run", "--stop-return", 501,
        "--no-confirm", *several, *options,
    )  # fmt: skip


def _games(place: Place) -> list[psutil.Process]:
    """Wherever they have gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(place.path) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture
def _no_game_is_left(place: Place) -> Iterator[None]:
    yield
    for process in _games(place):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _all_play(place: Place, run: Command) -> None:
    # Two runners of two environments, with two processes each, and the one for the spaces.
    trains_on(place.path / "run", run)
    eventually(lambda: len(_games(place)) >= 8, 60, lambda: f"{len(_games(place))}\n{run.output}")


@pytest.mark.usefixtures("_no_game_is_left")
@pytest.mark.slow
@pytest.mark.parametrize("vectorize", first_of(["sync", "async"]))
def test_a_killed_envrunner_takes_its_games_with_it_and_a_killed_driver_all(
    place: Place, vectorize: str
) -> None:
    run = _start_games(place, "--vectorize", vectorize)
    _all_play(place, run)
    before = _games(place)
    mine = psutil.Process(place.worker("envrunner 1").pid).children(recursive=True)
    place.worker("envrunner 0").kill()
    its = [game for game in before if game not in mine]
    assert its
    assert len(its) < len(before)
    eventually(lambda: not any(game.is_running() for game in its), 30, lambda: str(its))
    assert all(game.is_running() for game in before if game in mine)
    trains_on(place.path / "run", run)
    assert "unexpected pid" not in run.output
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait(30)
    eventually(lambda: not place.processes(), 30, lambda: str(place.processes()))
    eventually(lambda: not _games(place), 30, lambda: str(_games(place)))


# A run with frequent faults needs no more at its end.


@pytest.mark.long
def test_nothing_grows_while_workers_come_and_go(place: Place) -> None:
    soak = [str(REPOSITORY / "benchmarks" / "soak.py"), "--minutes", "2"]
    run = place.start_program([sys.executable, *soak])
    assert run.wait(280) == 0, run.output
    found = json.loads(run.output.splitlines()[-1])
    faults = {
        "SIGKILL envrunner 1",
        "SIGSTOP envrunner 1",
        "SIGKILL learner 1",
        "SIGSTOP learner 1",
    }
    assert set(found["faults"]) == faults
    assert found["restarts"] >= 8, "the last may be too late to be noticed"
    assert found["books_balance"]
    lasting = {"driver", "learner 0", "envrunner 0"}
    assert lasting <= set(found["processes"])
    for name in lasting:
        growth = found["processes"][name]
        for key in ("descriptors", "threads"):
            # A worker that is there takes some of them that one that is not does not.
            assert growth[key]["last_third"] <= growth[key]["first_third"] + 3, (name, growth)
        # Allocators have not settled within two minutes, so that only a flood shows: 20 minutes of
        # the script say more.
        assert growth["rss"]["last_third"] <= growth["rss"]["first_third"] + 40, (name, growth)
