"""MLflow."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from juggler.driver.record.event_file import flat
from juggler.driver.trackers.tracker import PROJECT

# Limits of MLflow's.
_MOST_METRICS = 1000  # in one call
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 6000  # characters
_LONGEST_NAME = 250  # likewise

_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"


class MlflowTracker:
    """A run of MLflow. Its environment variables decide the rest: MLFLOW_TRACKING_URI, which may be
    a file, and MLFLOW_EXPERIMENT_NAME."""

    def __init__(self) -> None:
        import mlflow  # takes seconds

        self._entities: Any = mlflow.entities
        self._client: Any = mlflow.MlflowClient()
        self._run_id = ""

    def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
        self._run_id = known_as
        if known_as:
            self._client.update_run(known_as, status="RUNNING")
            return known_as  # with the parameters that it began with: MLflow changes none
        name = os.environ.get(_EXPERIMENT, PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else None
        run = self._client.create_run(
            experiment_id or self._client.create_experiment(name),
            run_name=run_dir.resolve().name,
            tags={"run_dir": str(run_dir.resolve())},
        )
        self._run_id = run.info.run_id
        values = {mlflow_name(key): value for key, value in flat(config).items()}
        parameters = [
            self._entities.Param(key, str(value)[:_LONGEST_PARAMETER])
            for key, value in values.items()
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            some = parameters[first : first + _MOST_PARAMETERS]
            self._client.log_batch(self._run_id, params=some)
        return self._run_id

    def metrics(self, numbers: Mapping[str, float], env_steps: int) -> None:
        now = int(1e3 * time.time())
        found = [
            self._entities.Metric(mlflow_name(key), float(value), now, env_steps)
            for key, value in numbers.items()
        ]
        for first in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=found[first : first + _MOST_METRICS])

    def checkpoint(self, name: str, path: Path) -> None:
        self._client.log_artifacts(self._run_id, str(path), f"{name}/{path.name}")

    def summary(self, summary: Mapping[str, Any]) -> None:
        failed = bool(summary.get("failure"))
        try:
            for key in ("reason_for_stop", "solved", "failure"):
                if summary.get(key) is not None:
                    self._client.set_tag(self._run_id, key, str(summary[key]))
        finally:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def finish(self) -> None:
        pass  # MLflow takes checkpoints of a run that has ended, too


def mlflow_name(key: str) -> str:
    """A name that MLflow takes: of letters, digits and a few marks, and no other as a path. One
    wrong name makes MLflow refuse the whole batch. A key that has to be changed for that gets a
    digest behind it, so that no other key has its name."""
    parts = re.sub(r"[^\w.\- :/]", "-", key)[:_LONGEST_NAME].split("/")
    name = "/".join("-" if part in ("", ".", "..") else part for part in parts)
    if name == key:
        return name
    digest = hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
    return f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}"
