"""Weights & Biases."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from juggler.driver.driver_config import ConfigError
from juggler.driver.trackers.tracker import PROJECT

_WITHOUT_SERVER = ("offline", "disabled", "dryrun")
_STEPS = "env_steps_sampled"


class WandbTracker:
    """A run of wandb. Its environment variables decide the rest: WANDB_PROJECT, WANDB_MODE=offline.

    Raises:
        ConfigError: nobody is logged in.
    """

    def __init__(self) -> None:
        import wandb  # takes a second

        self._wandb: Any = wandb
        self._run: Any = None
        self._failed = False
        if os.environ.get("WANDB_MODE") in _WITHOUT_SERVER:
            return
        try:
            wandb.login()  # here, where it can ask for a key
        except Exception as error:
            raise ConfigError(
                f"track = ['wandb']: {error}; log in with wandb login, or set WANDB_MODE=offline"
            ) from error

    def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
        if self._wandb.run is not None:
            raise RuntimeError(
                f"wandb has a run in this process already, {self._wandb.run.name}, which this one "
                "would go into: finish it first, or train in another process"
            )
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.resolve().name,
            dir=str(run_dir),
            id=known_as or None,
            resume="allow" if known_as else None,
            config=dict(config),
            allow_val_change=True,
            # The run shows itself.
            settings=self._wandb.Settings(console="off"),
        )
        # Not wandb's own step: a run that is resumed goes back a little.
        self._run.define_metric(_STEPS)
        self._run.define_metric("*", step_metric=_STEPS)
        return str(self._run.id)

    def metrics(self, numbers: Mapping[str, float], env_steps: int) -> None:
        self._run.log({**numbers, _STEPS: env_steps})

    def checkpoint(self, name: str, path: Path) -> None:
        of_run = re.sub(r"[^\w.-]", "-", self._run.name)
        artifact = self._wandb.Artifact(f"{of_run}-checkpoint", type="model")
        for file in path.iterdir():  # `add_dir` would print a line
            artifact.add_file(str(file))  # which copies it
        self._run.log_artifact(artifact, aliases=[name])

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._failed = bool(summary.get("failure"))
        self._run.summary.update(dict(summary))

    def finish(self) -> None:
        self._run.finish(exit_code=1 if self._failed else 0)
