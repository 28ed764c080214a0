"""Runs of a league in a game of one move."""

from __future__ import annotations

from typing import Any

from juggler.runtime.checkpoints.checkpoint import Checkpoint

LEAGUE = """
env = "juggler:MatrixGame"
algorithm = "ppo"
num_env_runners = 1
envs_per_runner = 16
fragment_steps = 16
batch_size = 256
epochs = 2

[connectors]
learner = []

[league]
builder = "alphastar"
max_historical = 3
min_games = 1
options = {mains = 1, main_exploiters = 1, league_exploiters = 1, min_phase_steps = 500, \
max_phase_steps = 1_000}
"""


def players(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    return {each["player_id"]: each for each in checkpoint.counters["league"]["players"]}
