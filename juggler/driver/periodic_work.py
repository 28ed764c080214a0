"""Periodic work of a run: metrics, checkpoints, evaluations and checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from juggler.driver.core.ledger import Counters
from juggler.driver.reporting.episode_returns import ReturnGoals
from juggler.driver.reporting.run_directory import RunDirectory
from juggler.driver.run_parts import RunParts
from juggler.envrunner.agent_returns import has_metrics_by_agent
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.envrunner_program import ENVRUNNER
from juggler.learner.process.learner_program import LEARNER
from juggler.runtime.actors.hub import Vitals
from juggler.runtime.near_matches import listed
from juggler.runtime.wire.v1 import training_pb2

_LINE_SECONDS = 1.0


class Intervals:
    """Alarms by name, first after one interval; an interval of 0: none."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._seconds = {name: length for name, length in seconds.items() if length}
        self._due = {name: now + length for name, length in self._seconds.items()}

    def left(self) -> float:
        """Return the seconds until the next alarm, at least 0."""
        return max(0.0, min(self._due.values()) - time.monotonic())

    def due(self) -> list[str]:
        """Return the alarms that are due since the last call."""
        now = time.monotonic()
        names = [name for name, moment in self._due.items() if moment <= now]
        self._due.update((name, now + self._seconds[name]) for name in names)
        return names


class PeriodicWork:
    """Does the periodic work of a run."""

    def __init__(
        self,
        parts: RunParts,
        directory: RunDirectory,
        bound: list[str],
        announce: Callable[[], None],
    ) -> None:
        self.newest_line: dict[str, Any] = {}  # the newest line of metrics; {} before the first one
        self.standstill = Standstill(parts)
        self._parts = parts
        self._directory = directory
        self._bound = bound
        self._announce = announce
        self._endless = EndlessEpisodes(parts.config.env_runner)
        self._intervals = Intervals({})
        self._checkpoint_due = False
        self._wait_was_reported = False
        driver = parts.config.driver
        each = driver.metrics_steps
        self._steps = (driver.stop_steps or 0) // 100 if each is None else each  # between lines
        self._marks = self._marks_passed()

    def _marks_passed(self) -> int:
        return self._parts.core.trained // self._steps if self._steps else 0

    def at_steps(self) -> None:
        """Write a line if training has passed another multiple of `metrics_steps`."""
        if (marks := self._marks_passed()) > self._marks:
            self._marks = marks
            self.write_line(step_mark=marks * self._steps)

    def begin(self) -> None:
        """Start the first intervals."""
        driver = self._parts.config.driver
        self._intervals = Intervals(
            {
                "line": _LINE_SECONDS,
                # Timing would make the numbers of synchronous runs differ.
                "checkpoint": 0.0 if driver.synchronous else driver.checkpoint_seconds,
                "evaluation": driver.evaluation_seconds,
                "look": driver.worker_timeout_seconds,
            }
        )

    def seconds_left(self) -> float:
        """Return the seconds until something is due."""
        return self._intervals.left()

    def on_intervals(self) -> None:
        """Do everything that is due."""
        parts = self._parts
        for name in self._intervals.due():
            match name:
                case "line":
                    self.write_line()
                    self._check_sockets()
                    for text in self.standstill.silent_runners():
                        parts.progress.message(text, "warning")
                case "checkpoint":
                    self._want_checkpoint()
                case "evaluation":
                    parts.evaluations.want()
                case "look":
                    self._check_standstill()
        # One snapshot at a time; a checkpoint does not wait for consecutive evaluations.
        if self._checkpoint_due and parts.checkpoints.begin():
            self._checkpoint_due = self._wait_was_reported = False
        if not self._checkpoint_due:
            parts.evaluations.begin()
        driver = parts.config.driver
        if driver.stop_seconds is not None and parts.clock.is_up(
            driver.stop_seconds, driver.worker_timeout_seconds
        ):
            parts.end.stop("stop_seconds")

    def _want_checkpoint(self) -> None:
        """Note that a checkpoint is due; warn once if it is impossible."""
        parts = self._parts
        missing = parts.checkpoints.waits_for
        is_old = self._checkpoint_due and parts.core.has_updated
        if is_old and missing and not self._wait_was_reported:
            self._wait_was_reported = True
            text = (
                f"there are no checkpoints while these modules have no learner: {listed(missing)}"
            )
            parts.progress.message(text, "warning")
        self._checkpoint_due = True

    def write_line(self, **more: int) -> dict[str, Any]:
        """Append a line of metrics with additional numbers, and show the progress."""
        parts = self._parts
        self.newest_line = line = {**metrics_line(parts), **more}
        parts.callbacks.metrics(line)
        renewed = self._directory.write_line(line, parts.progress)
        parts.checkpoints.suspended = self._directory.taken
        if renewed:  # in a new directory, in which the driver's address is missing
            self._announce()
            if not parts.config.driver.synchronous and not parts.end.reached:
                parts.checkpoints.begin()
        if not parts.core.has_updated and not parts.end.reached:
            parts.progress.waiting(waits_for(parts), line["wall_time"])
        else:
            parts.progress.update(line)
        # Once a second is often enough, as these look at all workers.
        stale = [text for each in parts.modules.values() for text in each.stale_runners.check()]
        for text in (*stale, *self._endless.check(parts)):
            parts.progress.message(text, "warning")
        if text := self.standstill.slow_groups():
            parts.progress.message(text, "info")
        return line

    def _check_standstill(self) -> None:
        parts = self._parts
        if text := self.standstill.check():
            waits = not parts.only_local or parts.config.env_runner.gateway
            if self.standstill.starting and not parts.registry.complete():
                text = f"{text}. Workers are still starting, and the run waits for them"
                parts.progress.message(text, "warning")
            elif not waits and not parts.registry.complete():
                parts.end.fail(text)
            else:
                parts.progress.message(text, "warning")
            return
        if text := parts.evaluations.overdue():
            parts.progress.message(text, "warning")

    def _check_sockets(self) -> None:
        """End the run or warn if local workers' sockets are gone."""
        parts = self._parts
        gone = parts.local.directory_is_gone()
        if not gone or parts.end.reached:
            return
        if parts.only_local:
            parts.end.fail(gone)
        elif parts.local.driver_address in self._bound:
            self._bound.remove(parts.local.driver_address)
            self._announce()
            parts.progress.message(f"{gone}; workers do not need it", "warning")


