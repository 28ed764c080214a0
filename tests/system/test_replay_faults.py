"""A replay in a run whose processes are killed, and one that does not fit into memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import status_of
from support.place import (
    REPOSITORY,
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    metrics,
    summary,
    trained_steps,
)

MARKED = """
import gymnasium, numpy as np, torch

from juggler.learner.algorithms.dqn import DqnAlgorithm
from juggler.learner.algorithms.dqn.core import Dqn


class Marked(gymnasium.Env):
    '''Observations and rewards that say of which episode they are, and of which step.'''

    observation_space = gymnasium.spaces.Box(0, 1e7, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.mark, self.steps = int(self.np_random.integers(1, 1 << 20)), 0
        self.length = int(self.np_random.integers(1, 30))
        return self.see(), {}

    def step(self, action):
        self.steps += 1
        over, terminates = self.steps == self.length, self.mark % 2 == 0
        return self.see(), float(self.mark), over and terminates, over and not terminates, {}

    def see(self):
        return np.array([self.mark, self.steps], np.float32)


class CheckedDqn(Dqn):
    '''Refuses a transition that is not of one episode.'''

    def loss(self, forward, columns, state):
        if "discounts" in columns:
            before = columns["observations"][:, 0]  # [B, 4]: two frames of a mark and a step
            after = columns["last_observations"]  # [B, 4]
            mark, over = before[:, 2], columns["discounts"][:, 0] == 0  # [B]
            whole = (before[:, 0] == mark) & (columns["rewards"][:, 0] == mark)
            whole &= (before[:, 1] == before[:, 3] - 1) | (before[:, 3] == 0)
            follows = (after[:, 2] == mark) & (after[:, 3] == before[:, 3] + 1)
            follows &= (after[:, 0] == mark) & (after[:, 1] == before[:, 3])
            if not (whole & (follows | over)).all():
                raise AssertionError("a transition is of two episodes")
        return super().loss(forward, columns, state)


class Checked(DqnAlgorithm):
    core = CheckedDqn
"""

SETTINGS = """
env = "mine:Marked"
algorithm = "mine:Checked"
num_env_runners = 2
envs_per_runner = 4
fragment_steps = 8
batch_size = 64
replay_capacity = 500
replay_begin = 200
replay_batch_size = 16
replay_ratio = 2.0
n_step = 1
reward_scale = 1e-6
priority_exponent = 0.6
checkpoint_seconds = 1
[connectors]
env_to_module = [{use = "frame_stack", k = 2}]
"""

LOGGED = """
import os
from pathlib import Path

import gymnasium, numpy as np

from juggler.learner.algorithms.dqn import DqnAlgorithm
from juggler.learner.algorithms.dqn.core import Dqn


class Numbered(gymnasium.Env):
    '''Observations that come once in a run: of which process, environment and step they are.'''

    observation_space = gymnasium.spaces.Box(0, 1e7, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self, **_):
        Numbered.made += 1
        self.number, self.seen = Numbered.made, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 30))
        return self.see(), {}

    def step(self, action):
        self.left -= 1
        return self.see(), 1.0, False, self.left == 0, {}

    def see(self):
        self.seen += 1
        return np.array([os.getpid(), self.number, self.seen], np.float32)


class LoggedDqn(Dqn):
    def step(self, state, sample, *seam):
        drawn = sample["observations"].flatten(0, 1).int().tolist()
        with Path(__file__).with_name(f"drawn-{os.getpid()}").open("a") as file:
            file.writelines(f"{step}\\n" for step in drawn)
        return super().step(state, sample, *seam)


class Logged(DqnAlgorithm):
    core = LoggedDqn
"""

ONCE = """
env = "mine:Numbered"
algorithm = "mine:Logged"
num_env_runners = 2
envs_per_runner = 4
fragment_steps = 8
batch_size = 64
replay_selector = "fifo"
max_times_sampled = 1
replay_begin = 0
replay_batch_size = 16
replay_ratio = 1.0
save_replay = false
checkpoint_seconds = 1
"""

AGAIN = "killed by SIGKILL. Starting it again"


@pytest.mark.long
def test_no_half_written_row_is_drawn_when_samplers_and_the_learner_are_killed(
    place: Place,
) -> None:
    directory = place.path / "run"
    place.write("mine.py", MARKED)
    place.write("run.toml", SETTINGS)
    path = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests:{place.path}"}
    run = place.start("train", "run.toml", "--run-dir", "run", **path)

    def goes_on(steps: int) -> None:
        reached = trained_steps(directory) + steps
        eventually(lambda: trained_steps(directory) > reached, 120, lambda: run.output)

    goes_on(2000)  # the table is full
    eventually(lambda: checkpoints(directory), 60, lambda: run.output)
    for number, worker in enumerate(["envrunner 0", "learner 0", "envrunner 1", "learner 0"], 1):
        place.worker(worker).kill()
        eventually(lambda: run.output.count(AGAIN) >= number, 60, lambda: run.output)  # noqa: B023
        goes_on(1000)
    lines = metrics(directory)
    assert lines[-1]["modules"]["default"]["replay_rows"] == 500.0
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert "of two episodes" not in run.output
    assert_books_balance(directory)
    end = summary(directory)
    assert end["restarts"] == 4
    assert end["learner_steps"]["learner-0"]["trained"] == end["env_steps_trained"]
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_each_step_is_learned_from_once_or_counted_as_lost_when_the_learner_is_killed(
    place: Place,
) -> None:
    directory = place.path / "run"
    place.write("mine.py", LOGGED)
    place.write("run.toml", ONCE)
    path = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests:{place.path}"}
    run = place.start("train", "run.toml", "--run-dir", "run", **path)
    lives = []
    for restarts in range(3):
        reached = trained_steps(directory) + 1000
        eventually(lambda: trained_steps(directory) > reached, 120, lambda: run.output)  # noqa: B023
        learner = place.worker("learner 0")
        lives.append(learner.pid)
        if restarts < 2:
            eventually(lambda: checkpoints(directory), 60, lambda: run.output)
            learner.kill()
            eventually(lambda: run.output.count(AGAIN) > restarts, 60, lambda: run.output)  # noqa: B023
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(directory)
    logs = [(place.path / f"drawn-{pid}").read_text().splitlines() for pid in lives]
    drawn = [step for log in logs for step in log]
    assert len(drawn) == len(set(drawn)), "a step was learned from twice"
    end = summary(directory)
    assert end["restarts"] == 2
    trained, lost = end["env_steps_trained"], end["env_steps_dropped"]
    # Less than a sample is stored when a learner ends. In the updates that it has not answered by
    # then it may have drawn what counts as lost.
    unheard = lost.get("learner_lost", 0) + lost.get("shutdown", 0)
    assert trained - 16 * len(lives) < len(drawn) <= trained + unheard
    told = end["modules"]["default"]
    assert told["replay_rows"] == told["replay_rows_waiting"] < 16
    assert told["replay_rows_drawn"] <= len(logs[-1])
    place.assert_nothing_is_left()


@pytest.mark.usefixtures("local_workers")
def test_a_replay_that_does_not_fit_into_memory_is_told_before_a_run_begins(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--algorithm", "dqn", "--replay-capacity", 10**12, "--run-dir", "run")
    assert status_of("train", "cartpole", *options) != 0
    said = "".join(capsys.readouterr())
    assert "replay_capacity = 1000000000000: so many kept steps, of " in said
    assert "of this host's memory are free. Set it to" in said
    assert not (in_a_directory / "run").exists()
