"""A sweep's directory, and what it was started with."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from juggler.driver.callbacks import MetricsLine
from juggler.driver.config import ConfigError
from juggler.driver.given_config import read_toml
from juggler.driver.record.checkpoints import write_synced
from juggler.driver.record.run_directory import RunDirectoryError, to_toml
from juggler.experiments.directory import make_directory

PLAN_FILE = "sweep.toml"
STUDY_FILE = "study.db"
BEST_FILE = "best.toml"
TABLE_FILE = "trials.csv"
PICTURE_FILE = "sweep.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What a sweep varies, and how its trials are compared.

    Attributes:
        run: what the configuration of every trial gives, flat.
        stops: the stop conditions that the best settings are written with.
        space: by key, its values as they were given.
        metric: a key of a line of metrics, flat.
        minimize: the least is the best.
        prune: trials that fall behind are ended.
        trials: how many there are to be.
    """

    run: dict[str, Any]
    stops: dict[str, Any]
    space: dict[str, str | list[Any]]
    metric: str
    minimize: bool
    prune: bool
    trials: int

    def share_done(self, line: MetricsLine) -> float:
        """How much of a trial is done at a line of its metrics, from 0 to 1."""
        shares = [
            line.get(measure, 0) / self.run[stop]
            for stop, measure in (
                ("stop_steps", "env_steps_trained"),
                ("stop_seconds", "training_time"),
            )
            if self.run.get(stop) not in (None, "none")
        ]
        return float(min(1.0, max(shares)))


class SweepDirectory:
    """The directory of a sweep:

    - `sweep.toml`: what it was started with;
    - `study.db`: Optuna's study, in SQLite;
    - `trials/`: of each trial its configuration, its run directory, and what it printed;
    - `best.toml`, `trials.csv`, `sweep.png`: the result.

    Attributes:
        path: of the directory.
        trials: of the runs.
        study: Optuna's file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials = path / "trials"
        self.study = path / STUDY_FILE

    @classmethod
    def create(cls, path: Path | None, plan: SweepPlan) -> Self:
        """
        Args:
            path: where nothing is yet; None: a new directory under runs/.
            plan: what is written there.

        Raises:
            RunDirectoryError: something is there, or it cannot be made.
        """
        env, content = str(plan.run.get("env", "")), to_toml(asdict(plan))
        made = make_directory(path, "sweep", env, PLAN_FILE, content, "juggler sweep --resume")
        (made / "trials").mkdir()
        return cls(made)

    @classmethod
    def open(cls, path: Path) -> tuple[Self, SweepPlan]:
        """
        Raises:
            RunDirectoryError: it is not that of a sweep.
            ConfigError: somebody has broken `sweep.toml`.
        """
        if not (path / PLAN_FILE).is_file():
            raise RunDirectoryError(f"{path} has no {PLAN_FILE}: give the directory of a sweep")
        try:
            plan = msgspec.convert(read_toml(path / PLAN_FILE), SweepPlan)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path / PLAN_FILE}: {error}") from error
        (path / "trials").mkdir(exist_ok=True)  # what made the plan may have been killed then
        return cls(path), plan

    def run_dir(self, number: int) -> Path:
        """Of a trial."""
        return self.trials / f"{number:03}"

    def write_config(self, number: int, values: Mapping[str, Any]) -> Path:
        """Write the configuration of a trial."""
        path = self.trials / f"{number:03}.toml"
        path.write_bytes(to_toml(values))
        return path

    def write_best(self, values: Mapping[str, Any], about: str) -> Path:
        """Write the best settings as a configuration, below a comment."""
        path = self.path / BEST_FILE
        write_synced(path, f"# {about}\n".encode() + to_toml(values))
        return path

    def write_table(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write a row for each trial."""
        path = self.path / TABLE_FILE
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path