def metrics_line(parts: RunParts) -> dict[str, Any]:
    """Return the metrics of a run, which it writes every second.

    Raises:
        LedgerError: the books do not balance.
    """
    core, times = parts.core, parts.clock.now()
    counters = core.counters()
    counters.check()
    others = parts.config.others
    parts.metrics.keep({*core.modules, *others, *parts.registry.frozen})
    # The rates of workers are measured between these marks.
    parts.metrics.workers.mark()
    line = {
        "wall_time": times.wall,
        "training_time": times.training,
        **_steps(counters),
        "learner_steps": {name: dict(each) for name, each in parts.trained.steps.items()},
        "updates": core.updates,
        "weights_version": list(core.weights_version),
        "num_env_runners": core.num_runners,
        "num_learners": len(core.members),
        "devices": {name: parts.registry.devices[name] for name in core.members},
        # Of workers that replaced others, on all hosts.
        "restarts": parts.local.supervisor.restarts + parts.metrics.workers.remote_restarts(),
        **parts.metrics.line(times.training, counters.trained),
    }
    # A single module's numbers would repeat the run's.
    if len(core.modules) > 1 or others:
        line["by_module"] = {
            module_id: _module_line(parts, module_id) for module_id in core.modules
        }
        line["by_module"] |= {each: parts.metrics.of(each).line(trained=False) for each in others}
    if parts.league:
        line["league"] = parts.league.standings.line()
    agents = parts.config.agent_names or tuple(parts.metrics.by_agent)  # with simulators
    if has_metrics_by_agent(agents):
        line["by_agent"] = {agent: parts.metrics.of_agent(agent).returns_line() for agent in agents}
    stop_return = parts.config.driver.stop_return
    if isinstance(stop_return, Mapping):
        line["stop_returns"] = ReturnGoals(stop_return).now(parts.metrics)
    return line


