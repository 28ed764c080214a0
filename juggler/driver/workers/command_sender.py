"""Sends commands to workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import Message

from juggler.driver.core import events
from juggler.driver.core.group import worker_order
from juggler.envrunner.envrunner_program import ENVRUNNER
from juggler.runtime.actors.hub import Worker
from juggler.runtime.actors.requests import DURATIONS, CapReached, Histogram, RequestPool
from juggler.runtime.connectors.mergeable_state import (
    State,
    from_bytes,
    merge,
    moments_in,
    to_bytes,
)
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.driver.run_parts import RunParts


class CommandSender:
    """Sends commands of the core and of the driver."""

    def __init__(self, parts: RunParts) -> None:
        # From each sample request to its receipt
        self.sample_request_seconds = Histogram(DURATIONS)
        self.update_seconds = Histogram(DURATIONS)  # from each update's issue to a learner's answer
        latencies = {
            training_pb2.SampleRequest: self.sample_request_seconds,
            training_pb2.Update: self.update_seconds,
        }
        self.pool = RequestPool(parts.hub, cap=1 << 16, latencies=latencies)
        self._parts, self._registry = parts, parts.registry
        self._restart_seeds: dict[Worker, int] = {}  # seeds of restarts that were not sent yet

    def send(self, worker: Worker, message: Message) -> None:
        try:
            self.pool.submit(worker, message)
        except CapReached as error:  # the worker has not answered for long
            self._parts.hub.dismiss(worker, str(error))

    def send_to(self, worker_id: str, message: Message) -> None:
        """Send a command to a worker, if it is ready."""
        worker = self._registry.ready.get(worker_id)
        if worker is not None:  # otherwise its Left event was booked in the core
            self.send(worker, message)

    def restart_runners(self, update: int) -> None:
        """Have EnvRunners restart at the next request, as after a resume."""
        runners = self._registry.of_role(ENVRUNNER)
        self._restart_seeds = {
            worker: self._registry.seed(worker, update=update) for worker in runners
        }
        for module in self._parts.modules.values():
            module.connectors.announce()

    def carry_out(self, command: events.Command) -> None:
        """Carry out a command of the core."""
        match command:
            case events.Request():
                self._ask(command)
            case events.IssueUpdate():
                settings_of = self._registry.trained[command.module_id]
                values = self._parts.values.of(command.module_id, settings_of)
                for share in command.shares:
                    update = training_pb2.Update(
                        module_id=command.module_id,
                        update_id=command.update_id,
                        generation=command.generation,
                        batch_ids=share.batch_ids,
                        values=values,
                    )
                    self.send_to(share.learner, update)
            # Learners meet at the points that they reported when ready.
            case events.FormGroup():
                self._form_group(command)
            case events.ReleaseLearner():
                del self._registry.meeting_points[command.module_id][command.learner]
            case events.Discard():
                discard = training_pb2.Discard(
                    module_id=command.module_id, batch_ids=command.batch_ids
                )
                self.send_to(command.learner, discard)

    def _ask(self, command: events.Request) -> None:
        worker, league = self._registry.ready.get(command.runner), self._parts.league
        if worker is None:
            return
        request = training_pb2.SampleRequest(
            module_id=command.module_id,
            batch_id=command.batch_id,
            learner=command.learner,
            generation=command.generation,
            at_least=command.at_least.message(),
            connector_state=self._parts.modules[command.module_id].connectors.news_for(worker),
            # Only the first request of a round has the seed.
            seed=self._restart_seeds.pop(worker, None),
            round=command.round,
            requests_in_round=command.requests_in_round,
            line_ups=league.line_ups(worker, command.round) if league else (),
            steps_trained=self._parts.core.trained,
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
            self.send_to(member, group)
        for worker in self._registry.of_role(ENVRUNNER):
            self.send_learners(worker, command.module_id, command.generation)

    def send_learners(self, worker: Worker, module_id: str, generation: int) -> None:
        """Send an EnvRunner the addresses of a module's learners."""
        learners = [
            training_pb2.Learners.Learner(
                worker_id=learner.worker_id,
                incarnation=learner.incarnation,
                addresses=learner.data_addresses,
            )
            for learner in self._registry.learners_of(module_id)
        ]
        message = training_pb2.Learners(
            module_id=module_id, generation=generation, learners=learners
        )
        self.send(worker, message)


#: Growth factor of samples between two announcements of connectors' state to EnvRunners. With many
#: samples, one more batch changes little, and would cost traffic with every request.
_WORTH_TELLING = 1.01


class ConnectorState:
    """Merges deltas of receipts in order, and sends the result to EnvRunners."""

    def __init__(self, state: State | None = None) -> None:
        self.merged: State = state or {}  # the state; {} if no connector learns
        self._waiting: dict[tuple[str, int], State] = {}  # deltas by EnvRunner and batch id
        # Number of the last announcement that each EnvRunner has
        self._sent_to: dict[Worker, int] = {}
        self._news, self._content = 0, b""
        self._samples = 0.0  # samples in the last announcement
        self.announce()

    def add_delta(self, worker_id: str, batch_id: int, delta: bytes) -> None:
        """Store a receipt's delta, to be merged later."""
        if delta:
            state = from_bytes(delta)
            merge(self.merged or state, state)
            self._waiting[worker_id, batch_id] = state

    def merge_waiting(self) -> None:
        """Merge stored deltas, in order of EnvRunners and their batches."""
        if not self._waiting:
            return
        for key in sorted(self._waiting, key=lambda key: (worker_order(key[0]), key[1])):
            delta = self._waiting.pop(key)
            self.merged = merge(self.merged, delta) if self.merged else delta
        if _samples(self.merged) >= _WORTH_TELLING * self._samples:
            self.announce()

    def announce(self) -> None:
        """Announce the merged state to all EnvRunners."""
        self._samples = _samples(self.merged)
        if self._samples:
            self._news, self._content = self._news + 1, to_bytes(self.merged)

    def news_for(self, worker: Worker) -> bytes:
        """Return news for a worker's next request, or b""."""
        if self._sent_to.get(worker, 0) == self._news:
            return b""
        self._sent_to[worker] = self._news
        return self._content

    def left(self, worker: Worker) -> None:
        self._sent_to.pop(worker, None)


def _samples(state: State) -> float:
    """Return the number of samples in all moments together."""
    return sum(float(each.count) for each in moments_in(state).values())
