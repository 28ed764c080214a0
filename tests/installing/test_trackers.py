"""Weights & Biases records a run's metrics by itself, as a guide says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.alone import Alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # pip fetches what it installs

SCRIPT = """
import juggler, wandb
with wandb.init(mode="offline", sync_tensorboard=True):
    juggler.train("cartpole", stop_steps=60_000, run_dir="run", worker_timeout_seconds=240)
"""


def test_what_tensorboard_shows_of_a_run_is_in_its_offline_record(
    tmp_path: Path, needed: Path, wheel: Path
) -> None:
    alone = Alone(tmp_path, needed, wheel)
    alone.run("-m", "pip", "install", "-q", "--no-compile", "wandb")
    alone.run("-c", SCRIPT)
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    recorded = record.read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = {line["env_steps_sampled"] for line in lines}
    for tag in (b"env_steps_in_flight", b"updates", b"modules/default/policy_loss"):
        assert tag in recorded
    assert recorded.count(b"env_steps_in_flight") >= len(steps), "a row for each step"
