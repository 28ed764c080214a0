"""Synchronous runs: the same seed gives the same numbers.

A round asks each of two EnvRunners for several batches, so that their answers come in any order.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.place import (
    REPOSITORY,
    Command,
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    metrics,
    status_of,
    summary,
)

SETTINGS = """
synchronous = true
seed = 7
progress = "off"
num_env_runners = 2
envs_per_runner = 3
fragment_steps = 8
batch_size = 140
checkpoint_updates = 4
keep_checkpoints = 1000
"""

#: What remembers something from step to step, or from update to update.
CASES = {
    "plain": 'env = "CartPole-v1"',
    "connectors": """
        env = "CartPole-v1"
        [connectors]
        env_to_module = ["mean_std_filter", "previous_actions_and_rewards"]
        learner = ["normalize_rewards"]
    """,
    "continuous": """
        env = "Pendulum-v1"
        env_kwargs = {max_episode_steps = 30}
        [connectors]
        env_to_module = ["mean_std_filter", {use = "frame_stack", k = 3}]
        module_to_env = ["rescale_actions"]
    """,
    "masks and permutations": """
        env = "support.toys:NextFree"
        env_kwargs = {mask_in = "info"}
        algorithm = "ppo"
        epochs = 2
        minibatches = 3
    """,
    "reused batches": """
        env = "CartPole-v1"
        algorithm = "appo"
        buffer_batches = 3
        batch_uses = 2
    """,
    "old steps beside new ones": """
        env = "CartPole-v1"
        num_learners = 2
        replay_share = 0.6
        replay_capacity = 300
        model = {hidden_sizes = [16], recurrent = "lstm"}
    """,
    "actions that are uniform before learning begins": """
        env = "Pendulum-v1"
        env_kwargs = {max_episode_steps = 30}
        algorithm = "td3"
        model = {hidden_sizes = [16]}
        exploration_ladder = 2.0
        replay_begin = 700  # in the fifth update, between two checkpoints
        replay_ratio = 4.0
        replay_batch_size = 32
    """,
    "agents in turn that keep steps": """
        # Without the wrapper that takes an illegal move for a game that is lost: it is an error.
        env = "pettingzoo.classic.connect_four.connect_four:raw_env"
        algorithm = "dqn"
        replay_begin = 100
        replay_ratio = 4.0
        replay_batch_size = 32
        [agents]
        player_0 = "first"
        player_1 = "second"
        [modules.second]
        n_step = 3
        priority_exponent = 0.6
    """,
    "agents at once that keep steps": """
        env = "support.small_games:Tag"
        [modules.adversary]
        algorithm = "r2d2"
        batch_size = 96  # of two agents
        replay_begin = 100
        replay_ratio = 4.0
        replay_batch_size = 8
        model = {hidden_sizes = [16], recurrent = "lstm"}
        [modules.runner]
        algorithm = "sac"
        batch_size = 48
        num_learners = 2
        save_replay = false  # a checkpoint would hold that of one of them
        replay_begin = 100
        replay_ratio = 4.0
        replay_batch_size = 32
    """,
    "two learners": """
        env = "CartPole-v1"
        num_learners = 2
        algorithm = "ppo"
        epochs = 2
        minibatches = 3
    """,
    "global generators": 'env = "mine:Dice"\nmodule = "mine:WithDropout"',
}

IN_TURN = "agents in turn that keep steps"

#: The slow tests try these cases, and the long tests the others.
SLOW = ("old steps beside new ones", IN_TURN, "two learners")

#: "connectors" is the case of a run that is killed.
WITH_A_BREAK = [case for case in CASES if case != "connectors"]


def _when(case: str) -> list[pytest.MarkDecorator]:
    """Marks of a case."""
    return [pytest.mark.slow if case in SLOW else pytest.mark.long]


#: Random numbers from everywhere, and answers whose order is any.
MINE = """
import random, secrets, time

import gymnasium, juggler, numpy as np, torch


