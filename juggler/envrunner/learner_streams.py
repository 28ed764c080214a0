"""The streams between an EnvRunner and the learners of one module."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from juggler.runtime.actors.attachment import Attachment, Contact
from juggler.runtime.actors.calls import CallEnd
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import EndpointError, why_not_secure
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.streams.host_weights import Meeting
from juggler.runtime.streams.shared_directory import (
    SHARED_DIR_VARIABLE,
    learner_socket,
    path_in_shared_directory,
)
from juggler.runtime.streams.shared_memory import least_bytes
from juggler.runtime.streams.weights_stream import Weights, WeightsSubscription
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

#: The longest wait for the first weights of a learner.
FIRST_WEIGHTS_SECONDS = 30.0


class LearnerOutOfReach(ValueError):
    """No weights arrived from the learner's address."""


class LearnerStreams:
    """Brings one module's weights from its learners, and batches to them.

    Args:
        index: of this EnvRunner. All learners of a group have the same weights, so EnvRunners are
            spread over the learners.
        settled: called in another thread when a batch has arrived or is lost, with the module, the
            batch id, "" or the reason for its loss, and an explanation.
        reported: notes that this EnvRunner has reported, shared by the streams of all modules.
    """

    def __init__(
        self,
        module_id: str,
        index: int,
        attachment: Attachment,
        contact: Contact,
        settled: Callable[[str, int, str, str], None],
        reported: set[str],
    ) -> None:
        self.module_id = module_id
        # By worker id of a learner, its incarnation, and the sender of batches.
        self.senders: dict[str, tuple[str, EpisodeSender]] = {}
        # Of the weights that the module acts with; None: its initial weights.
        self.version: Version | None = None
        self._index, self._contact, self._settled = index, contact, settled
        self._attachment = attachment
        self._reported = reported
        self._worker_id = attachment.worker_id
        self._metadata = call_metadata(contact.token, attachment.run_id, attachment.incarnation)
        self._subscription: WeightsSubscription | None = None
        self._subscribed_to = ""  # the learner's incarnation

    # -- learners -------------------------------------------------------------------------------

    def connect(self, learners: Sequence[training_pb2.Learners.Learner]) -> None:
        """Connect to the module's present learners, and drop former ones.

        Raises:
            EndpointError: a learner has no address that this worker can use.
        """
        now = {learner.worker_id: learner for learner in learners}
        for worker_id, (incarnation, sender) in list(self.senders.items()):
            if worker_id not in now or now[worker_id].incarnation != incarnation:
                sender.close()
                del self.senders[worker_id]
        # A learner that came back has another incarnation, and so a new sender.
        for worker_id, learner in now.items():
            if worker_id not in self.senders:
                sender = EpisodeSender(
                    self._reachable(learner),
                    self._metadata,
                    partial(self._settled, self.module_id),
                    self._contact.tls,
                    self._shares_nothing,
                    self._stream_ended,
                    self._memory_of(learner),
                )
                self.senders[worker_id] = (learner.incarnation, sender)
        self._subscribe(learners[self._index % len(learners)] if learners else None)

    def sender(self, learner: str) -> EpisodeSender | None:
        """Return the sender to a learner; None: the learner is gone."""
        return self.senders.get(learner, ("", None))[1]

    def close_senders(self) -> None:
        for _, sender in self.senders.values():
            sender.close()

    def close(self) -> None:
        self.close_senders()
        if self._subscription is not None:
            self._subscription.close()

    def _stream_ended(self, end: CallEnd) -> None:
        if end.unanswered:
            self._report_once(f"connects to a learner again: {end.why}")

    def _shares_nothing(self, why: str) -> None:
        """Report why no memory is shared, once for this host."""
        if self._index == 0:
            self._report_once(why)

    def _report_once(self, why: str) -> None:
        if why not in self._reported:
            self._reported.add(why)
            self._attachment.report(training_pb2.Note(text=why))

    def _reachable(self, learner: training_pb2.Learners.Learner) -> str:
        """Return the first usable address; Unix sockets only on the driver's host."""
        for address in learner.addresses:
            if self._contact.local or not address.startswith("unix:"):
                return address
        raise EndpointError(
            f"{learner.worker_id} offers {list(learner.addresses)}, none of which "
            f"{self._worker_id} can reach: start the learner with --bind HOST:PORT"
        )

    def _memory_of(self, learner: training_pb2.Learners.Learner) -> str:
        """Return the address of a learner's socket in the shared directory.

        "": it has no socket there, or can be reached without it.
        """
        if self._reachable(learner).startswith("unix:") or least_bytes() is None:
            return ""
        secret = self._contact.token, self._attachment.run_id, learner.incarnation
        try:
            found = learner_socket(*secret)
        except EndpointError as error:  # the directory has changed since this worker started
            self._shares_nothing(f"shares no memory: {error}")
            return ""
        # A learner on another host has no socket in this directory.
        path = path_in_shared_directory(found)
        if not found or os.path.lexists(path):
            return found
        self._shares_nothing(
            f"shares no memory with learners that have no socket in {os.path.dirname(path)}: they "
            f"are on other hosts, or {SHARED_DIR_VARIABLE} is not set there"
        )
        return ""

    def _subscribe(self, learner: training_pb2.Learners.Learner | None) -> None:
        # A learner that came back serves weights at another address.
        incarnation = learner.incarnation if learner else ""
        if incarnation == self._subscribed_to:
            return
        if self._subscription is not None:
            self._subscription.close()
        # Weights that were received and not loaded yet are dropped.
        self._subscribed_to, self._subscription = incarnation, None
        if learner is not None:
            run = self._contact.token, self._attachment.run_id
            self._subscription = WeightsSubscription(
                self._reachable(learner),
                self._metadata,
                self._worker_id,
                tls=self._contact.tls,
                module_id=self.module_id,
                inline=self._shares_nothing,
                memory=self._memory_of(learner),
                # One process of a host may read them for all: see `Meeting`.
                meeting=Meeting(*run, learner.incarnation, self.module_id),
                alone=self._report_once,
            )

    # -- weights --------------------------------------------------------------------------------

    @property
    def subscribed(self) -> bool:
        """Whether a learner sends weights."""
        return self._subscription is not None

    @property
    def newest(self) -> Weights | None:
        """The learner's newest weights; None: not yet received."""
        subscription = self._subscription  # another thread may replace it
        return None if subscription is None else subscription.newest

    def act_on(
        self, at_least: Version, cancelled: Callable[[], object], load: Callable[[Tree], None]
    ) -> bool:
        """Swap to the newest weights.

        Args:
            at_least: wait for weights of this version.
            cancelled: called during the wait; a true result ends it.
            load: makes the module act with other weights.

        Returns:
            False: there is no learner, or the wait was cancelled.

        Raises:
            LearnerOutOfReach: the learner's first weights do not come.
        """
        if self._subscription is None:
            return False
        deadline = time.monotonic() + FIRST_WEIGHTS_SECONDS
        weights = self._subscription.newest
        while weights is None or weights.version < at_least:
            if cancelled():
                return False
            try:
                weights = self._subscription.wait_for(at_least, timeout=0.5)
            except TimeoutError as error:
                # A learner that answers may be slow to load a large state, or to send its weights:
                # the driver's hang_seconds is the deadline.
                weights, answered = self._subscription.newest, self._subscription.answered
                if weights is None and not answered and time.monotonic() > deadline:
                    raise self.out_of_reach(error) from None
        if weights.version != self.version:
            load(weights.tree[self.module_id])
            self.version = weights.version
        return True

    def out_of_reach(self, error: TimeoutError) -> LearnerOutOfReach:
        """Make the error for weights that do not come."""
        assert self._subscription is not None
        address = self._subscription.address
        if refused := why_not_secure(address, "learner", self._contact.tls):
            return LearnerOutOfReach(refused)
        return LearnerOutOfReach(
            f"{error} Can this host reach that address? A learner on another host "
            "needs --bind, and --advertise where it is known by another address"
        )
