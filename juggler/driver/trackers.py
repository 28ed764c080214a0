"""Sends configuration, metrics and checkpoints to the trackers in `track`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Full, Queue, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from juggler.driver.callbacks import Callback, Evaluation, MetricsLine, Run
from juggler.driver.driver_config import TENSORBOARD, ConfigError
from juggler.driver.reporting.run_directory import flat
from juggler.driver.signals import stop_hint
from juggler.runtime.checkpoints.checkpoint import BEST, write_synced
from juggler.runtime.install_commands import installing

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

#: Default place for runs, unless an environment variable names another one.
PROJECT: Final = "juggler"


class Tracker(ABC):
    """Logs one run to an external tracker.

    `start` is called in the thread of the run, and everything else in another thread, for which
    only the end of the run waits.
    """

    takes_checkpoints = True

    @abstractmethod
    def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
        """Start logging, and return the tracker's name for the run.

        Args:
            run_dir: of the run.
            config: its configuration, flat.
            known_as: in a resumed run, the name that the first call returned; "": a new run.
        """

    @abstractmethod
    def metrics(self, numbers: Mapping[str, float], env_steps: int) -> None:
        """Log a flat line of metrics at this many sampled steps."""

    def checkpoint(self, name: str, path: Path) -> None:
        """Log a checkpoint, "newest" or "best"; its directory may be deleted afterwards."""
        return

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Log the content of `summary.json`; the last checkpoints may follow."""
        return

    def finish(self) -> None:
        """Close everything."""
        return


#: Prefixes of keys in TensorBoard's section of times.
_OF_TIME: Final = ("seconds/", "inference/", "learner_steps/", "env_steps_")


class TensorboardTracker(Tracker):
    """TensorBoard events in a file `events.out.tfevents.*`, created at the first line."""

    takes_checkpoints = False

    def __init__(self) -> None:
        self._directory = Path()
        self._writer: RecordWriter | None = None

    def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
        self._directory = run_dir
        return ""

    def metrics(self, numbers: Mapping[str, float], env_steps: int) -> None:
        try:
            self._append(numbers, env_steps)
        except OSError:
            self.finish()  # the file may end in half a record; the next line starts a new one
            raise

    def finish(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # each line was flushed
                writer.close()

    def _append(self, numbers: Mapping[str, float], env_steps: int) -> None:
        # Not its EventFileWriter, which imports TensorFlow, and writes in a thread, where a full
        # disk shows only as a traceback.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # takes 0.1 s
        from tensorboard.summary.writer.record_writer import RecordWriter

        event = Event(wall_time=time.time(), step=env_steps)
        for key, value in numbers.items():
            event.summary.value.add(tag=tag_of(key), simple_value=float(value))
        if self._writer is not None and not any(self._directory.glob("events.out.tfevents.*")):
            self.finish()  # the run's directory was deleted and created again
        events = [event]
        if self._writer is None:
            name = f"events.out.tfevents.{event.wall_time:.6f}.{socket.gethostname()}.{os.getpid()}"
            self._writer = RecordWriter((self._directory / name).open("ab"))
            # TensorBoard then discards what the run wrote after this step before it was resumed.
            start = Event(wall_time=event.wall_time, step=env_steps)
            start.session_log.status = SessionLog.START
            events = [Event(wall_time=event.wall_time, file_version="brain.Event:2"), start, event]
        for each in events:
            self._writer.write(each.SerializeToString())
        self._writer.flush()


def tag_of(key: str) -> str:
    """Return a number's TensorBoard tag, whose first part is its section."""
    name = key.removeprefix("modules/")
    if name != key or name.startswith(("staleness_", "updates", "weights_")):
        return f"train/{name}"
    if key.startswith(("episode", "evaluation_")):
        return f"rollout/{key}"
    is_of_a_table = "/" in key and not key.startswith(_OF_TIME)
    return key if is_of_a_table else f"time/{key}"


# Limits of MLflow.
_MOST_METRICS = 1000  # per call
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 6000  # characters
_LONGEST_NAME = 250  # characters

_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"


class MlflowTracker(Tracker):
    """A run of MLflow, configured by its environment variables."""

    def __init__(self) -> None:
        import mlflow  # takes seconds

        self._entities: Any = mlflow.entities
        self._client: Any = mlflow.MlflowClient()
        self._run_id = ""

    def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
        self._run_id = known_as
        if known_as:
            self._client.update_run(known_as, status="RUNNING")
            return known_as  # with its first parameters: MLflow changes none
        name = os.environ.get(_EXPERIMENT, PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else None
        run = self._client.create_run(
            experiment_id or self._client.create_experiment(name),
            run_name=run_dir.resolve().name,
            tags={"run_dir": str(run_dir.resolve())},
        )
        # One long or odd parameter would make MLflow reject all of them.
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


def mlflow_name(key: str) -> str:
    """Return a name that MLflow accepts.

    One invalid name makes MLflow reject the whole batch. A changed key gets a digest, so that no
    other key has its name.
    """
    parts = re.sub(r"[^\w.\- :/]", "-", key)[:_LONGEST_NAME].split("/")
    name = "/".join("-" if part in ("", ".", "..") else part for part in parts)
    if name == key:
        return name
    digest = hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
    return f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}"


_WITHOUT_SERVER = ("offline", "disabled", "dryrun")
_STEPS = "env_steps_sampled"


class WandbTracker(Tracker):
    """A run of wandb, configured by its variables, such as WANDB_PROJECT.

    Raises:
        ConfigError: there is no login.
    """

    def __init__(self) -> None:
        import wandb  # takes a second

        self._wandb: Any = wandb
        self._run: Any = None
        self._failed = False
        if os.environ.get("WANDB_MODE") in _WITHOUT_SERVER:
            return
        try:
            wandb.login()  # in this thread, in which it can ask for a key
        except Exception as error:
            raise ConfigError(
                f"track = ['wandb']: {error}; log in with wandb login, or set WANDB_MODE=offline"
            ) from error

    def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
        if self._wandb.run is not None:
            raise RuntimeError(
                f"this process already has a wandb run, {self._wandb.run.name}, into which this "
                "one would write: finish it first, or train in another process"
            )
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.resolve().name,
            dir=str(run_dir),
            id=known_as or None,
            resume="allow" if known_as else None,
            config=dict(config),
            allow_val_change=True,
            # The run has its own display.
            settings=self._wandb.Settings(console="off"),
        )
        # Not wandb's own step: a resumed run repeats some steps.
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


