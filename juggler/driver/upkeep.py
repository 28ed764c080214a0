"""What a run does on intervals: a line of metrics, a checkpoint, an evaluation, a look around."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from juggler.driver.core.ledger import Counters
from juggler.driver.parts import RunParts
from juggler.driver.record.goals import ReturnGoals
from juggler.driver.record.journal import LineWriter
from juggler.driver.workers.idle_cores import IdleCores, Used
from juggler.driver.workers.standstill import EndlessEpisodes, Standstill, waits_for
from juggler.envrunner.agent_returns import has_metrics_by_agent
from juggler.runtime.nearest import listed

_LINE_SECONDS = 1.0
_IDLE_SECONDS = 20.0  # long beside an update


class Intervals:
    """Alarms by name, the first of each one interval from now.

    Args:
        seconds: between an alarm and the next; 0: there is none.
    """

    def __init__(self, seconds: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._seconds = {name: length for name, length in seconds.items() if length}
        self._due = {name: now + length for name, length in self._seconds.items()}

    def left(self) -> float:
        """Seconds until the next alarm, at least 0."""
        return max(0.0, min(self._due.values()) - time.monotonic())

    def due(self) -> list[str]:
        """Whose time has come since they were last named here."""
        now = time.monotonic()
        names = [name for name, moment in self._due.items() if moment <= now]
        self._due.update((name, now + self._seconds[name]) for name in names)
        return names


class Upkeep:
    """What is due every so often, whatever comes.

    Args:
        parts: of the run.
        lines: takes lines of metrics.
        bound: the addresses that the driver listens at; one whose socket was removed is taken out.
        announce: tells other processes where the run is found.

    Attributes:
        standstill: looks whether the run gets on.
    """

    def __init__(
        self,
        parts: RunParts,
        lines: LineWriter,
        bound: list[str],
        announce: Callable[[], None],
    ) -> None:
        self.standstill = Standstill(parts)
        self._parts = parts
        self._lines = lines
        self._bound = bound
        self._announce = announce
        self._endless = EndlessEpisodes(parts.config.env_runner)
        self._idle_cores = IdleCores(parts.config.driver.learner_threads)
        self._intervals = Intervals({})
        self._checkpoint_due = False
        self._told_what_it_waits_for = False
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
        """Count the first intervals from now."""
        driver = self._parts.config.driver
        self._intervals = Intervals(
            {
                "line": _LINE_SECONDS,
                # What a clock says would make the numbers of a synchronous run differ.
                "checkpoint": 0.0 if driver.synchronous else driver.checkpoint_seconds,
                "evaluation": driver.evaluation_seconds,
                "look": driver.worker_timeout_seconds,
                "idle cores": _IDLE_SECONDS,
            }
        )

    def seconds_left(self) -> float:
        """Until something is due."""
        return self._intervals.left()

    def on_intervals(self) -> None:
        """Do what is due."""
        parts = self._parts
        for name in self._intervals.due():
            match name:
                case "line":
                    self.write_line()
                    self._look_for_sockets()
                    for text in self.standstill.silent_runners():
                        parts.progress.message(text, "warning")
                case "checkpoint":
                    self._want_checkpoint()
                case "evaluation":
                    parts.evaluations.want()
                case "look":
                    self._look_for_standstill()
                case "idle cores":
                    if text := self._idle_cores.look(Used.by(parts)):
                        parts.progress.message(text, "info")
        # One snapshot at a time; a checkpoint does not wait for evaluations that follow each other.
        if self._checkpoint_due and parts.checkpointing.begin():
            self._checkpoint_due = self._told_what_it_waits_for = False
        if not self._checkpoint_due:
            parts.evaluations.begin()
        driver = parts.config.driver
        if driver.stop_seconds is not None and parts.clock.is_up(
            driver.stop_seconds, driver.worker_timeout_seconds
        ):
            parts.end.stop("stop_seconds")

    def _want_checkpoint(self) -> None:
        """One is due. People are told, once, if the one before still waits because a module has no
        learner, unless there is nothing new to keep."""
        parts = self._parts
        missing = parts.checkpointing.waits_for
        is_old = self._checkpoint_due and parts.core.has_updated
        if is_old and missing and not self._told_what_it_waits_for:
            self._told_what_it_waits_for = True
            text = (
                f"there are no checkpoints while these modules have no learner: {listed(missing)}"
            )
            parts.progress.message(text, "warning")
        self._checkpoint_due = True

    def write_line(self, **more: int) -> dict[str, Any]:
        """Append a line of metrics with additional numbers, and show the progress."""
        parts = self._parts
        line = {**metrics_line(parts), **more}
        parts.callbacks.metrics(line)
        renewed = self._lines.append(line)
        parts.checkpointing.suspended = self._lines.taken
        if renewed:  # into a new directory: nobody finds the run there yet
            self._announce()
            if not parts.config.driver.synchronous and not parts.end.reached:
                parts.checkpointing.begin()
        if not parts.core.has_updated and not parts.end.reached:
            parts.progress.waiting(waits_for(parts), line["wall_time"])
        else:
            parts.progress.update(line)
        stale = [text for each in parts.stale_runners.values() for text in each.look()]
        for text in (*stale, *self._endless.look(parts)):
            parts.progress.message(text, "warning")
        if text := self.standstill.slow_groups():
            parts.progress.message(text, "info")
        return line

    def _look_for_standstill(self) -> None:
        parts = self._parts
        if text := self.standstill.look():
            waits = not parts.only_local or parts.config.env_runner.gateway
            if self.standstill.starting and not parts.registry.complete():
                text = f"{text}. Workers are at work on their start, and are waited for"
                parts.progress.message(text, "warning")
            elif not waits and not parts.registry.complete():
                parts.end.fail(text)
            else:
                parts.progress.message(text, "warning")
            return
        if text := parts.confirmation.overdue():
            parts.progress.message(text, "warning")

    def _look_for_sockets(self) -> None:
        """Without them no worker of this host can take the place of one that dies."""
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
    """What a run says about itself every second.

    Raises:
        LedgerError: the books do not balance.
    """
    core, times = parts.core, parts.clock.now()
    counters = core.counters()
    counters.check()
    parts.metrics.workers.mark()
    others = parts.config.others
    parts.metrics.keep({*core.modules, *others, *parts.registry.frozen})
    line = {
        "wall_time": times.wall,
        "training_time": times.training,
        **_steps(counters),
        "learner_steps": _learner_steps(parts),
        "updates": core.updates,
        "weights_version": list(core.weights_version),
        "num_env_runners": core.num_runners,
        "num_learners": len(core.members),
        "devices": {name: parts.registry.devices[name] for name in core.members},
        "restarts": parts.restarts,
        **parts.metrics.line(times.training, counters.trained),
    }
    if len(core.modules) > 1 or others:
        line["by_module"] = {
            module_id: _module_line(parts, module_id) for module_id in core.modules
        }
        line["by_module"] |= {each: parts.metrics.of(each).played_line() for each in others}
    if parts.league:
        line["league"] = parts.league.standings.now().line()
    agents = parts.config.agent_names
    if has_metrics_by_agent(agents):
        line["by_agent"] = {agent: parts.metrics.of_agent(agent).line() for agent in agents}
    stop_return = parts.config.driver.stop_return
    if isinstance(stop_return, Mapping):
        line["stop_returns"] = ReturnGoals(stop_return).now(parts.metrics)
    return line


def _module_line(parts: RunParts, module_id: str) -> dict[str, Any]:
    """What is said of one of several modules.

    Raises:
        LedgerError: its books do not balance.
    """
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


def _learner_steps(parts: RunParts) -> dict[str, dict[str, int]]:
    """The learner processes' own counts, over the modules that each hosts."""
    before = parts.trained.steps_before
    sums = {worker_id: dict(counts) for worker_id, counts in before.items()}
    for learners in parts.learners.values():
        for worker_id, counts in learners.steps.items():
            of_worker = sums.setdefault(worker_id, {})
            for what, steps in counts.items():
                of_worker[what] = of_worker.get(what, 0) + steps
    return sums


def _steps(counters: Counters) -> dict[str, Any]:
    books = {f"env_steps_{name}": value for name, value in asdict(counters).items()}
    books["env_steps_dropped"] = {why: n for why, n in counters.dropped.items() if n}
    return books
