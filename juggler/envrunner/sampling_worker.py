"""Processes, commands, batches and receipts of workers that sample: EnvRunners and gateways."""

from __future__ import annotations

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle
import torch
from gymnasium.vector import VectorEnv

from juggler.envrunner.agent_returns import to_messages
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.envrunner_program import EnvRunnerProgram
from juggler.envrunner.finiteness import NonFiniteBatch
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.info_numbers import to_messages as to_info_messages
from juggler.envrunner.learner_streams import LearnerStreams
from juggler.envrunner.rounds import PlayedRound, RequestedRound
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.envrunner.stage import UserCode
from juggler.runtime.actors.attachment import Attachment, Contact
from juggler.runtime.actors.resources import keep_freed_memory
from juggler.runtime.actors.worker import CommandLoop, Inbox, from_json
from juggler.runtime.connectors.mergeable_state import to_bytes
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.v1 import attach_pb2, episodes_pb2, training_pb2

#: Names of this function in OpenBLAS, and in NumPy's wheels.
_SET_THREADS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


def prepare_process(program: EnvRunnerProgram) -> tuple[Any, Any, Any]:
    """Configure the whole process -> the program's own code."""
    keep_freed_memory()
    # Small forward passes gain nothing from more threads, and runners share the cores.
    torch.set_num_threads(1)
    numpy_in_one_thread()
    if not program.own_code:
        return None, None, None
    own_code: tuple[Any, Any, Any] = cloudpickle.loads(program.own_code)
    return own_code


def numpy_in_one_thread() -> None:
    """Let NumPy multiply matrices only in the calling thread.

    This works if its library is OpenBLAS, as in its wheels. By default, OpenBLAS has one thread per
    core.
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in sorted(each for each in mapped if "openblas" in each):
        library = ctypes.CDLL(path)  # the one that NumPy has loaded
        for name in _SET_THREADS:
            with suppress(AttributeError):
                getattr(library, name)(1)


def step_back(env: VectorEnv[Any, Any, Any] | None = None) -> None:
    """Lower the priority of the calling thread and of environments' processes.

    The learner goes first, because all EnvRunners wait when it waits for a processor. Heartbeats go
    first, too. It is called after the setup, which the run waits for.
    """
    niceness = os.nice(10)
    for process in getattr(None if env is None else env.unwrapped, "processes", ()):
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)


def index_of(attachment: Attachment) -> int:
    """Return the number of a worker among the workers of its role."""
    return int(attachment.worker_id.rpartition("-")[2])


class SamplingWorker(ABC):
    """Base class of workers that sample by the driver's commands.

    Args:
        held_up_by: describes the call that a thread is in, from its innermost frame.
    """

    def __init__(
        self,
        attachment: Attachment,
        inbox: Inbox,
        contact: Contact,
        own_code: UserCode,
        held_up_by: Callable[[FrameType | None], str],
    ) -> None:
        attachment.held_up_by = held_up_by
        self._attachment, self._contact, self._own_code = attachment, contact, own_code
        self._index = index_of(attachment)
        self._reported: set[str] = set()  # notes of the streams of all modules
        self._frozen = FrozenWeights()
        self._streams: dict[str, LearnerStreams] = {}  # by module that is trained
        self._deliveries = Deliveries(attachment)
        self._round = RequestedRound()
        self._loop = CommandLoop(attachment, inbox)
        self._loop.on(training_pb2.Restore, self._restore)
        self._loop.on(training_pb2.Setup, self._setup)
        self._loop.on(training_pb2.Learners, self._learners)
        self._loop.on(training_pb2.SampleRequest, self._sample)
        self._loop.on(training_pb2.AddPlayer, self._add_player)
        self._loop.on(training_pb2.RemovePlayer, self._remove_player)

    def run(self) -> str:
        try:
            return self._loop.run()
        finally:
            for command_id, request in self._round.requests.items():
                self._deliveries.no_learner(command_id, request)  # the round stays incomplete
            self._deliveries.settle(self._streams.values())

    # -- differences between workers --------------------------------------------------------------

    @abstractmethod
    def _begin(
        self, command_id: int, setup: EnvRunnerSetup, seed: int
    ) -> training_pb2.Ready | None:
        """Build environments and modules from the setup. None: the reply follows."""

    @abstractmethod
    def _play(self, requests: Mapping[int, training_pb2.SampleRequest]) -> None:
        """Sample for the requests of a round, by command id."""

    @abstractmethod
    def _admit_player(self, module_id: str, acting: ActingSetup) -> None:
        """Let a player of a league be in line-ups from now on."""

    @abstractmethod
    def _drop_player(self, module_id: str) -> None:
        """Remove a player, once no running episode has it."""

    def _receipt(self, request: training_pb2.SampleRequest) -> training_pb2.Receipt:
        """Make an empty receipt for a request."""
        return receipt_for(request)

    # -- results of a round -----------------------------------------------------------------------

    def _deliver(
        self,
        requests: Mapping[int, training_pb2.SampleRequest],
        played: PlayedRound,
    ) -> None:
        """Send each batch to its learner, and answer the other requests.

        Raises:
            NonFiniteBatch: steps of a module are lost. All requests are answered.
        """
        broken: NonFiniteBatch | None = None
        reported = False  # one of the receipts has the results of the round itself
        for command_id, request in requests.items():
            result, receipt = played.modules[request.module_id], self._receipt(request)
            if isinstance(result, NonFiniteBatch):
                receipt.live_steps = result.live_steps
                self._deliveries.answer(command_id, receipt, "nonfinite", str(result))
                broken = result
                continue
            # The driver books a batch by its oldest weights.
            receipt.version.CopyFrom(result.version.message())
            receipt.episode_returns.extend(result.episode_returns)
            receipt.episode_lengths.extend(result.episode_lengths)
            receipt.stale_steps = result.stale_steps
            if result.connector_delta:
                receipt.connector_delta = to_bytes(result.connector_delta)
            # Exactly one receipt has them, or the driver would count them twice.
            if not reported:
                report_round(receipt, played)
                reported = True
            sender = self._streams[request.module_id].sender(request.learner)
            if result.batch is not None:
                receipt.live_steps = result.batch.live_steps
            if sender is None:
                why = f"no learner {request.learner}"
                self._deliveries.answer(command_id, receipt, "learner_lost", why)
            elif result.batch is None:
                self._deliveries.answer(command_id, receipt)
            else:
                self._deliveries.send(command_id, request, receipt, result.batch, sender)
        if broken is not None:
            raise broken

    # -- commands ---------------------------------------------------------------------------------

    def _restore(self, _: int, part: training_pb2.Restore) -> attach_pb2.Done:
        """Receive a part of a module's weights."""
        self._frozen.add(part)
        return attach_pb2.Done()

    def _setup(self, command_id: int, command: training_pb2.Setup) -> training_pb2.Ready | None:
        setup = from_json(command.config, EnvRunnerSetup)
        seed_process(command.seed)
        for module_id, acting in setup.modules.items():
            self._acts_with(module_id, acting)
        return self._begin(command_id, setup, command.seed)

    def _add_player(self, _: int, command: training_pb2.AddPlayer) -> attach_pb2.Done:
        acting = from_json(command.config, ActingSetup)
        self._acts_with(command.module_id, acting)
        self._admit_player(command.module_id, acting)
        return attach_pb2.Done()

    def _remove_player(self, _: int, command: training_pb2.RemovePlayer) -> attach_pb2.Done:
        self._drop_player(command.module_id)
        if (streams := self._streams.pop(command.module_id, None)) is not None:
            streams.close()
        return attach_pb2.Done()

    def _learners(self, _: int, message: training_pb2.Learners) -> attach_pb2.Done:
        """Connect to exactly the present learners of a module."""
        if streams := self._streams.get(message.module_id):
            streams.connect(message.learners)
        return attach_pb2.Done()

    def _sample(self, command_id: int, request: training_pb2.SampleRequest) -> None:
        if request.module_id not in self._streams:
            raise ValueError(
                f"asked for a batch of module {request.module_id!r}, and acts with "
                f"{', '.join(map(repr, self._streams))}"
            )
        if self._round.add(command_id, request):  # else more requests of the round follow
            requests, self._round = self._round.requests, RequestedRound()
            self._play(requests)

    def _is_waiting(self, streams: LearnerStreams, *kinds: type[Any]) -> bool:
        """Return whether the loop ends, or a command about this module waits."""
        mine = streams.module_id
        return any(self._loop.waits(kind, lambda each: each.module_id == mine) for kind in kinds)

    def _acts_with(self, module_id: str, acting: ActingSetup) -> None:
        if acting.digest:
            self._frozen.expect(module_id)
        else:  # it has a learner
            self._streams[module_id] = LearnerStreams(
                module_id,
                self._index,
                self._attachment,
                self._contact,
                self._deliveries.settled,
                self._reported,
            )

    def _note(self, text: str, *, warning: bool = False) -> None:
        self._attachment.report(training_pb2.Note(text=text, warning=warning))

    def _warn(self, text: str) -> None:
        self._note(text, warning=True)


