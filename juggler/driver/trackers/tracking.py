"""Hands a run's configuration, metrics and checkpoints to the trackers that `track` names."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Full, Queue, SimpleQueue
from typing import Any, Final

from juggler.driver.callbacks import Callback, Evaluation, MetricsLine, Run
from juggler.driver.driver_config import TENSORBOARD, ConfigError
from juggler.driver.record.checkpoints import write_synced
from juggler.driver.record.event_file import flat
from juggler.driver.signals import way_out
from juggler.driver.trackers.tracker import PROJECT, Tracker
from juggler.runtime.checkpoints.checkpoint import BEST
from juggler.runtime.installing import installing

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


#: What trackers call a run, so that it is the same one when it is resumed.
_NAMES_FILE = "trackers.json"
#: Where the copy of a checkpoint lies while trackers take it: the run may delete its own meanwhile.
_COPY_DIRECTORY = ".tracked.tmp"

#: Of checkpoints, on average, before the end of a run: trackers keep all that they get.
_BYTES_A_SECOND = 100_000
_MOST_WAITING = 600  # lines of metrics, of which there is one in a second
_TELL_SECONDS = 2.0  # until people are told that trackers are waited for
_END_SECONDS = 120.0  # to send what is left, checkpoints among it

_TRACKERS: Final[Mapping[str, Callable[[], Tracker]]] = {
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}


def tracking(names: list[str]) -> tuple[Callback, ...]:
    """A callback for the trackers of these names, if there are any beside TensorBoard, whose events
    the run directory has.

    Raises:
        ConfigError: the package of one of them is not installed, or it cannot be used.
    """
    wanted = [name for name in dict.fromkeys(names) if name != TENSORBOARD]
    for name in wanted:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # or a directory of that name is in the way
            raise ConfigError(f"track = {names}: {name} is missing: {installing(name)}")
    return (Tracking({name: _TRACKERS[name]() for name in wanted}),) if wanted else ()


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A checkpoint that trackers are to have."""

    path: Path


class Tracking(Callback):
    """Hands everything to a thread, since trackers may have to wait for a network. A tracker that
    cannot begin ends the run; later a problem of a tracker is a warning, and the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = trackers
        self._jobs: Queue[Callable[[str], None] | None] = Queue(_MOST_WAITING)  # None: the end
        self._problems: SimpleQueue[str] = SimpleQueue()
        self._told: set[str] = set()
        self._thread: threading.Thread | None = None
        self._copies = Path()
        self._found: dict[str, _Found] = {}  # "newest" and "best"
        self._recorded: dict[tuple[str, str], _Found] = {}  # by tracker, and one of these two
        self._next_checkpoint = 0.0  # of the monotonic clock
        self._summary: Mapping[str, Any] = {}

    def on_start(self, run: Run) -> None:
        file = run.run_dir / _NAMES_FILE
        names: dict[str, str] = json.loads(file.read_bytes()) if file.is_file() else {}
        begun: list[Tracker] = []
        try:
            for name, tracker in self._trackers.items():
                names[name] = tracker.start(run.run_dir, run.config, names.get(name, ""))
                begun.append(tracker)
        except Exception:
            for tracker in begun:
                with suppress(Exception):  # what went wrong first is what is told
                    tracker.summary({"failure": "another tracker cannot begin"})
                with suppress(Exception):
                    tracker.finish()
            raise
        write_synced(file, json.dumps(names).encode() + b"\n")
        self._copies = run.run_dir / _COPY_DIRECTORY
        shutil.rmtree(self._copies, ignore_errors=True)  # of a driver that was killed
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        self._thread.start()

    def on_metrics(self, run: Run, metrics: MetricsLine) -> None:
        numbers = _numbers(metrics)
        steps = int(metrics["env_steps_sampled"])
        try:
            self._jobs.put_nowait(lambda name: self._trackers[name].metrics(numbers, steps))
        except Full:
            self._problems.put("trackers are too slow: lines of metrics are left out")
        self._tell(run)

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._found["newest"] = _Found(path)  # sent after a line of metrics

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.is_best:
            self._found["best"] = _Found(run.run_dir / BEST / f"{evaluation.update:09d}")

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._thread is None:
            return  # they have not begun
        best = (summary.get("best") or {}).get("checkpoint")
        for name, last in (("newest", summary.get("checkpoint")), ("best", best)):
            found = self._found.get(name)
            if last and (found is None or found.path.name != Path(last).name):
                self._found[name] = _Found(Path(last))
        self._summary = summary
        while self._jobs.full():  # the end needs a place
            with suppress(Empty):
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(_TELL_SECONDS)
        if self._thread.is_alive():
            how = way_out("Ctrl-C leaves without")
            run.message(f"waiting for {', '.join(self._trackers)}{how}")
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._problems.put(f"trackers have not finished within {_END_SECONDS:.0f} s")
        self._tell(run)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._each(job)
            if not self._summary:  # else the last ones are recorded, behind it
                self._send_checkpoints()
        self._each(lambda tracker: self._trackers[tracker].summary(self._summary))
        for name, found in self._found.items():  # which nobody deletes now
            self._each(partial(self._record, name=name, found=found, path=found.path))
        self._each(lambda tracker: self._trackers[tracker].finish())

    def _each(self, job: Callable[[str], None]) -> None:
        """Do it with every tracker, by its name."""
        for name in self._trackers:
            try:
                job(name)
            except Exception as error:
                self._problems.put(f"{name}: {type(error).__name__}: {error}")

    def _send_checkpoints(self) -> None:
        """Have those recorded that are new, but not more often than their size allows."""
        if time.monotonic() < self._next_checkpoint:
            return
        size = 0
        for name, found in dict(self._found).items():
            if all(self._recorded.get((each, name)) is found for each in self._trackers):
                continue
            copy = self._copies / found.path.name
            try:
                files = list(found.path.iterdir())
                # Before the copy: where the disk has no room for it, another waits as long.
                size += sum(file.stat().st_size for file in files)
                copy.mkdir(parents=True)
                for file in files:
                    shutil.copyfile(file, copy / file.name)
                self._each(partial(self._record, name=name, found=found, path=copy))
            except OSError as error:
                if found.path.exists():  # else the run has deleted it: there is a newer one
                    why = error.strerror or error
                    self._problems.put(f"no copy of {found.path} for trackers: {why}")
            finally:
                shutil.rmtree(self._copies, ignore_errors=True)
        self._next_checkpoint = time.monotonic() + size / _BYTES_A_SECOND

    def _record(self, tracker: str, name: str, found: _Found, path: Path) -> None:
        """Have a checkpoint recorded, unless it is.

        Args:
            tracker: its name.
            name: "newest" or "best".
            found: the checkpoint.
            path: of it, or of a copy.
        """
        if self._recorded.get((tracker, name)) is not found:
            self._trackers[tracker].checkpoint(name, path)
            self._recorded[tracker, name] = found

    def _tell(self, run: Run) -> None:
        """Tell people what is new of problems, in the thread of the run."""
        while not self._problems.empty():
            if (text := self._problems.get()) not in self._told:
                self._told.add(text)
                run.message(text, "warning")


def _numbers(metrics: MetricsLine) -> dict[str, float]:
    """Those of a line that a curve can be drawn of."""
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}
