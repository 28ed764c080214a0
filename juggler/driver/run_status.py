"""Assembles the status of a run from its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from juggler.driver.core.ledger import Counters
from juggler.driver.record.progress import Journal
from juggler.driver.record.worker_records import WorkerRecord
from juggler.driver.run_parts import RunParts
from juggler.envrunner.agent_returns import has_metrics_by_agent
from juggler.runtime.actors.hub import Vitals
from juggler.runtime.actors.requests import Histogram
from juggler.runtime.actors.resources import resident_bytes
from juggler.runtime.wire.v1 import status_pb2


@dataclass(frozen=True, slots=True)
class StatusReader:
    """Assembles a run's status from its parts, in the driver's thread."""

    run_id: str
    parts: RunParts
    journal: Journal

    def read(self) -> status_pb2.RunStatus:
        parts, records = self.parts, self.parts.metrics.workers
        rates = records.rates()
        status = status_pb2.RunStatus(
            run_id=self.run_id,
            run_dir=str(parts.run_dir.resolve()),
            env=parts.config.env_runner.env,
            algorithm=parts.config.learner.algorithm,
            phase=parts.end.reason or "training",
            wall_seconds=parts.clock.now().wall,
            version=parts.core.weights_version.message(),
            updates=records.updates,
            restarts=parts.restarts,
            steps_per_second=parts.metrics.rate.per_second(),
            steps=_steps(parts.core.counters()),
            queues=self._queues(),
            # Modules and agents are listed only if there are several.
            modules=self._modules(),
            agents=self._agents(),
            league=self._league(),
            episodes=self._episodes(),
            staleness=_histogram(parts.metrics.staleness),
            sample_request_seconds=_histogram(parts.commands.sample_request_seconds),
            update_seconds=_histogram(parts.commands.update_seconds),
            driver=status_pb2.Resources(
                cpu_seconds=time.process_time(), resident_bytes=resident_bytes()
            ),
        )
        # Workers that are gone stay, with their last error.
        vitals = parts.hub.vitals()
        for name, record in records.by_id.items():
            worker = self._worker(record, rates.get(name, 0.0), vitals.get(name))
            status.workers.append(worker)
        for moment, level, text in self.journal.newest:
            status.log_messages.add(time=moment, level=level, text=text)
        return status

    def _modules(self) -> Iterator[status_pb2.ModuleStatus]:
        """Yield the modules if there are several, trained ones first."""
        modules, others = self.parts.core.modules, self.parts.config.others
        if len(modules) + len(others) < 2:
            return
        for module_id, module in modules.items():
            yield status_pb2.ModuleStatus(
                module_id=module_id,
                version=module.weights_version.message(),
                steps=_steps(module.ledger.counters()),
                return_mean=self.parts.metrics.of(module_id).return_mean,
            )
        for module_id in others:
            metrics = self.parts.metrics.of(module_id)
            yield status_pb2.ModuleStatus(
                module_id=module_id, return_mean=metrics.return_mean, steps_played=metrics.played
            )

    def _agents(self) -> Iterator[status_pb2.AgentStatus]:
        """Yield the agents if there are several, but not too many."""
        agents = self.parts.config.agent_names or tuple(self.parts.metrics.by_agent)
        for agent in agents if has_metrics_by_agent(agents) else ():
            metrics = self.parts.metrics.of_agent(agent)
            yield status_pb2.AgentStatus(
                agent=agent, episodes=metrics.episodes, return_mean=metrics.return_mean
            )

    def _league(self) -> status_pb2.LeagueStatus | None:
        if (league := self.parts.league) is None:
            return None
        line, players = league.standings.line(), league.league.roster.players
        learning = [
            status_pb2.PlayerStatus(player_id=player_id, role=players[player_id].role, **row)
            for player_id, row in line["learning"].items()
        ]
        return status_pb2.LeagueStatus(
            players=line["players"], historical=line["historical"], learning=learning
        )

    def _queues(self) -> status_pb2.Queues:
        core = self.parts.core
        return status_pb2.Queues(
            requests_in_flight=core.requests_in_flight,
            updates_in_flight=core.updates_in_flight,
            queued_batches=core.held_batches,
            queued_steps=core.held_steps,
        )

    def _episodes(self) -> status_pb2.RunStatus.Episodes:
        metrics = self.parts.metrics
        return status_pb2.RunStatus.Episodes(
            ended=metrics.episodes,
            return_mean=metrics.return_mean,
            length_mean=metrics.length_mean,
            evaluation_return_mean=metrics.evaluation_return,
        )

    def _worker(
        self, record: WorkerRecord, rate: float, vitals: Vitals | None
    ) -> status_pb2.WorkerStatus:
        now = time.monotonic()
        status = status_pb2.WorkerStatus(
            worker_id=record.worker_id,
            role=record.role,
            state=record.state,
            device=self.parts.registry.devices.get(record.worker_id, ""),
            steps=record.steps,
            steps_per_second=rate,
            seconds_silent=now - record.changed if vitals is None else vitals.seconds_silent,
            restarts=record.restarts,
            last_error=record.last_error,
            seconds_since_error=now - record.error_time if record.last_error else 0.0,
            seconds=record.total_seconds(),
            counts=record.total_counts(),
        )
        # An unset field is unknown, as opposed to 0.
        if record.simulators is not None:
            status.simulators.CopyFrom(record.simulators)
        if record.version is not None:
            status.version.CopyFrom(record.version.message())
        if (worker := record.worker) is not None:
            status.host, status.pid = worker.host, worker.pid
            status.incarnation = worker.incarnation
        if vitals is not None:
            status.resources.resident_bytes = vitals.resident_bytes
            status.resources.device_bytes = vitals.device_bytes
            status.resources.cpu_seconds = vitals.cpu_seconds
        return status


def _steps(books: Counters) -> status_pb2.StepBooks:
    return status_pb2.StepBooks(
        sampled=books.sampled,
        trained=books.trained,
        dropped={reason: steps for reason, steps in books.dropped.items() if steps},
        in_flight=books.in_flight,
        lost_unreported=books.lost_unreported,
    )


def _histogram(histogram: Histogram) -> status_pb2.Histogram:
    return status_pb2.Histogram(bounds=histogram.bounds, counts=histogram.counts, sum=histogram.sum)
