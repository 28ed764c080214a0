"""What a run says about itself, gathered from receipts and updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from juggler.driver.record.candidates import Candidates
from juggler.driver.record.episode_returns import RETURN_WINDOW
from juggler.driver.record.module_metrics import AgentMetrics, ModuleMetrics, StalenessSince
from juggler.driver.record.workers import WorkerRecords
from juggler.envrunner.agent_returns import AgentReturns
from juggler.envrunner.info_numbers import InfoNumber, InfoNumbers, keep_newest
from juggler.runtime.actors.histogram import Histogram

_SECONDS = 10.0


class TrainingRate:
    """Steps trained on per second, over the last ten seconds, or the last update if it took longer.

    Steps are counted an update at a time, so the rate is one from change to change. A pause since
    the last change counts from when it is longer than the one before it.

    Args:
        time: in seconds of training, when the rate begins.
        steps: trained on by then.
    """

    def __init__(self, time: float = 0.0, steps: int = 0) -> None:
        self._changes = deque([(time, steps)])
        self._now = time

    def note(self, time: float, steps: int) -> None:
        """The steps so far. Called about every second."""
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


_STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # updates


@dataclass(slots=True)
class Metrics:
    """What is gathered between two metrics lines, beside the steps, which the ledger counts.

    Attributes:
        returns: of the newest episodes. With several agents, an episode is one of an environment,
            and its return the sum of all agents' returns.
        lengths: their numbers of environment steps.
        episodes: how many have ended.
        infos: by name, numbers that environments put into their infos, of the newest episodes that
            gave them.
        custom: by name, the newest number that callbacks recorded.
        rate: of steps trained on, as of the last line.
        by_module: what is told of each module beside, by module id.
        by_agent: what is told of each of several agents, by name, unless there are many.
    """

    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    episodes: int = 0
    infos: dict[str, deque[InfoNumber]] = field(default_factory=dict)
    custom: dict[str, float] = field(default_factory=dict)
    evaluation_return: float | None = None
    candidates: Candidates = field(default_factory=Candidates)
    # By learner and the module that it updated, by module id: of the newest such update.
    modules: dict[tuple[str, str], dict[str, dict[str, float]]] = field(default_factory=dict)
    # By learner and module: what became of the rows of its replay.
    replays: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    workers: WorkerRecords = field(default_factory=WorkerRecords)
    by_module: dict[str, ModuleMetrics] = field(default_factory=dict)
    by_agent: dict[str, AgentMetrics] = field(default_factory=dict)
    staleness: Histogram = field(default_factory=lambda: Histogram(_STALENESS))
    rate: TrainingRate = field(default_factory=TrainingRate)
    # Since the last line.
    _staleness_lately: StalenessSince = field(default_factory=StalenessSince)
    _trained_last: tuple[float, int] = (0.0, 0)  # (training time, steps trained)
    _counts_last: dict[str, float] = field(default_factory=dict)
    # When an episode ended last, as seen in lines.
    _ended_last: tuple[float, int] = (0.0, 0)  # (training time, steps trained)
    _episodes_last: int = 0

    def episodes_ended(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        """Both lists have the same length."""
        self.returns.extend(returns[-RETURN_WINDOW:])
        self.lengths.extend(lengths[-RETURN_WINDOW:])
        self.episodes += len(returns)

    def info_numbers(self, numbers: InfoNumbers) -> None:
        """Of the infos of episodes that ended."""
        keep_newest(self.infos, numbers)

    def agents_ended(
        self, module_id: str, returns: Sequence[float], lengths: Sequence[int]
    ) -> None:
        """Episodes of the agents that this module plays; both lists have the same length."""
        self.of(module_id).agents_ended(returns, lengths)

    def played(self, module_id: str, steps: int) -> None:
        """Steps of a module that is not trained."""
        self.of(module_id).played += steps

    def agent_ended(self, agent: str, returns: Sequence[float]) -> None:
        """Episodes in which this agent acted."""
        self.of_agent(agent).ended(returns)

    def of_agent(self, agent: str) -> AgentMetrics:
        return self.by_agent.setdefault(agent, AgentMetrics())

    def returns_of(self, name: str) -> Sequence[float]:
        """Of the newest episodes of a module's agents, or of an agent, or "": of the environments.

        Where a module has the name of an agent, the module counts.
        """
        if not name:
            return self.returns
        found = self.by_module.get(name) or self.by_agent.get(name)
        return found.returns if found else ()

    def of(self, module_id: str) -> ModuleMetrics:
        return self.by_module.setdefault(module_id, ModuleMetrics())

    def batch_consumed(self, module_id: str, staleness: int) -> None:
        """An update of this module used a batch so many updates old."""
        self.of(module_id).staleness.observe(staleness)
        self.staleness.observe(staleness)
        self._staleness_lately.observe(staleness)

    def updated(
        self, worker_id: str, module_id: str, modules: Mapping[str, Mapping[str, float]]
    ) -> None:
        """What a learner says of its newest updates of a module."""
        if modules:
            said = {key: dict(values) for key, values in modules.items()}
            self.modules[worker_id, module_id] = said

    def replayed(self, worker_id: str, module_id: str, books: Mapping[str, float]) -> None:
        """What a learner says of a module's replay, in every answer."""
        if books:
            self.replays[worker_id, module_id] = dict(books)

    def evaluated(self, returns: Sequence[float], agent_returns: AgentReturns) -> None:
        """An evaluation of recent weights.

        Args:
            returns: of its episodes.
            agent_returns: what each of several agents got in them.
        """
        self.evaluation_return = sum(returns) / len(returns)
        of_module: dict[str, list[float]] = {}
        of_agent: dict[str, list[float]] = {}
        for (agent, module_id), got in agent_returns.items():
            of_module.setdefault(module_id, []).extend(got)
            of_agent.setdefault(agent, []).extend(got)
        for module_id, got in of_module.items():
            self.of(module_id).evaluation_return = sum(got) / len(got)
        for agent in of_agent.keys() & self.by_agent.keys():  # those that have metrics
            self.by_agent[agent].evaluation_return = sum(of_agent[agent]) / len(of_agent[agent])

    def learner_left(self, worker_id: str) -> None:
        self.modules = {key: said for key, said in self.modules.items() if key[0] != worker_id}
        self.replays = {key: books for key, books in self.replays.items() if key[0] != worker_id}

    def keep(self, module_ids: Container[str]) -> None:
        """Tell no more of other modules than these: players of a league come and go."""
        self.modules = {key: said for key, said in self.modules.items() if key[1] in module_ids}
        self.replays = {key: books for key, books in self.replays.items() if key[1] in module_ids}
        self.by_module = {key: of for key, of in self.by_module.items() if key in module_ids}

    def goes_on(self, training_time: float, steps_trained: int) -> None:
        """The run has a past: rates are over what it adds."""
        self.rate = TrainingRate(training_time, steps_trained)
        self._trained_last = self._ended_last = (training_time, steps_trained)
        self._episodes_last = self.episodes

    @property
    def return_mean(self) -> float | None:
        """Over the last 100 episodes; None before there is one."""
        return _mean(self.returns) if self.returns else None

    @property
    def length_mean(self) -> float | None:
        return _mean(self.lengths) if self.lengths else None

    @property
    def steps_without_an_end(self) -> int:
        """Trained on since an episode ended, as of the last line."""
        return self._trained_last[1] - self._ended_last[1]

    def line(self, training_time: float, steps_trained: int) -> dict[str, Any]:
        """What happened since the last line; counters come from the ledger.

        Args:
            training_time: seconds since the first sample request: starting up is not part of rates.
            steps_trained: since the run began.
        """
        self.rate.note(training_time, steps_trained)
        self._trained_last = (training_time, steps_trained)
        if self.episodes != self._episodes_last:
            self._episodes_last, self._ended_last = self.episodes, self._trained_last
        return {
            **self._staleness_lately.take(),
            "episodes": self.episodes,
            "episode_return_mean": self.return_mean,
            "episode_return_age": training_time - self._ended_last[0] if self.returns else None,
            "episode_length_mean": self.length_mean,
            "steps_per_second": self.rate.per_second(),
            "evaluation_return_mean": self.evaluation_return,
            "seconds": self.workers.seconds(),
            "inference": self._inference(),
            "modules": self._modules(),
            **({"info": self._infos()} if self.infos else {}),
            **({"custom": dict(self.custom)} if self.custom else {}),
        }

    def _inference(self) -> dict[str, float] | None:
        """By gateways since the last line, means; None: there was none."""
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
        """By name of a number, means over episodes."""
        found = {}
        for name, episodes in self.infos.items():
            means = (sum(values) / len(values) for values in zip(*episodes, strict=True))
            found[name] = dict(zip(InfoNumber._fields, means, strict=True))
        return found

    def _modules(self) -> dict[str, dict[str, float]]:
        """By module id, means over the learners. The numbers of a replay are those of each
        learner's newest answer, not of its last metrics, so that they agree with the ledger."""
        values: dict[str, dict[str, list[float]]] = {}
        for key in dict.fromkeys([*self.modules, *self.replays]):
            said = self.modules.get(key, {})
            if key in self.replays:
                said = {**said, key[1]: {**said.get(key[1], {}), **self.replays[key]}}
            for module_id, metrics in said.items():
                for name, value in metrics.items():
                    values.setdefault(module_id, {}).setdefault(name, []).append(value)
        return {
            module_id: {
                # All learners wait for the replay that lacks the most steps.
                name: max(each) if name == "replay_steps_missing" else sum(each) / len(each)
                for name, each in metrics.items()
            }
            for module_id, metrics in values.items()
        }


def _mean(values: deque[float] | deque[int]) -> float:
    return sum(values) / len(values)