class Dice(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.show(), {}

    def step(self, action):
        time.sleep(secrets.randbelow(3) / 1000)
        self.steps += 1
        return self.show(), float(action), random.random() < 0.05, self.steps == 30, {}

    def show(self):
        return np.array([random.random(), np.random.rand(), self.np_random.random()], np.float32)


class WithDropout(juggler.Catalog):
    def build_encoder(self):
        encoder = super().build_encoder()
        encoder.append(torch.nn.Dropout(0.2))
        return encoder
"""


def started(place: Place, case: str, run: str, **keys: Any) -> Command:
    """A new run in the directory `run`."""
    place.write("mine.py", MINE)
    place.write("run.toml", SETTINGS + CASES[case])
    return place.start("train", "run.toml", *_options(run_dir=run, **keys), **_path(place))


def resumed(place: Place, run: str, **keys: Any) -> Command:
    return place.start("train", "--resume", run, *_options(**keys), **_path(place))


def ended(command: Command, status: int = 0) -> None:
    assert command.wait(110) == status, command.output


def _options(**keys: Any) -> list[object]:
    return [word for key, value in keys.items() for word in (f"--{key.replace('_', '-')}", value)]


def _path(place: Place) -> dict[str, str]:
    return {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests:{place.path}"}


def checkpoint(place: Place, run: str, update: int) -> Path:
    return place.path / run / "checkpoints" / f"{update:09d}"


def record(place: Place, run: str, update: int) -> dict[str, Any]:
    """A checkpoint's contents beside arrays, times, paths and resumes."""
    path = checkpoint(place, run, update) / "checkpoint.json"
    found: dict[str, Any] = json.loads(path.read_text())
    kept = {key: found[key] for key in ("counters", "spaces")}
    kept["extra"] = {key: module["extra"] for key, module in found["modules"].items()}
    del kept["counters"]["wall_time"], kept["counters"]["training_time"]
    return kept


def assert_equal(place: Place, run: str, other: str, update: int) -> None:
    first, second = (checkpoint(place, each, update) / "state.safetensors" for each in (run, other))
    assert first.read_bytes() == second.read_bytes(), f"update {update}"
    assert record(place, run, update) == record(place, other, update)


def assert_every_step_is_kept(run_dir: Path) -> None:
    """Check each module's kept steps, also from before the resume."""
    end = metrics(run_dir)[-1]
    for module_id, module in end["by_module"].items():
        assert end["modules"][module_id]["replay_rows"] == module["env_steps_trained"] > 0


def trained(place: Place, run: str, update: int) -> int:
    return int(record(place, run, update)["counters"]["trained"])


@pytest.mark.usefixtures("local_workers")
@pytest.mark.parametrize("case", [pytest.param(each, marks=_when(each)) for each in WITH_A_BREAK])
def test_a_run_with_a_break_at_a_checkpoint_equals_one_without(
    place: Place, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(started(place, case, "whole", stop_steps=1100))
    first, *_, last = (int(path.name) for path in checkpoints(place.path / "whole"))
    half = trained(place, "whole", first)
    # The others in this process, which hashes strings in another way than that of the first one.
    monkeypatch.chdir(place.path)
    options = _options(run_dir="broken", stop_steps=half)
    assert status_of("train", "run.toml", *options) == 0
    assert summary(place.path / "broken")["updates"] == first
    assert_equal(place, "whole", "broken", first)  # a second run of the same seed
    assert status_of("train", "--resume", "broken", *_options(stop_steps=1100)) == 0
    assert_equal(place, "whole", "broken", last)
    assert_books_balance(place.path / "broken")
    end = record(place, "whole", last)["counters"]
    dropped = {reason for reason, steps in end["dropped"].items() if steps}
    if case == IN_TURN:
        assert_every_step_is_kept(place.path / "broken")
        dropped -= {"stale"}  # of agents whose rows are not full when the others' batches are
    assert (end["in_flight"], dropped) == (0, set())
    assert end["episodes"] == len(end["returns"]) > 0
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_run_that_was_killed_behind_a_checkpoint_equals_one_that_was_not(place: Place) -> None:
    run = started(place, "connectors", "killed")
    eventually(lambda: checkpoint(place, "killed", 8).exists(), 60, lambda: run.output)
    run.process.send_signal(signal.SIGKILL)
    run.wait(30)
    eventually(lambda: not place.processes(), 20)
    newest = max(int(path.name) for path in (place.path / "killed/checkpoints").glob("0*"))
    steps = (newest + 8) * 144  # of updates; the last of them may have a few more or less
    ended(resumed(place, "killed", stop_steps=steps))
    ended(started(place, "connectors", "whole", stop_steps=steps))
    for update in (4, newest, newest + 4):
        assert_equal(place, "whole", "killed", update)
