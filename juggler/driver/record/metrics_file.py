"""Reads a run's `metrics.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from juggler.driver.record.run_directory import METRICS_FILE, RunDirectoryError, flat

_STEPS = "env_steps_sampled"


def metrics_table(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics of a run as rows of a table, oldest first. Steps that a resumed run made
    again count once, and what is not a line of metrics is left out.

    Raises:
        RunDirectoryError: the file cannot be read.
    """
    file = run_dir / METRICS_FILE
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise RunDirectoryError(f"cannot read {file}: {error.strerror}") from error
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = flat(json.loads(line))
            steps = row[_STEPS] + 0
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        while rows and rows[-1][_STEPS] > steps:
            rows.pop()
        rows.append(row)
    return rows