_ACKNOWLEDGED_SECONDS = 2.0  # for learners to acknowledge batches when this worker leaves
_CLOSED_SECONDS = 0.5  # for streams to give them up


class Deliveries:
    """Answers each sample request with a receipt once its batch is delivered.

    Batches are settled in the threads of streams, while the worker continues.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._lock = threading.Condition()
        # Unsettled batches by module and batch id: the command, and its receipt.
        self._open: dict[tuple[str, int], tuple[int, training_pb2.Receipt]] = {}
        self._seconds: dict[str, float] = defaultdict(float)  # spent so far, by name

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Add seconds spent, by name."""
        with self._lock:
            for name, spent in seconds.items():
                self._seconds[name] += spent

    def has_spent(self, seconds: Mapping[str, float]) -> None:
        """Set the seconds spent since this worker began, by name."""
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
        """Answer a request without a batch.

        Args:
            dropped: the reason if its steps are lost, as in `Receipt.dropped`.
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
        """Send the receipt of a batch that has arrived or is lost."""
        with self._lock:
            command_id, receipt = self._open[module_id, batch_id]
            receipt.seconds.update(self._seconds)
            receipt.dropped, receipt.explanation = dropped, explanation
            self._attachment.reply(command_id, receipt)
            del self._open[module_id, batch_id]
            self._lock.notify_all()

    def settle(self, streams: Iterable[LearnerStreams]) -> None:
        """Wait until the driver has the receipts of all sent batches."""
        with self._lock:
            sent = set(self._open)
            if self._lock.wait_for(lambda: sent.isdisjoint(self._open), _ACKNOWLEDGED_SECONDS):
                return
        for each in streams:
            each.close_senders()
        with self._lock:
            self._lock.wait_for(lambda: sent.isdisjoint(self._open), _CLOSED_SECONDS)


def receipt_for(request: training_pb2.SampleRequest) -> training_pb2.Receipt:
    """Make an empty receipt for a request."""
    return training_pb2.Receipt(
        module_id=request.module_id, batch_id=request.batch_id, learner=request.learner
    )


def report_round(receipt: training_pb2.Receipt, played: PlayedRound) -> None:
    """Write a round's results, other than its batches, into a receipt."""
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
    receipt.agent_returns.extend(to_messages(played.agent_returns))
    receipt.matches.extend(played.matches)
