"""What workers are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from google.protobuf.message import Message

from juggler.driver.changed_values import ChangedValues
from juggler.driver.core import events
from juggler.driver.workers.connector_state import ConnectorState
from juggler.driver.workers.registry import WorkerRegistry
from juggler.envrunner.program import ENVRUNNER
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.histogram import DURATIONS, Histogram
from juggler.runtime.actors.hub import Hub
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.requests import CapReached, RequestPool
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


class GivesLineUps(Protocol):
    """Says what a request tells an EnvRunner of the matches of a league."""

    def line_ups(self, worker: Worker, round: int) -> Sequence[training_pb2.LineUp]: ...


class CommandSender:
    """Commands of the core and of the driver, as messages on their way.

    Args:
        hub: carries them.
        registry: who is here.
        connectors: by module id, what requests tell of what connectors have learned.
        values: numbers in the place of schedules, which updates tell.

    Attributes:
        pool: the commands that are in flight.
        sample_request_seconds: from each sample request to its receipt.
        update_seconds: from each update's issue to a learner's answer.
        league: of the run; None: it has none.
    """

    def __init__(
        self,
        hub: Hub,
        registry: WorkerRegistry,
        connectors: Mapping[str, ConnectorState],
        values: ChangedValues,
    ) -> None:
        self.sample_request_seconds = Histogram(DURATIONS)
        self.update_seconds = Histogram(DURATIONS)
        latencies = {
            training_pb2.SampleRequest: self.sample_request_seconds,
            training_pb2.Update: self.update_seconds,
        }
        self.pool = RequestPool(hub, cap=1 << 16, latencies=latencies)
        self._hub = hub
        self._registry = registry
        self._connectors = connectors
        self._values = values
        self.league: GivesLineUps | None = None
        self._anew: dict[Worker, int] = {}  # seeds that nobody has been told yet

    def send(self, worker: Worker, message: Message) -> None:
        try:
            self.pool.submit(worker, message)
        except CapReached as error:  # it has not answered for long
            self._hub.dismiss(worker, str(error))

    def tell(self, worker_id: str, message: Message) -> None:
        """Send a command to whoever is ready under this id: that is whom the core means."""
        worker = self._registry.ready.get(worker_id)
        if worker is not None:  # else its Left event was heard, and the core knows
            self.send(worker, message)

    def dismiss_all(self) -> None:
        """Ask every worker to leave."""
        for worker in list(self._registry.attached.values()):
            self.send(worker, attach_pb2.Stop())

    def begin_anew(self, update: int) -> None:
        """Let every EnvRunner that is here begin anew with its next request.

        They then do what those of a run do that is resumed at this update: the same seeds, and the
        same knowledge of what connectors have learned.
        """
        runners = self._registry.of_role(ENVRUNNER)
        self._anew = {worker: self._registry.seed(worker, update=update) for worker in runners}
        for connectors in self._connectors.values():
            connectors.announce()

    def carry_out(self, command: events.Command) -> None:
        """What the core wants."""
        match command:
            case events.Request():
                self._ask(command)
            case events.IssueUpdate():
                settings_of = self._registry.trained[command.module_id]
                values = self._values.of(command.module_id, settings_of)
                for share in command.shares:
                    update = training_pb2.Update(
                        module_id=command.module_id,
                        update_id=command.update_id,
                        generation=command.generation,
                        batch_ids=share.batch_ids,
                        values=values,
                    )
                    self.tell(share.learner, update)
            case events.FormGroup():
                self._form_group(command)
            case events.LeftGroup():
                self._registry.left_group(command.learner, command.module_id)
            case events.Discard():
                discard = training_pb2.Discard(
                    module_id=command.module_id, batch_ids=command.batch_ids
                )
                self.tell(command.learner, discard)

    def _ask(self, command: events.Request) -> None:
        worker = self._registry.ready.get(command.runner)
        if worker is None:
            return
        request = training_pb2.SampleRequest(
            module_id=command.module_id,
            batch_id=command.batch_id,
            learner=command.learner,
            generation=command.generation,
            at_least=command.at_least.message(),
            connector_state=self._connectors[command.module_id].news_for(worker),
            seed=self._anew.pop(worker, None),  # said once, in the first request of a round
            round=command.round,
            requests_in_round=command.requests_in_round,
            permit=self._registry.permits.of(command.batch_id, command.module_id),
            line_ups=self.league.line_ups(worker, command.round) if self.league else (),
        )
        self.send(worker, request)

    def _form_group(self, command: events.FormGroup) -> None:
        points = self._registry.meeting_points[command.module_id]
        group = training_pb2.Group(
            module_id=command.module_id,
            generation=command.generation,
            members=command.members,
            meeting_points=[points[member] for member in command.members],
        )
        for member in command.members:
            self.tell(member, group)
        for worker in self._registry.ready.values():
            if worker.role != LEARNER:
                self.tell_learners(worker, command.module_id, command.generation)

    def tell_learners(self, worker: Worker, module_id: str, generation: int) -> None:
        """Let an EnvRunner know where the learners of a module are."""
        self.send(worker, self._registry.learners_message(module_id, generation))
