"""Metrics of a run, gathered from receipts and updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from juggler.driver.reporting.worker_histories import WorkerHistories
from juggler.envrunner.agent_returns import AgentReturns
from juggler.envrunner.info_numbers import InfoNumber
from juggler.runtime.actors.requests import Histogram

#: Number of episodes in the mean training return. If it reaches the goal, there is a candidate.
RETURN_WINDOW = 100

_SECONDS = 10.0


#: Number of episodes that confirm a candidate. The standard error of their mean is 10 % of the
#: standard deviation, so a policy 0.3 deviations below the goal is confirmed once in 700 times.
CONFIRMING_EPISODES = 100

#: Limit of the factor by which this number grows with each rejection. It grows because every
#: candidate is another chance to be lucky.
_MORE_EPISODES = 5


@dataclass(slots=True)
class Candidates:
    """Decides when a candidate is due, and how many episodes confirm it.

    After the n-th rejection, the next candidate needs n times 100 new training episodes. So a run
    that hovers around the goal is evaluated less often, and for longer.
    """

    refused: int = 0  # number of rejected candidates
    not_before: int = 0  # no candidate is due before this episode of the run

    @property
    def episodes(self) -> int:
        """Episodes that must confirm the next candidate."""
        return CONFIRMING_EPISODES * min(self.refused + 1, _MORE_EPISODES)

    def due(self, episodes: int) -> bool:
        return episodes >= self.not_before

    def refuse(self, episodes: int) -> None:
        """Reject a candidate that was found after this number of episodes."""
        self.refused += 1
        self.postpone(episodes, self.refused)

    def postpone(self, episodes: int, windows: int = 1) -> None:
        """Wait for more windows of new episodes before the next candidate."""
        self.not_before = episodes + windows * RETURN_WINDOW


class TrainingRate:
    """Steps trained per second, over ten seconds or the last update.

    Steps are counted per update, so the rate is measured from change to change. The pause since
    the last change counts once it is longer than the pause before.
    """

    def __init__(self, time: float = 0.0, steps: int = 0) -> None:
        self._changes = deque([(time, steps)])
        self._now = time

    def note(self, time: float, steps: int) -> None:
        """Mark the steps so far; called about every second."""
        self._now = time
        if steps != self._changes[-1][1]:
            self._changes.append((time, steps))
        while len(self._changes) > 2 and self._changes[1][0] <= time - _SECONDS:
            self._changes.popleft()

    def per_second(self) -> float:
        if len(self._changes) < 2:
            return 0.0
        (first, before), (previous, _) = self._changes[0], self._changes[-2]
        last, steps = self._changes[-1]
        until = max(last, self._now - (last - previous))
        return (steps - before) / max(until - first, 1e-9)


class StalenessSince:
    """Mean and maximum since the last `collect`, or the values before."""

    def __init__(self) -> None:
        self.values: list[int] = []  # since the last `collect`
        self._last: dict[str, float | None] = {"staleness_mean": None, "staleness_max": None}

    def collect(self) -> dict[str, float | None]:
        """Return the values for a line of metrics."""
        if values := self.values:
            mean = sum(values) / len(values)
            self._last = {"staleness_mean": mean, "staleness_max": max(values)}
            self.values = []
        return self._last


@dataclass(slots=True)
class Episodes:
    """The newest episodes of a run, a module or an agent."""

    # Of the newest episodes
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    # Numbers of steps of these episodes, unless only returns are known
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    episodes: int = 0  # number of ended episodes
    # The mean in the newest evaluation; None: no evaluation yet
    evaluation_return: float | None = None

    def episodes_ended(self, returns: Sequence[float], lengths: Sequence[int] = ()) -> None:
        """Count episodes; lengths, if known, are as many as returns."""
        self.returns.extend(returns[-RETURN_WINDOW:])
        self.lengths.extend(lengths[-RETURN_WINDOW:])
        self.episodes += len(returns)

    @property
    def return_mean(self) -> float | None:
        """Mean over the last 100 episodes; None before the first one."""
        return _mean(self.returns)

    @property
    def length_mean(self) -> float | None:
        """Mean number of steps over the last 100 episodes, or None."""
        return _mean(self.lengths)

    def returns_line(self) -> dict[str, Any]:
        """Return the part of a line that each agent has."""
        return {
            "episodes": self.episodes,
            "episode_return_mean": self.return_mean,
            "evaluation_return_mean": self.evaluation_return,
        }


@dataclass(slots=True)
class ModuleMetrics(Episodes):
    """Episodes of the agents that a module plays, counted per agent."""

    played: int = 0  # reported steps of a module that is not trained
    # Staleness of the batches used in updates
    staleness: StalenessSince = field(default_factory=StalenessSince)

    def line(self, *, trained: bool = True) -> dict[str, Any]:
        """Return the module's part of a line."""
        of_episodes = {**self.returns_line(), "episode_length_mean": self.length_mean}
        own = self.staleness.collect() if trained else {"env_steps_played": self.played}
        return {**own, **of_episodes}


_STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # updates


@dataclass(slots=True)
class Metrics(Episodes):
    """Numbers gathered between two metrics lines, except the ledger's steps.

    With several agents, an episode is an environment's, and its return is the sum over all agents.

    Attributes:
        infos: by name, numbers from environments' infos, of the newest episodes that had them.
        custom: by name, the newest number that callbacks recorded.
        rate: steps trained on per second, at the last line.
        updates: number of updates that made new weights, in this process.
        by_module: metrics of each module, by module id.
        by_agent: metrics of each of several agents, by name, unless there are many.
    """

    infos: dict[str, deque[InfoNumber]] = field(default_factory=dict)
    custom: dict[str, float] = field(default_factory=dict)
    candidates: Candidates = field(default_factory=Candidates)
    # Metrics of the newest update, by module id, by learner and updated module.
    modules: dict[tuple[str, str], dict[str, dict[str, float]]] = field(default_factory=dict)
    workers: WorkerHistories = field(default_factory=WorkerHistories)
    by_module: dict[str, ModuleMetrics] = field(default_factory=dict)
    by_agent: dict[str, Episodes] = field(default_factory=dict)
    staleness: Histogram = field(default_factory=lambda: Histogram(_STALENESS))
    rate: TrainingRate = field(default_factory=TrainingRate)
    updates: int = 0
    # Since the last line.
    _staleness_lately: StalenessSince = field(default_factory=StalenessSince)
    _trained_last: tuple[float, int] = (0.0, 0)  # (training time, steps trained)
    _counts_last: dict[str, float] = field(default_factory=dict)
    # The line before which an episode last ended.
    _ended_last: tuple[float, int] = (0.0, 0)  # (training time, steps trained)
    _episodes_last: int = 0

    def of_agent(self, agent: str) -> Episodes:
        return self.by_agent.setdefault(agent, Episodes())

    def returns_of(self, name: str) -> Sequence[float]:
        """Return the newest returns of a module or agent; "": of environments.

        If a module has the name of an agent, the module counts.
        """
        if not name:
            return self.returns
        found = self.by_module.get(name) or self.by_agent.get(name)
        return found.returns if found else ()

    def of(self, module_id: str) -> ModuleMetrics:
        return self.by_module.setdefault(module_id, ModuleMetrics())

    def batch_consumed(self, module_id: str, staleness: int) -> None:
        """Note the age of a used batch, in updates."""
        self.of(module_id).staleness.values.append(staleness)
        self.staleness.observe(staleness)
        self._staleness_lately.values.append(staleness)

    def updated(
        self,
        worker_id: str,
        module_id: str,
        modules: Mapping[str, Mapping[str, float]],
        *,
        keep: bool = False,
    ) -> None:
        """Store a learner's metrics of its newest updates of a module.

        Args:
            worker_id: the learner.
            module_id: the module.
            modules: metrics by module.
            keep: earlier numbers that are not among these stay.
        """
        if modules:
            before = self.modules.get((worker_id, module_id), {}) if keep else {}
            reported = {key: {**before.get(key, {}), **modules[key]} for key in modules}
            self.modules[worker_id, module_id] = reported

    def replayed(self, worker_id: str, module_id: str, books: Mapping[str, float]) -> None:
        """Store a replay's counters, which every answer of a learner has."""
        if books:
            reported = self.modules.setdefault((worker_id, module_id), {})
            reported.setdefault(module_id, {}).update(books)

    def evaluated(self, returns: Sequence[float], agent_returns: AgentReturns) -> None:
        """Store the results of an evaluation of recent weights.

        Args:
            returns: of its episodes.
            agent_returns: returns of each of several agents in them.
        """
        self.evaluation_return = sum(returns) / len(returns)
        of_module: dict[str, list[float]] = {}
        of_agent: dict[str, list[float]] = {}
        for (agent, module_id), got in agent_returns.items():
            of_module.setdefault(module_id, []).extend(got)
            of_agent.setdefault(agent, []).extend(got)
        for module_id, got in of_module.items():
            self.of(module_id).evaluation_return = sum(got) / len(got)
        for agent in of_agent.keys() & self.by_agent.keys():  # if they have metrics
            self.by_agent[agent].evaluation_return = sum(of_agent[agent]) / len(of_agent[agent])

    def learner_left(self, worker_id: str) -> None:
        self.modules = {key: each for key, each in self.modules.items() if key[0] != worker_id}

    def keep(self, module_ids: Container[str]) -> None:
        """Forget all other modules: a league adds and removes players."""
        self.modules = {key: each for key, each in self.modules.items() if key[1] in module_ids}
        self.by_module = {key: of for key, of in self.by_module.items() if key in module_ids}

    def continue_from(self, training_time: float, steps_trained: int) -> None:
        """Start rates at the counters of a resumed run."""
        self.rate = TrainingRate(training_time, steps_trained)
        self._trained_last = self._ended_last = (training_time, steps_trained)
        self._episodes_last = self.episodes

    @property
    def steps_without_an_end(self) -> int:
        """Steps trained on since an episode ended, at the last line."""
        return self._trained_last[1] - self._ended_last[1]

    def line(self, training_time: float, steps_trained: int) -> dict[str, Any]:
        """Return the metrics since the last line; counters come from the ledger.

        Args:
            training_time: seconds since the first sample request: rates leave out the start-up.
            steps_trained: steps since the run began.
        """
        self.rate.note(training_time, steps_trained)
        self._trained_last = (training_time, steps_trained)
        if self.episodes != self._episodes_last:
            self._episodes_last, self._ended_last = self.episodes, self._trained_last
        # Tables that most runs have no use for are left out: lines are written every second.
        return {
            **self._staleness_lately.collect(),
            **self.returns_line(),
            "episode_return_age": training_time - self._ended_last[0] if self.returns else None,
            "episode_length_mean": self.length_mean,
            "steps_per_second": self.rate.per_second(),
            "seconds": self.workers.seconds(),
            "inference": self._inference(),
            "modules": self._modules(),
            **({"info": self._infos()} if self.infos else {}),
            **({"custom": dict(self.custom)} if self.custom else {}),
        }

    def _inference(self) -> dict[str, float] | None:
        """Return means over gateways since the last line; None without gateways."""
        before, now = self._counts_last, self.workers.counts()
        self._counts_last = now
        inferences, rows, batches, seconds = (
            now.get(name, 0.0) - before.get(name, 0.0)
            for name in ("inferences", "inferred_rows", "inferred_batches", "waited_seconds")
        )
        if inferences < 1 or batches < 1:
            return None
        return {"rows": rows / inferences, "wait_ms": 1e3 * seconds / batches}

    def _infos(self) -> dict[str, dict[str, float]]:
        """Return means over episodes, by name."""
        found = {}
        for name, episodes in self.infos.items():
            means = (sum(values) / len(values) for values in zip(*episodes, strict=True))
            found[name] = dict(zip(InfoNumber._fields, means, strict=True))
        return found

    def _modules(self) -> dict[str, dict[str, float]]:
        """Return means over the learners, by module id."""
        values: dict[str, dict[str, list[float]]] = {}
        for reported in self.modules.values():
            for module_id, metrics in reported.items():
                for name, value in metrics.items():
                    values.setdefault(module_id, {}).setdefault(name, []).append(value)
        return {
            module_id: {
                # All learners wait for the replay with the most missing steps.
                name: max(each) if name == "replay_steps_missing" else sum(each) / len(each)
                for name, each in metrics.items()
            }
            for module_id, metrics in values.items()
        }


def _mean(values: deque[float] | deque[int]) -> float | None:
    return sum(values) / len(values) if values else None
