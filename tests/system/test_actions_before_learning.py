"""Whole runs of TD3: which actions reach the environment before learning begins, and after."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.place import status_of

BEGIN, STEPS = 800, 1600

#: Writes down the actions that it gets, in a file for each environment that is made.
RECORDED = """
import json, os
from pathlib import Path

import gymnasium
import numpy as np


class Recorded(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(np.float32([-1, 0]), np.float32([3, 1]))
    made = 0

    def __init__(self):
        Recorded.made += 1
        self.path = Path(f"actions-{os.getpid()}-{Recorded.made}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        with self.path.open("a") as file:
            print(json.dumps(action.tolist()), file=file)
        return np.zeros(3, np.float32), 0.0, False, False, {}
"""


@pytest.mark.usefixtures("local_workers")
def test_actions_are_uniform_before_learning_begins_and_near_the_policys_after(
    in_a_directory: Path,
) -> None:
    Path("recorded.py").write_text(RECORDED)
    status = status_of(
        *("train", "--env", "recorded:Recorded", "--algorithm", "td3", "--seed", 3),
        "--synchronous",
        *("--num-env-runners", 1, "--envs-per-runner", 1, "--fragment-steps", 8),
        *("--batch-size", 8, "--replay-begin", BEGIN, "--replay-batch-size", 8),
        # The policy stays where it began, in the middle of the Box.
        *("--replay-ratio", 8, "--lr", 1e-9, "--stop-steps", STEPS),
        *("--model", json.dumps({"hidden_sizes": [8]})),
    )
    assert status == 0
    files = [path.read_text().splitlines() for path in in_a_directory.glob("actions-*")]
    actions = np.array([json.loads(line) for line in max(files, key=len)])  # [steps, 2]
    assert len(actions) >= STEPS
    shares = (actions - [1, 0.5]) / [2, 0.5]  # [steps, 2] from -1 to 1
    counts = np.stack([np.histogram(x, 8, (-1, 1))[0] for x in shares[:BEGIN].T]) / BEGIN
    np.testing.assert_allclose(counts, 1 / 8, atol=0.04)
    np.testing.assert_allclose(shares[-400:].std(0), 0.1, rtol=0.2)
    # What follows the first update has the noise of the schedule at once.
    assert np.abs(shares[BEGIN:]).max() < 0.6
