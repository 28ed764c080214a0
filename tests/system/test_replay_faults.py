"""A replay in a run whose processes are killed, and one that does not fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.place import (
    assert_books_balance,
    checkpoints,
    metrics,
    status_of,
)

from juggler.runtime.checkpoints.checkpoint import read


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