def _module_line(parts: RunParts, module_id: str) -> dict[str, Any]:
    """Return the metrics of one of several modules."""
    module = parts.core.modules[module_id]
    counters = module.ledger.counters()
    counters.check()
    return {
        **_steps(counters),
        "updates": module.weights_version.update,
        "weights_version": list(module.weights_version),
        "learners": list(module.members),
        **parts.metrics.of(module_id).line(),
    }


def _steps(counters: Counters) -> dict[str, Any]:
    books = {f"env_steps_{name}": value for name, value in asdict(counters).items()}
    books["env_steps_dropped"] = {why: n for why, n in counters.dropped.items() if n}
    return books


#: Share of an interval that local workers must compute for the run to wait another interval (a
#: busy host may give them no more), and the number of those intervals.
_AT_WORK = 0.01
_MOST_LOOKS = 10

#: All environments count as hung if EnvRunners take longer than ever before by this factor, and at
#: least this number of seconds.
_TIMES_AS_LONG = 3
_HUNG_SECONDS = 5.0

_FORMING_SECONDS = 5.0  # time limit before a warning; a group usually forms in a fraction of it

_MANY = 5000  # steps of each environment within which an episode should have ended
_TIMES = 2  # times the longest of the last episodes

_LIMIT = 1000  # suggested limit of steps


class Standstill:
    """Checks from time to time whether the run makes progress."""

    def __init__(self, parts: RunParts) -> None:
        self.starting = False  # nothing was trained on, but the missing workers are still starting
        self._config = parts.config
        self._parts = parts
        self._trained_at_last_check = 0
        self._silent: set[str] = set()  # EnvRunners that were reported
        self._forming: set[str] = set()  # learners that were reported
        self._cpu_at_last_check = 0.0
        self._checks = 0  # checks since the last trained step

    def check(self) -> str:
        """Describe what is missing if nothing was trained since the last check."""
        trained, before = self._parts.core.trained, self._trained_at_last_check
        self._trained_at_last_check = trained
        cpu, cpu_before = self._parts.local.cpu_seconds(), self._cpu_at_last_check
        self._cpu_at_last_check = cpu
        if trained != before:
            self._checks = 0
            return ""
        self._checks += 1
        seconds = self._config.driver.worker_timeout_seconds
        self.starting = cpu - cpu_before > _AT_WORK * seconds and self._checks < _MOST_LOOKS
        return f"no update in the last {seconds:.0f} s. {self.describe_workers()}"

    def silent_runners(self) -> list[str]:
        """Warn of EnvRunners that have stopped sending batches."""
        silent = self._silences()
        new = [text for name, text in silent.items() if name not in self._silent]
        self._silent = set(silent)
        seconds = self._config.driver.hang_seconds
        then = "is killed and replaced" if self._parts.only_local else "ends itself"
        return [
            f"{text}. Other EnvRunners now get fewer requests. Are its environments slow, or "
            f"stuck? An EnvRunner that makes no progress for {seconds:g} s (hang_seconds) {then}"
            for text in new
        ]

    def slow_groups(self) -> str:
        """Describe groups of learners that are slow to form."""
        requests = self._parts.commands.pool.waiting(training_pb2.Group)
        slow = {
            worker.worker_id: seconds
            for worker, (_, seconds) in requests.items()
            if seconds >= _FORMING_SECONDS
        }
        new = sorted(slow.keys() - self._forming)
        self._forming = set(slow)
        if not new:
            return ""
        return (
            f"a group of learners has not formed within {max(slow[name] for name in new):.0f} s: "
            f"{', '.join(new)}. Learners finish their work, then hash and hand over their "
            "state, which takes long with a large replay"
        )

    def hung_runners(self, vitals: Mapping[str, Vitals]) -> str:
        """Describe where all EnvRunners hang in their environments, or ""."""
        requests = self._parts.commands.pool.waiting(training_pb2.SampleRequest)
        longest = self._parts.commands.sample_request_seconds.most
        found = []
        for worker, (_, seconds) in requests.items():
            vital = vitals.get(worker.worker_id)
            is_long = seconds > max(_HUNG_SECONDS, _TIMES_AS_LONG * longest)
            if vital is None or not vital.held_up_by or not is_long:
                return ""
            found.append(f"{worker.worker_id} for {seconds:.0f} s, in {vital.held_up_by}")
        return "; ".join(found)

    def _silences(self) -> dict[str, str]:
        """Describe, by worker id, requests that have been open for long."""
        requests = self._parts.commands.pool.waiting(training_pb2.SampleRequest)
        return {
            worker.worker_id: f"{worker.worker_id} on {worker.host} has had requests for {count} "
            f"batch{'' if count == 1 else 'es'} and has sent none for {seconds:.0f} s"
            for worker, (count, seconds) in requests.items()
            if seconds >= self._config.driver.worker_timeout_seconds
        }

    def describe_workers(self) -> str:
        """Describe what updates wait for."""
        core, registry = self._parts.core, self._parts.registry
        parts = [registry.describe(), *self._silences().values()]
        if core.missing_learners:
            parts.append(f"waits for learners: {core.missing_learners} more")
        for module_id, module in core.modules.items():
            if module.members:
                of_module = f" of module {module_id}" if len(core.modules) > 1 else ""
                size, held = module.settings.batch_size, module.held_steps
                more = (
                    ", besides the steps of an update under way" if module.updates_in_flight else ""
                )
                parts.append(f"an update{of_module} needs {size} steps, and has {held}{more}")
        # Reasons that the numbers of workers do not show.
        if self._parts.evaluations.confirming and self._config.driver.synchronous:
            parts.append("sampling waits for the confirmation that the run is solved")
        if self._parts.departures.last_failure:
            parts.append(f"the last failure: {self._parts.departures.last_failure}")
        return "; ".join(parts)


