"""What a run does on intervals: metrics, checkpoints, evaluations, a look around."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from juggler.driver.core.ledger import Counters
from juggler.driver.parts import RunParts
from juggler.driver.record.episode_returns import ReturnGoals
from juggler.driver.record.run_directory import LineWriter
from juggler.envrunner.agent_returns import has_metrics_by_agent
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.program import ENVRUNNER
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hub_events import Vitals
from juggler.runtime.actors.resources import seconds_idle, usable_cores
from juggler.runtime.nearest import listed
from juggler.runtime.wire.v1 import training_pb2

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
    """Does what is due at intervals.

    Args:
        bound: the addresses that the driver listens at; one whose socket was removed is taken out.
    """

    def __init__(
        self, parts: RunParts, lines: LineWriter, bound: list[str], announce: Callable[[], None]
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
        """Note that a checkpoint is due; warn once if none is possible."""
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
        if renewed:  # into a new directory: the run is not found there yet
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
        """End or warn if the sockets that local workers need are gone."""
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
    agents = parts.config.agent_names or tuple(parts.metrics.by_agent)  # of simulators
    if has_metrics_by_agent(agents):
        line["by_agent"] = {agent: parts.metrics.of_agent(agent).line() for agent in agents}
    stop_return = parts.config.driver.stop_return
    if isinstance(stop_return, Mapping):
        line["stop_returns"] = ReturnGoals(stop_return).now(parts.metrics)
    return line


def _module_line(parts: RunParts, module_id: str) -> dict[str, Any]:
    """What is said of one of several modules."""
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


#: Of an interval that local workers have to be at work so that they are waited for once more; on a
#: busy host they get no more. And how many intervals that helps for.
_AT_WORK = 0.01
_MOST_LOOKS = 10

#: All environments hang where EnvRunners take this many times as long as ever before, and at least
#: this many seconds.
_TIMES_AS_LONG = 3
_HUNG_SECONDS = 5.0

#: A group usually forms in a fraction of it.
_FORMING_SECONDS = 5.0

#: Steps of each environment in which an episode should have ended.
_MANY = 5000
_TIMES = 2  # the longest of the last episodes

_LIMIT = 1000  # in the hint


class Standstill:
    """Looks every now and then whether the run gets on.

    Attributes:
        starting: nothing was trained on, but workers that are missing are at work on their start.
    """

    def __init__(self, parts: RunParts) -> None:
        self.starting = False
        self._config = parts.config
        self._parts = parts
        self._trained_at_last_look = 0
        self._silent: set[str] = set()  # EnvRunners that people have been told of
        self._forming: set[str] = set()  # learners that people have been told of
        self._cpu_at_last_look = 0.0
        self._looks = 0  # without anything that was trained on

    def look(self) -> str:
        """Word what is missing if nothing was trained since the last look."""
        trained, before = self._parts.core.trained, self._trained_at_last_look
        self._trained_at_last_look = trained
        cpu, cpu_before = self._parts.local.cpu_seconds(), self._cpu_at_last_look
        self._cpu_at_last_look = cpu
        if trained != before:
            self._looks = 0
            return ""
        self._looks += 1
        seconds = self._config.driver.worker_timeout_seconds
        self.starting = cpu - cpu_before > _AT_WORK * seconds and self._looks < _MOST_LOOKS
        return f"no update in the last {seconds:.0f} s. {self.what_is_there()}"

    def silent_runners(self) -> list[str]:
        """Warn of EnvRunners that have begun to bring nothing."""
        silent = self._by_silent_runner()
        new = [text for name, text in silent.items() if name not in self._silent]
        self._silent = set(silent)
        seconds = self._config.driver.hang_seconds
        then = "is killed and replaced" if self._parts.only_local else "ends itself"
        return [
            f"{text}. Others are asked for less meanwhile. Are its environments slow, or stuck? An "
            f"EnvRunner that makes no progress for {seconds:g} s (hang_seconds) {then}"
            for text in new
        ]

    def slow_groups(self) -> str:
        """Word which learners have begun to form a group slowly."""
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
            f"a group of learners has not formed {max(slow[name] for name in new):.0f} s after it "
            f"was to: {', '.join(new)}. Learners finish what they do, and hash and hand over their "
            "state, which takes long where a replay is large"
        )

    def hung_runners(self, vitals: Mapping[str, Vitals]) -> str:
        """Word where all asked EnvRunners hang in their environments, or ""."""
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

    def _by_silent_runner(self) -> dict[str, str]:
        """Word, by worker id, which requests have been open for long."""
        requests = self._parts.commands.pool.waiting(training_pb2.SampleRequest)
        return {
            worker.worker_id: f"{worker.worker_id} on {worker.host} has been asked for {count} "
            f"batch{'' if count == 1 else 'es'} and has brought none for {seconds:.0f} s"
            for worker, (count, seconds) in requests.items()
            if seconds >= self._config.driver.worker_timeout_seconds
        }

    def what_is_there(self) -> str:
        """Word what updates wait for."""
        core, registry = self._parts.core, self._parts.registry
        parts = [registry.describe(), *self._by_silent_runner().values()]
        if core.missing_learners:
            parts.append(f"waits for learners: {core.missing_learners} more")
        for module_id, module in core.modules.items():
            if module.members:
                of_module = f" of module {module_id}" if len(core.modules) > 1 else ""
                size, held = module.settings.batch_size, module.held_steps
                more = ", beside those of an update under way" if module.updates_in_flight else ""
                parts.append(f"an update{of_module} takes {size} steps, {held} are there{more}")
        if self._parts.confirmation.under_way and self._config.driver.synchronous:
            parts.append("sampling waits until it is known whether the run is solved")
        if self._parts.departures.last_failure:
            parts.append(f"the last failure: {self._parts.departures.last_failure}")
        return "; ".join(parts)


class EndlessEpisodes:
    """Tells people once how episodes are ended where none has for long."""

    def __init__(self, config: EnvRunnerConfig) -> None:
        self._config = config
        self._told = False
        self._steps = 0  # at the last look, of all environments since an episode ended
        self._runners = 0  # the most that were here since then

    def look(self, parts: RunParts) -> list[str]:
        """For people: the hint, if it is due now."""
        if parts.config.played_by and not self._config.gateway:
            return []  # EnvRunners know which agent does not end, and tell
        if self._config.dataset:
            return []  # no worker plays
        metrics = parts.metrics
        steps = metrics.steps_without_an_end
        if steps < self._steps:  # one has ended
            self._runners = 0
        self._steps, self._runners = steps, max(self._runners, parts.core.num_runners)
        environments = self._runners * self._config.envs_per_runner
        trained = set(parts.config.module_ids)
        counted = [ids for ids in parts.config.played_by.values() if trained.intersection(ids)]
        agents = environments * max(1, len(counted))  # whose steps are counted
        steps //= max(1, agents)  # of each
        if self._told or steps < max(_MANY, _TIMES * max(metrics.lengths, default=0)):
            return []
        self._told = True
        old = ", and the return is that of earlier ones" if metrics.returns else ""
        return [
            f"no episode has ended in the last {steps:,} steps of each environment{old}. "
            f"Where episodes may go on for ever, {self._remedy()}"
        ]

    def _remedy(self) -> str:
        config = self._config
        if config.gateway or config.is_elsewhere:
            return "have the simulator truncate them"
        return f"set a limit: max_episode_steps = {_LIMIT}"


def waits_for(parts: RunParts) -> str:
    """For people, in a few words: what comes before the first update."""
    config, registry, core = parts.config, parts.registry, parts.core
    here = [worker.role for worker in registry.attached.values()]
    if ENVRUNNER not in here:
        return f"waiting for EnvRunners (0 of {config.driver.num_env_runners} are here)"
    if not registry.of_role(ENVRUNNER):
        if config.env_runner.gateway:
            return "waiting for a simulator to dial in"
        return f"EnvRunners make their environments, {config.env_runner.env}"
    if LEARNER not in here:
        return "waiting for a learner"
    if not registry.of_role(LEARNER):
        return "the learner builds its module"
    if not core.members:
        return "the learners publish their first weights"
    if core.updates_in_flight:
        return "the first update is under way"
    # The module that has the largest part of what it needs makes the first update.
    module = max(core.modules.values(), key=lambda each: each.held_steps / each.settings.batch_size)
    size = module.settings.batch_size
    return f"{min(module.held_steps, size)} of {size} steps are here for the first update"


_BUSY = 0.9  # of the time
#: Updates are told when they are done, so that more work than there was time for may be told at
#: once. What is above this share of it says nothing.
_MOST_BUSY = 1.2
_WORK = ("collate", "update", "publish")
_MOST_THREADS = 8  # that are advised


class Used(NamedTuple):
    """Seconds that a run and its host have used so far."""

    time: float
    learners: int  # how many there are
    worked: float  # in which learners had something to do, added up
    cpu: float  # of processors, that the run has used
    idle: float  # of processors of this host, in which they had nothing to do
    cores: float  # how many the run may use

    @classmethod
    def by(cls, parts: RunParts) -> Used | None:
        """Return what a run has used, if more threads could help.

        None: learners are elsewhere, on GPUs or not at work yet, or the run may not use all cores.
        """
        members, cores = parts.core.members, usable_cores()
        devices = {parts.registry.devices[name] for name in members}
        seconds = parts.metrics.workers.seconds().get(LEARNER, {})
        limited = cores < (os.cpu_count() or 1)
        if not parts.only_local or devices != {"cpu"} or limited or not seconds:
            return None
        worked = sum(seconds.get(name, 0.0) for name in _WORK)
        cpu = parts.local.cpu_seconds() + time.process_time()
        return cls(time.monotonic(), len(members), worked, cpu, seconds_idle(), cores)


class IdleCores:
    """Tells people, once, where learners could compute in more threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._before: Used | None = None
        self._told = False

    def look(self, used: Used | None) -> str:
        """Return advice about the time since the last look, or ""."""
        before = self._before
        self._before = used
        if self._told or used is None or before is None or used.learners != before.learners:
            return ""
        seconds = used.time - before.time
        worked = (used.worked - before.worked) / seconds / used.learners
        left = used.cores - (used.cpu - before.cpu) / seconds
        idle = min(left, (used.idle - before.idle) / seconds)
        possible = min(_MOST_THREADS, self._threads + int(idle // used.learners))
        threads = 1 << possible.bit_length() - 1  # a power of 2, as `juggler tune` tries
        if not _BUSY <= worked <= _MOST_BUSY or threads <= self._threads:
            return ""
        self._told = True
        alone = used.learners == 1
        learners, they = ("the learner limits", "it") if alone else ("learners limit", "they")
        return (
            f"{learners} this run: in the last {seconds:.0f} s {they} waited for "
            f"{max(0.0, 1 - worked):.0%} of the time, and {idle:.1f} of {used.cores:g} cores had "
            f"nothing to do. learner_threads = {threads} may make updates faster: `juggler tune` "
            "measures it"
        )
