"""Batches on their way to learners, and receipts for the driver."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping

from juggler.envrunner.agent_returns import to_messages
from juggler.envrunner.info_numbers import to_messages as to_info_messages
from juggler.envrunner.learner_streams import LearnerStreams
from juggler.envrunner.rounds import PlayedRound
from juggler.runtime.actors.attachment import Attachment
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

_ACKNOWLEDGED_SECONDS = 2.0  # for learners to take what was sent when this worker leaves
_CLOSED_SECONDS = 0.5  # for streams to give it up


class Deliveries:
    """Answers each sample request with a receipt once its batch is delivered.

    Batches are settled in the threads of streams, while the worker continues.

    Args:
        attachment: takes the receipts.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._lock = threading.Condition()
        # Unsettled batches by module and batch id: the command, and its receipt.
        self._open: dict[tuple[str, int], tuple[int, training_pb2.Receipt]] = {}
        self._seconds: dict[str, float] = defaultdict(float)  # where the time went

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Add to the seconds that were spent on something, by its name."""
        with self._lock:
            for name, spent in seconds.items():
                self._seconds[name] += spent

    def has_spent(self, seconds: Mapping[str, float]) -> None:
        """Set the seconds spent on something since this worker began."""
        with self._lock:
            self._seconds.update(seconds)

    def send(
        self,
        command_id: int,
        request: training_pb2.SampleRequest,
        receipt: training_pb2.Receipt,
        batch: EpisodeBatch,
        sender: EpisodeSender,
    ) -> None:
        """Send a batch to its learner; the receipt follows its arrival."""
        header = episodes_pb2.BatchHeader(
            module_id=request.module_id,
            batch_id=request.batch_id,
            envrunner=self._attachment.worker_id,
            generation=request.generation,
            live_steps=receipt.live_steps,
            version=receipt.version,
        )
        with self._lock:
            self._open[request.module_id, request.batch_id] = (command_id, receipt)
        sender.send(header, {request.module_id: batch.to_tree()})

    def answer(
        self, command_id: int, receipt: training_pb2.Receipt, dropped: str = "", why: str = ""
    ) -> None:
        """Answer a request for which there is no batch.

        Args:
            command_id: the request's.
            receipt: to the request.
            dropped: the reason if its steps are lost, as in `Receipt.dropped`.
            why: an explanation.
        """
        receipt.dropped, receipt.explanation = dropped, why
        with self._lock:
            receipt.seconds.update(self._seconds)
        self._attachment.reply(command_id, receipt)

    def no_learner(self, command_id: int, request: training_pb2.SampleRequest) -> None:
        """Answer a request whose learner is gone."""
        why = f"no learner {request.learner}"
        self.answer(command_id, receipt_for(request), "learner_lost", why)

    def settled(self, module_id: str, batch_id: int, dropped: str, explanation: str) -> None:
        """A batch is with its learner, or lost: send its receipt."""
        with self._lock:
            command_id, receipt = self._open[module_id, batch_id]
            receipt.seconds.update(self._seconds)
            receipt.dropped, receipt.explanation = dropped, explanation
            self._attachment.reply(command_id, receipt)
            del self._open[module_id, batch_id]
            self._lock.notify_all()

    def settle(self, streams: Iterable[LearnerStreams]) -> None:
        """Wait until every batch that was sent has its receipt.

        The driver must get it before this process ends.
        """
        with self._lock:
            sent = set(self._open)
            if self._lock.wait_for(lambda: sent.isdisjoint(self._open), _ACKNOWLEDGED_SECONDS):
                return
        for each in streams:
            each.close_senders()
        with self._lock:
            self._lock.wait_for(lambda: sent.isdisjoint(self._open), _CLOSED_SECONDS)


def receipt_for(request: training_pb2.SampleRequest) -> training_pb2.Receipt:
    """An empty receipt for a request."""
    return training_pb2.Receipt(
        module_id=request.module_id, batch_id=request.batch_id, learner=request.learner
    )


def tell_round(receipt: training_pb2.Receipt, played: PlayedRound, *, by_agent: bool) -> None:
    """Report a round's results besides its batches in a receipt.

    Args:
        receipt: of one request of the round.
        played: the round.
        by_agent: whether each agent's returns are reported.
    """
    receipt.env_returns.extend(played.env_returns)
    receipt.env_lengths.extend(played.env_lengths)
    receipt.infos.extend(to_info_messages(played.infos))
    for module_id, other in played.others.items():
        receipt.played.add(
            module_id=module_id,
            steps=other.steps,
            episode_returns=other.episode_returns,
            episode_lengths=other.episode_lengths,
        )
    if by_agent:
        receipt.agent_returns.extend(to_messages(played.agent_returns))
    for match in played.matches:
        receipt.matches.add(
            match_id=match.match_id,
            attempt=match.attempt,
            returns=match.returns,
            length=match.length,
        )
