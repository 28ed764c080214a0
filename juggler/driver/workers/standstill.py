"""What a run waits for: before its first update, and where nothing is learned any more."""

from __future__ import annotations

from collections.abc import Mapping

from juggler.driver.parts import RunParts
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.program import ENVRUNNER
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.vitals import Vitals
from juggler.runtime.wire.v1 import training_pb2

#: Of an interval that local workers have to be at work so that they are waited for once more; on a
#: busy host they get no more. And how many intervals that helps for.
_AT_WORK = 0.01
_MOST_LOOKS = 10

#: All environments hang where EnvRunners take so many times as long as ever before, and so many
#: seconds at least.
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

    Args:
        parts: of the run.

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
        """For people: what is missing where nothing was trained on since the last look; else ""."""
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
        """For people: of each EnvRunner that has begun to bring nothing since the last look."""
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
        """For people: which learners have begun to take long to form their group since the last
        look; "" where none have."""
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
        """For people: where all EnvRunners that were asked for batches are in a call of their
        environments that does not return; "": one of them gets on.

        Args:
            vitals: by worker id.
        """
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
        """By worker id, of those that have held a request for long."""
        requests = self._parts.commands.pool.waiting(training_pb2.SampleRequest)
        return {
            worker.worker_id: f"{worker.worker_id} on {worker.host} has been asked for {count} "
            f"batch{'' if count == 1 else 'es'} and has brought none for {seconds:.0f} s"
            for worker, (count, seconds) in requests.items()
            if seconds >= self._config.driver.worker_timeout_seconds
        }

    def what_is_there(self) -> str:
        """For people who wait for updates."""
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
    """Tells people once how episodes are ended where none has for long.

    Args:
        config: of the environments.
    """

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
            return []  # nobody plays
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
