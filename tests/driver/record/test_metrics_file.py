"""Metrics as a table that pandas takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from juggler.driver.record.metrics_file import metrics_table
from juggler.driver.record.run_directory import RunDirectoryError

LINES = """
{"env_steps_sampled": 10, "wall_time": 1.0, "modules": {"default": {"kl": 0.5}}}
{"env_steps_sampled": 20, "wall_time": 2.0, "weights_version": [1, 2]}
{"env_steps_sampled": 30, "wall_time": 3.0}
no line of metrics
[1]
{"env_steps_sampled": null, "wall_time": 4.0}
{"env_steps_sampled": 40}
{"env_steps_sampled": 20, "wall_time": 0.5, "episode_return_mean": null}
{"env_steps_sampled": 40, "upd
"""

CLOCKED = ("env_steps_sampled", "wall_time", "training_time")


def _clocks(seconds: float) -> dict[str, float]:
    """Older runs have one clock."""
    return {"wall_time": seconds, "training_time": seconds}


def test_a_table_is_flat_and_a_resumed_run_has_its_steps_once_and_one_clock(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(LINES.strip())
    assert metrics_table(tmp_path) == [
        {"env_steps_sampled": 10, **_clocks(1.0), "modules/default/kl": 0.5},
        {"env_steps_sampled": 20, **_clocks(2.0), "weights_version": [1, 2]},
        {"env_steps_sampled": 20, **_clocks(2.5), "episode_return_mean": None},
    ]


def test_each_clock_continues_in_a_resumed_run(tmp_path: Path) -> None:
    lines = [(100, 30.0, 1.0), (200, 31.0, 2.0), (200, 9.0, 0.5), (300, 9.5, 1.0)]
    texts = [json.dumps(dict(zip(CLOCKED, each, strict=True))) for each in lines]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*texts, ""]))
    found = [tuple(line[key] for key in CLOCKED) for line in metrics_table(tmp_path)]
    assert found == [(100, 30.0, 1.0), (200, 31.0, 2.0), (200, 40.0, 2.5), (300, 40.5, 3.0)]


def test_a_directory_without_metrics_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="jsonl"):
        metrics_table(tmp_path)
