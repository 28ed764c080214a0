"""A replay in a run whose processes are killed, and one that does not fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.place import (
    REPOSITORY,
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    metrics,
    status_of,
    summary,
    trained_steps,
)

from juggler.runtime.checkpoints.checkpoint import read

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

MARKED_SETTINGS = """
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

AGAIN = "killed by SIGKILL. Starting it again"


@pytest.mark.long
def test_no_half_written_row_is_drawn_when_samplers_and_the_learner_are_killed(
    place: Place,
) -> None:
    directory = place.path / "run"
    place.write("mine.py", MARKED)
    place.write("run.toml", MARKED_SETTINGS)
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


@pytest.mark.usefixtures("local_workers")
def test_a_replay_that_does_not_fit_into_memory_is_told_before_a_run_begins(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--algorithm", "dqn", "--replay-capacity", 10**12, "--run-dir", "run")
    assert status_of("train", "cartpole", *options) != 0
    said = "".join(capsys.readouterr())
    assert "replay_capacity = 1000000000000: that many steps of " in said
    assert "of this host's memory are free. Set it to" in said
    assert not (in_a_directory / "run").exists()


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