#: File with the trackers' names for the run, so that a resumed run keeps them.
_NAMES_FILE = "trackers.json"
#: Directory for copies of checkpoints while trackers read them: the run may delete its own.
_COPY_DIRECTORY = ".tracked.tmp"

#: Average rate of checkpoints before the end of a run: trackers keep all that they receive.
_BYTES_A_SECOND = 100_000
_MOST_WAITING = 600  # lines of metrics, one per second
_REPORT_SECONDS = 2.0  # until a message explains the wait
_END_SECONDS = 120.0  # to send the rest, including checkpoints

_TRACKERS: Final[Mapping[str, Callable[[], Tracker]]] = {
    TENSORBOARD: TensorboardTracker,
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}


def tracking(names: list[str]) -> tuple[Callback, ...]:
    """Return a callback for trackers of these names, if any.

    Raises:
        ConfigError: a tracker's package is not installed, or cannot be used.
    """
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # or a directory of that name is in the way
            raise ConfigError(f"track = {names}: {name} is missing: {installing(name)}")
    return (Tracking({name: _TRACKERS[name]() for name in wanted}),) if wanted else ()


class Tracking(Callback):
    """Passes everything to a thread, since trackers may wait for networks.

    A tracker that cannot start ends the run; later problems are warnings.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = trackers
        self._keepers = [name for name, each in trackers.items() if each.takes_checkpoints]
        self._jobs: Queue[Callable[[str], None] | None] = Queue(_MOST_WAITING)  # None: the end
        self._problems: SimpleQueue[str] = SimpleQueue()
        self._reported: set[str] = set()
        self._thread: threading.Thread | None = None
        self._copies = Path()
        self._found: dict[str, Path] = {}  # "newest" and "best"
        # Names of logged checkpoints, by tracker, and "newest" or "best"
        self._logged: dict[tuple[str, str], str] = {}
        self._next_checkpoint = 0.0  # by the monotonic clock
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
                with suppress(Exception):  # the first error is the one to report
                    tracker.summary({"failure": "another tracker cannot start"})
                with suppress(Exception):
                    tracker.finish()
            raise
        # Written only now: a run that did not start has no names to resume.
        if any(names.values()):
            write_synced(file, json.dumps(names).encode() + b"\n")
        self._copies = run.run_dir / _COPY_DIRECTORY
        shutil.rmtree(self._copies, ignore_errors=True)  # left by a driver that was killed
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        self._thread.start()

    def on_metrics(self, run: Run, metrics: MetricsLine) -> None:
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        steps = int(metrics["env_steps_sampled"])
        try:
            self._jobs.put_nowait(lambda name: self._trackers[name].metrics(numbers, steps))
        except Full:
            self._problems.put("trackers are too slow: lines of metrics are left out")
        self._report_problems(run)

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._found["newest"] = path  # logged after a line of metrics

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.is_best:
            self._found["best"] = run.run_dir / BEST / f"{evaluation.update:09d}"

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._thread is None:
            return  # they have not started
        best = (summary.get("best") or {}).get("checkpoint")
        for name, last in (("newest", summary.get("checkpoint")), ("best", best)):
            if last:
                self._found[name] = Path(last)
        # The thread sends what is left once it sees the summary.
        self._summary = summary
        while self._jobs.full():  # the end needs room in the queue
            with suppress(Empty):
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(_REPORT_SECONDS)
        if self._thread.is_alive() and self._keepers:  # TensorBoard keeps no copy
            how = stop_hint("Ctrl-C leaves without")
            run.message(f"waiting for {', '.join(self._keepers)}{how}")
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._problems.put(f"trackers have not finished within {_END_SECONDS:.0f} s")
        self._report_problems(run)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._each(job)
            if not self._summary:  # otherwise the last checkpoints follow the summary
                self._send_checkpoints()
        self._each(lambda tracker: self._trackers[tracker].summary(self._summary))
        for name, found in self._found.items():  # these are not deleted any more
            self._log_checkpoint(name, found, found)
        self._each(lambda tracker: self._trackers[tracker].finish())

    def _each(self, job: Callable[[str], None], names: Iterable[str] | None = None) -> None:
        """Run a job with all trackers, or with trackers of these names."""
        for name in self._trackers if names is None else names:
            try:
                job(name)
            except Exception as error:
                self._problems.put(f"{name}: {type(error).__name__}: {error}")

    def _send_checkpoints(self) -> None:
        """Log new checkpoints, as often as their size allows."""
        if time.monotonic() < self._next_checkpoint:
            return
        size = 0
        for name, found in dict(self._found).items():
            if all(self._logged.get((each, name)) == found.name for each in self._keepers):
                continue
            copy = self._copies / found.name
            try:
                # Before the copy: if the disk has no room for it, the next attempt waits as long.
                size += sum(file.stat().st_size for file in found.iterdir())
                shutil.copytree(found, copy)
                self._log_checkpoint(name, found, copy)
            except OSError as error:
                if found.exists():  # otherwise the run has deleted it: there is a newer one
                    why = error.strerror or error
                    self._problems.put(f"no copy of {found} for trackers: {why}")
            finally:
                shutil.rmtree(self._copies, ignore_errors=True)
        self._next_checkpoint = time.monotonic() + size / _BYTES_A_SECOND

    def _log_checkpoint(self, name: str, found: Path, path: Path) -> None:
        """Log a checkpoint to all trackers that have not logged it."""

        def log(tracker: str) -> None:
            if self._logged.get((tracker, name)) != found.name:
                self._trackers[tracker].checkpoint(name, path)
                self._logged[tracker, name] = found.name

        self._each(log, self._keepers)

    def _report_problems(self, run: Run) -> None:
        """Report new problems in the thread of the run."""
        while not self._problems.empty():
            if (text := self._problems.get()) not in self._reported:
                self._reported.add(text)
                run.message(text, "warning")
