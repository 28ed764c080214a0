"""How a run as a whole is driven: the keys of a configuration that concern no part alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from juggler.learner.process.devices import parse_devices
from juggler.runtime.nearest import nearest
from juggler.runtime.wrong_value import WrongValue, wrong_where

TENSORBOARD: Final = "tensorboard"
#: What `track` may name. For all but the first, `juggler.driver.trackers` has a tracker.
TRACKERS: Final = (TENSORBOARD, "mlflow", "wandb")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the key and what to do."""


@dataclass(kw_only=True)
class DriverConfig:
    """How the run as a whole is driven, and when it stops."""

    seed: int = 0
    """All randomness of the run derives from it."""

    run_dir: str | None = None
    """Where the run writes; none: a new directory under runs/."""

    from_checkpoint: str | None = None
    """Begin with the weights in this checkpoint, or in the newest one of this run's directory:
    `--from` on the command line. All else, such as counts and the optimizer, begins anew."""

    from_parameters: list[str] = field(default_factory=list)
    """With from_checkpoint, take only parameters and buffers whose names fit one of these patterns,
    such as encoder.*; the rest is drawn from the seed. Empty: take all of them, and what connectors
    have learned of observations."""

    num_env_runners: int = 2
    """EnvRunner processes on this host."""

    num_learners: int | None = None
    """Learner processes that a run begins with; none: one for each of `devices`. It waits for them
    up to worker_timeout_seconds once the first is ready, and then begins with those that are."""

    learner_threads: int = 1
    """Threads in which each learner computes on a CPU. More of them pay where cores are idle, above
    all with images and large networks: `juggler tune` tries them. The last bits of a sum depend on
    how many threads it is spread over."""

    max_learners: int = 64
    """Learners that may take part at once: beyond num_learners, they may come and go at any time
    where they dial in (`juggler driver`), and elsewhere by `juggler scale`."""

    devices: str = "auto"
    """Where learners compute: auto (a GPU of their host, in turn, or its CPU), cpu, cuda:0, several
    with commas between them, or fake:4 (four processes on the CPU that stand for GPUs)."""

    synchronous: bool = False
    """Sample, wait for all, update, wait: slower, on-policy, and the same numbers every time."""

    requests_per_runner: int = 2
    """Sample requests in flight at one EnvRunner."""

    updates_in_flight: int = 2
    """Updates issued and not finished: the learner finds the next one waiting."""

    stop_return: float | dict[str, float] | None = None
    """Stop when the mean return of the last 100 training episodes gets there, and `confirm` agrees:
    solved. With several agents, a number is for the sum over all of them. A table, such as
    {main = 20.0}, has goals by module or by agent, all of which must be reached: by id of a module,
    for the mean return of one agent that it plays; by name of an agent, for its own."""

    confirm: bool = True
    """A run is solved when the very weights that are kept have a mean return of `stop_return` in
    100 episodes of an evaluation beside training, or more where others before them had not."""

    stop_steps: int | None = None
    """Stop after so many environment steps trained on; with several agents, the steps of all
    of them together."""

    stop_seconds: float | None = None
    """Stop after so many seconds of training, which begin with the first sample request and not
    with the command, and go on where a run is resumed. Updates that were begun (updates_in_flight)
    are still finished, with a last checkpoint. A run whose workers do not come ends when it has
    waited for them that long, and not before worker_timeout_seconds."""

    metrics_steps: int | None = None
    """Environment steps trained on between two lines of metrics, beside the line each second; 0: no
    such lines; none: a hundredth of stop_steps. In a synchronous run, equal seeds have these lines
    at equal steps."""

    checkpoint_seconds: float = 30.0
    """Between checkpoints of an asynchronous run; there is always one at the end."""

    checkpoint_updates: int = 1000
    """Updates between checkpoints of a synchronous run. Episodes do not go on beyond one: all
    environments are reset, so that a run that is resumed there gives the same numbers."""

    keep_checkpoints: int = 3
    """How many to keep, the newest first."""

    evaluation_seconds: float = 0.0
    """Between evaluations, on an EnvRunner of their own beside training; 0: none. Each plays a
    checkpoint that is written for it, and the one with the highest mean return is kept: it is in
    `best`, in the run's directory."""

    evaluation_episodes: int = 10
    """Episodes in one evaluation."""

    num_evaluators: int = 1
    """Processes on this host that share the episodes of an evaluation among them."""

    evaluation_video: int = 0
    """Every so many evaluations, the first one among them, a video of one more episode is recorded,
    into `videos` in the run's directory; 0: none."""

    worker_timeout_seconds: float = 60.0
    """How long to wait for workers to attach and set up, and for anything else that must come; up
    to ten times that while workers of this host are at work."""

    hang_seconds: float = 120.0
    """A worker whose main loop makes no progress for so long is killed and replaced."""

    track: list[str] = field(default_factory=lambda: [TENSORBOARD])
    """Trackers that record the run's configuration and metrics, some of: tensorboard (events in the
    run's directory), wandb and mlflow (checkpoints, too)."""

    web: bool = False
    """Serve a page about the run, for a browser of this host, while it goes on: at
    http://127.0.0.1:7070/, or at the first port after that which is free."""

    progress: Literal["auto", "live", "plain", "json", "off"] = "auto"
    """What is shown meanwhile; auto: live in a terminal, one line in a notebook, plain lines
    elsewhere; json: those as objects."""

    def validate(self) -> None:
        at_least = {
            "num_env_runners": 1,
            "learner_threads": 1,
            "max_learners": 1,
            "requests_per_runner": 1,
            "updates_in_flight": 1,
            "checkpoint_updates": 1,
            "keep_checkpoints": 1,
            "evaluation_episodes": 1,
            "num_evaluators": 1,
            "evaluation_video": 0,
            "seed": 0,
        }
        for key, minimum in at_least.items():
            if getattr(self, key) < minimum:
                raise WrongValue(key, f"{key} = {getattr(self, key)}: must be at least {minimum}")
        with wrong_where("devices"):
            self.device_names()
        for name in self.track:
            if name not in TRACKERS:
                raise WrongValue(
                    "track", f"track = {self.track}: unknown {name!r}{nearest(name, TRACKERS)}"
                )
        above_0 = ("checkpoint_seconds", "worker_timeout_seconds", "hang_seconds")
        for key in (*above_0, "stop_steps", "stop_seconds"):
            if (value := getattr(self, key)) is not None and not value > 0:  # NaN is not
                raise WrongValue(key, f"{key} = {value}: must be above 0")
        if self.metrics_steps is not None and self.metrics_steps < 0:
            text = f"metrics_steps = {self.metrics_steps}: must be at least 0"
            raise WrongValue("metrics_steps", text)
        if not self.evaluation_seconds >= 0:
            key, value = "evaluation_seconds", self.evaluation_seconds
            raise WrongValue(key, f"{key} = {value}: must be at least 0")
        if self.stop_return == {}:
            said = "stop_return = {}: name a module or an agent, or leave it out"
            raise WrongValue("stop_return", said)
        goals = self.stop_return
        for name, goal in goals.items() if isinstance(goals, dict) else [("", goals)]:
            if goal is not None and math.isnan(goal):
                where = f"stop_return.{name}" if name else "stop_return"
                raise WrongValue("stop_return", f"{where} = nan: no return ever gets there")
        self._must_go_together()

    def _must_go_together(self) -> None:
        """
        Raises:
            ConfigError: two keys contradict each other; names both.
        """
        if self.from_parameters and self.from_checkpoint is None:
            raise ConfigError(
                f"from_parameters = {self.from_parameters}: set from_checkpoint, which they are of"
            )
        devices = self.device_names()
        if self.num_learners is not None and self.num_learners < len(devices):
            raise ConfigError(
                f"num_learners = {self.num_learners}: must be at least {len(devices)}, for "
                f"devices = {self.devices!r}"
            )
        if self.learners > self.max_learners:
            raise ConfigError(
                f"num_learners = {self.learners}: must be at most max_learners = "
                f"{self.max_learners}"
            )
        idle, instead = "checkpoint_updates", "checkpoint_seconds"
        if self.synchronous:
            idle, instead = instead, idle
        if (value := getattr(self, idle)) != (default := getattr(DriverConfig, idle)):
            raise ConfigError(
                f"{idle} = {value} with synchronous = {str(self.synchronous).lower()}: set "
                f"{instead}, and leave {idle} at {default}"
            )
        for key in ("num_evaluators", "evaluation_video"):
            value, default = getattr(self, key), getattr(DriverConfig, key)
            if value != default and not self.evaluation_seconds:
                raise ConfigError(
                    f"{key} = {value}: there are no evaluations; set evaluation_seconds"
                )
        if self.num_evaluators > self.evaluation_episodes:
            raise ConfigError(
                f"num_evaluators = {self.num_evaluators}: there are more evaluators than "
                f"evaluation_episodes = {self.evaluation_episodes}"
            )

    @property
    def confirms(self) -> bool:
        """Whether being solved is to be confirmed."""
        return self.confirm and self.stop_return is not None

    @property
    def learners(self) -> int:
        """How many learner processes the run begins with."""
        return len(self.device_names()) if self.num_learners is None else self.num_learners

    def most_learners(self, *, dialled: bool) -> int:
        """How many learners may take part at once in a run that begins.

        Args:
            dialled: workers dial in; else the driver starts its own, and `juggler scale` alone has
                it start others.
        """
        return self.max_learners if dialled else self.learners

    def device_name(self, index: int) -> str:
        """Where the learner process of this index computes."""
        names = self.device_names()
        return names[index % len(names)]

    def device_names(self) -> list[str]:
        """Where learners compute, one after the other.

        Raises:
            ConfigError: one of them is no device.
        """
        try:
            return parse_devices(self.devices)
        except ValueError as error:
            raise ConfigError(str(error)) from None
