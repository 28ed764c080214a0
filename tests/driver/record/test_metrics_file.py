"""Metrics as a table that pandas takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from juggler.driver.record.metrics_file import metrics_table
from juggler.driver.record.run_directory import RunDirectoryError

LINES = """
{"env_steps_sampled": 10, "updates": 1, "modules": {"default": {"kl": 0.5}}}
{"env_steps_sampled": 20, "updates": 2, "weights_version": [1, 2]}
{"env_steps_sampled": 30, "updates": 3}
no line of metrics
[1]
{"env_steps_sampled": null}
{"env_steps_sampled": 20, "updates": 20, "episode_return_mean": null}
{"env_steps_sampled": 40, "upd
"""


def test_a_table_is_flat_and_has_the_steps_of_a_resumed_run_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(LINES.strip())
    assert metrics_table(tmp_path) == [
        {"env_steps_sampled": 10, "updates": 1, "modules/default/kl": 0.5},
        {"env_steps_sampled": 20, "updates": 2, "weights_version": [1, 2]},
        {"env_steps_sampled": 20, "updates": 20, "episode_return_mean": None},
    ]


def test_a_directory_without_metrics_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot read .*metrics\.jsonl: No such file"):
        metrics_table(tmp_path)