class EndlessEpisodes:
    """Suggests a step limit, once, if no episode has ended for long."""

    def __init__(self, config: EnvRunnerConfig) -> None:
        self._config = config
        self._was_shown = False
        self._steps = 0  # at the last check: of all environments since an episode ended
        self._runners = 0  # maximum number of EnvRunners since then

    def check(self, parts: RunParts) -> list[str]:
        """Return the suggestion if it is due now."""
        if parts.config.played_by and not self._config.gateway:
            return []  # EnvRunners know the agent that does not end, and report it
        if self._config.dataset:
            return []  # no worker plays
        metrics = parts.metrics
        steps = metrics.steps_without_an_end
        if steps < self._steps:  # an episode has ended
            self._runners = 0
        self._steps, self._runners = steps, max(self._runners, parts.core.num_runners)
        # Only steps of trained agents are counted.
        environments = self._runners * self._config.envs_per_runner
        trained = set(parts.config.module_ids)
        counted = [ids for ids in parts.config.played_by.values() if trained.intersection(ids)]
        agents = environments * max(1, len(counted))  # these are counted
        steps //= max(1, agents)  # per agent
        if self._was_shown or steps < max(_MANY, _TIMES * max(metrics.lengths, default=0)):
            return []
        self._was_shown = True
        old = ", and the return is of earlier episodes" if metrics.returns else ""
        # Simulators keep their own limits.
        elsewhere = self._config.gateway or self._config.is_elsewhere
        limit = f"set a limit: max_episode_steps = {_LIMIT}"
        remedy = "have the simulator truncate them" if elsewhere else limit
        return [
            f"no episode has ended in the last {steps:,} steps of each environment{old}. "
            f"If episodes may never end, {remedy}"
        ]


def waits_for(parts: RunParts) -> str:
    """Describe in a few words what the first update waits for."""
    config, registry, core = parts.config, parts.registry, parts.core
    here = [worker.role for worker in registry.attached.values()]
    if ENVRUNNER not in here:
        return f"waiting for EnvRunners (0 of {config.driver.num_env_runners} attached)"
    if not registry.of_role(ENVRUNNER):
        if config.env_runner.gateway:
            return "waiting for a simulator to dial in"
        return f"EnvRunners make their environments, {config.env_runner.env}"
    # Learners need the spaces that EnvRunners report.
    if LEARNER not in here:
        return "waiting for a learner"
    if not registry.of_role(LEARNER):
        return "the learner builds its module"
    if not core.members:
        return "the learners publish their first weights"
    if core.updates_in_flight:
        return "the first update is under way"
    # The module with the largest share of its steps makes the first update.
    module = max(core.modules.values(), key=lambda each: each.held_steps / each.settings.batch_size)
    size = module.settings.batch_size
    return f"{min(module.held_steps, size)} of {size} steps for the first update"
