"""The Learner process: take episodes, update when told to, publish weights, keep books."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import cloudpickle
import torch
from google.protobuf import any_pb2

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.learner.group.membership import Membership
from juggler.learner.group.peers import PeerLost
from juggler.learner.learner import Learner
from juggler.learner.process.devices import device_for, devices_here, reserved_bytes
from juggler.learner.process.listening import LearnerServer, peer_host
from juggler.learner.process.overlap import InTurn, Overlapped, Share, Updating, works_by_itself
from juggler.learner.process.pending_metrics import PendingMetrics
from juggler.learner.process.program import LEARNER, LearnerProgram
from juggler.learner.process.state_handover import KeptState
from juggler.runtime.actors.attachment import LOST_THE_DRIVER, Attachment, Detached
from juggler.runtime.actors.credentials import why_refused
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.memory import keep_freed_memory
from juggler.runtime.actors.open_files import allow_many_open_files
from juggler.runtime.actors.worker import CommandLoop, Inbox, attach_and_run
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.episodes.batch import DEFAULT_MODULE, EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.streams.episodes import EpisodeReceiver
from juggler.runtime.streams.permits import Permits
from juggler.runtime.streams.weights import WeightsPublisher
from juggler.runtime.wire.frames import FrameReader, Limits, encode_frame
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


def main(program: LearnerProgram) -> None:
    """Attach and work until told to stop."""
    keep_freed_memory()
    allow_many_open_files()
    torch.set_num_threads(1)
    try:
        server = LearnerServer(program)
    except EndpointError as error:
        raise SystemExit(f"juggler learner: {error}") from None
    _, *own_code = cloudpickle.loads(program.own_code) if program.own_code else (None, None, None)
    attach_and_run(
        program.contact,
        LEARNER,
        lambda attachment, inbox: LearnerWorker(attachment, inbox, program, server, *own_code),
        devices=devices_here(),
        data_addresses=server.addresses,
    )


class LearnerWorker:
    """A Learner, the batches that wait for it, and the streams in and out."""

    def __init__(
        self,
        attachment: Attachment,
        inbox: Inbox,
        program: LearnerProgram,
        server: LearnerServer,
        module_factory: Any = None,
        own_connectors: Any = None,
    ) -> None:
        self._attachment = attachment
        self._token = program.contact.token
        self._server = server
        self._kept = KeptState()
        self._module_factory = module_factory
        self._own_connectors = own_connectors
        self._inbox = inbox
        self._loop = CommandLoop(attachment, inbox)
        self._loop.on(training_pb2.Setup, self._setup)
        self._loop.on(training_pb2.Restore, self._restore)
        self._loop.on(training_pb2.Group, self._group)
        self._loop.on(training_pb2.Update, self._update)
        self._loop.on(training_pb2.Discard, self._discard)
        self._loop.on(training_pb2.Snapshot, self._snapshot)
        self._loop.on(training_pb2.BeginAnew, self._begin_anew_with)
        self._publisher = WeightsPublisher(self._why_refused)
        self._beside = ExitStack()  # what goes on beside updates
        self._restoring: FrameReader[training_pb2.StateHeader] | None = None
        self._published = Version(0, 0)
        self._membership = Membership(attachment.worker_id, peer_host(program), program.insecure)
        self._in_group = False
        self._template: list[EpisodeBatch] = []  # one batch, once there is one
        self._steps_trained = 0
        self._steps_dropped = 0
        self._metrics = PendingMetrics()
        self._seconds = dict.fromkeys(("waiting", "collate", "update", "publish"), 0.0)
        self._idle_since = time.perf_counter()

    def run(self) -> str:
        reason = self._loop.run()
        if self._kept.worth_keeping and reason.startswith(LOST_THE_DRIVER):
            self._kept.keep(self._learner, self._attachment.run_id, self._version)
        return reason

    def close(self) -> None:
        self._beside.close()
        self._publisher.close()
        self._server.close()

    # -- commands -------------------------------------------------------------------------------

    def _setup(self, _: int, setup: training_pb2.Setup) -> training_pb2.Ready:
        parts = json.loads(setup.config)
        module_config = ModuleConfig(**parts["module"])
        index = int(self._attachment.worker_id.rpartition("-")[2])
        device = device_for(parts["device"], index, devices_here())
        observation_space = space_from_message(setup.observation_space)
        action_space = space_from_message(setup.action_space)
        self._learner: Learner = build_learner(
            parts["learner"],
            self._module_factory or module_config.module,
            observation_space,
            action_space,
            module_config.model,
            distribution=module_config.distribution,
            check_specs=module_config.check_specs,
            connectors=ConnectorsConfig.parse(parts["connectors"]),
            own_connectors=self._own_connectors,
            device=device,
            seed=setup.seed,
        )
        self._updating = self._updating_on(torch.device(device))
        self._max_staleness = self._learner.config.max_staleness
        self._weights_interval = self._learner.config.weights_interval
        self._version = Version.of(setup.version)
        self._store = BatchStore(
            {DEFAULT_MODULE: (observation_space, action_space)},
            self._arrived,
            states=self._learner.example_states(),
        )
        if setup.state_bytes:
            limits = Limits(payload_bytes=setup.state_bytes)
            self._restoring = FrameReader(training_pb2.StateHeader, limits, digests=True)
        check = Permits(setup.permits_key).check
        self._receiver = EpisodeReceiver(self._store.take, self._why_refused, Limits(), check)
        self._server.serve(self._receiver.handler(), self._publisher.handler())
        self._attachment.device_bytes = partial(reserved_bytes, device)
        self._begin_anew(setup.seed)
        self._updates_in_flight = int(parts["updates_in_flight"])
        ready = training_pb2.Ready(
            description=parts["device"] if parts["device"].startswith("fake:") else device,
            meeting_point=self._membership.meeting_address() if parts["may_meet"] else "",
        )
        kept = self._kept.go_on(self._learner, self._attachment.run_id, setup, ready)
        if kept is not None:
            self._version, self._restoring = kept, None
        return ready

    def _restore(self, _: int, part: training_pb2.Restore) -> attach_pb2.Done:
        if self._restoring is None:
            return attach_pb2.Done()  # this learner has something newer
        frame = self._restoring.feed(part.chunk)
        if part.last:
            if frame is None:
                raise ValueError("the state to restore ended in the middle")
            self._restoring = None
            if part.weights:
                self._begin_with(frame.tree, whole=part.whole)
            else:
                self._learner.restore(frame.tree, json.loads(frame.header.extra))
        return attach_pb2.Done()

    def _group(self, _: int, group: training_pb2.Group) -> training_pb2.GroupFormed:
        """A new membership. Its first weights are those of the member that has got furthest."""
        self._updating.forget()
        if not self._in_group:
            self._in_group = True
            self._store.serve(joined=group.generation)
        formed = self._membership.form(
            group, self._learner, lambda: self._loop.waits(training_pb2.Group)
        )
        self._version = Version(group.generation, self._learner.updates)
        self._kept.worth_keeping = True
        if not formed.peer_lost:
            self._publish()
        self._server.ready(not formed.peer_lost)
        return formed

    def _update(self, _: int, update: training_pb2.Update) -> training_pb2.UpdateDone:
        started, collated = time.perf_counter(), self._learner.collate_seconds
        self._seconds["waiting"] += started - self._idle_since
        batches, missing = self._store.pop(update.batch_ids)
        done = training_pb2.UpdateDone(update_id=update.update_id)
        made = self._make(batches, missing, done)
        updated = time.perf_counter()
        if made and self._version.update % self._weights_interval == 0:
            self._publish()
        for module_id, values in self._metrics.take(self._version.update).items():
            done.metrics[module_id].values.update(values)
            # Batches are received in other threads, beside all the rest.
            done.seconds.update(self._seconds, receive=self._receiver.seconds)
        done.version.CopyFrom(self._version.message())
        self._kept.updated(done, self._updates_in_flight)
        done.steps_trained, done.steps_dropped = self._steps_trained, self._steps_dropped
        self._idle_since = time.perf_counter()
        collated = self._learner.collate_seconds - collated
        self._seconds["collate"] += collated
        self._seconds["update"] += updated - started - collated
        self._seconds["publish"] += self._idle_since - updated
        return done

    def _discard(self, _: int, command: training_pb2.Discard) -> attach_pb2.Done:
        dropped, _missing = self._store.pop(command.batch_ids)
        self._steps_dropped += sum(batch.live_steps for batch in dropped)
        return attach_pb2.Done()

    def _snapshot(self, command_id: int, command: training_pb2.Snapshot) -> None:
        """The first chunk goes out in order with the answers to updates, the others beside the
        updates that follow: nothing changes what was saved."""
        tree, extra = self._learner.save()
        header = training_pb2.StateHeader(version=self._version.message(), extra=json.dumps(extra))
        chunks = encode_frame(header, tree, digest=True)
        second = self._send_chunk(command_id, next(chunks), chunks)
        if self._version != self._published and not self._membership.lost:
            self._publish()  # whatever the interval: these may be the run's last ones
        rest = (command_id, second, chunks)
        threading.Thread(target=self._send_chunks, args=rest, name="snapshot", daemon=True).start()
        if command.HasField("seed"):
            self._begin_anew(command.seed)

    def _begin_anew_with(self, _: int, command: training_pb2.BeginAnew) -> attach_pb2.Done:
        self._begin_anew(command.seed)
        return attach_pb2.Done()

    def _send_chunks(self, command_id: int, chunk: bytes | None, rest: Iterator[bytes]) -> None:
        try:
            while chunk is not None:
                chunk = self._send_chunk(command_id, chunk, rest)
        except BaseException as error:  # or the driver would wait for them
            self._attachment.fail(command_id, error)
            self._inbox.put(Detached.by(error))

    def _send_chunk(self, command_id: int, chunk: bytes, rest: Iterator[bytes]) -> bytes | None:
        """One chunk of a state, marked if it is the last. Returns the next one."""
        after = next(rest, None)
        kind = training_pb2.StateChunk.DESCRIPTOR.full_name
        body = any_pb2.Any(type_url=f"type.googleapis.com/{kind}", value=chunk)
        self._attachment.reply_packed(command_id, body, last=after is None)
        return after

    # -- parts ----------------------------------------------------------------------------------

    def _begin_with(self, weights: Any, *, whole: bool) -> None:
        try:
            self._learner.set_weights(weights, whole=whole)
        except ValueError as error:
            hint = "; to take only some, name them in from_parameters" if whole else ""
            raise ValueError(f"from_checkpoint: {error}{hint}") from error

    def _why_refused(self, metadata: Any) -> str | None:
        return why_refused(metadata, self._token, self._attachment.run_id)

    def _arrived(self, batch: HeldBatch) -> None:
        arrival = training_pb2.Arrival(batch_id=batch.batch_id, live_steps=batch.live_steps)
        self._attachment.report(training_pb2.Arrivals(arrivals=[arrival]))

    def _begin_anew(self, seed: int) -> None:
        """Have nothing but what a checkpoint holds, and random numbers of this seed."""
        torch.manual_seed(seed)  # for modules that draw from torch's generators, as dropout does
        self._learner.forget()

    def _updating_on(self, device: torch.device) -> Updating:
        if not works_by_itself(device):
            return InTurn(self._learner, self._publisher)
        overlapped = Overlapped(self._learner, self._publisher, self._coming)
        self._beside.callback(overlapped.close)
        return overlapped

    def _coming(self) -> Share | None:
        """What the next update will learn from, if this one makes new weights; None where there
        is nothing, or nobody has asked for it yet."""
        update = self._loop.coming(training_pb2.Update)
        if update is None:
            return None
        fresh = self._fresh(self._store.peek(update.batch_ids), self._version.update + 1)
        if not fresh:
            return None
        episodes = [batch.modules[DEFAULT_MODULE] for batch in fresh]
        return Share([batch.batch_id for batch in fresh], {DEFAULT_MODULE: episodes})

    def _publish(self) -> None:
        self._updating.publish(self._version)
        self._published = self._version

    def _make(
        self, batches: list[HeldBatch], missing: list[int], done: training_pb2.UpdateDone
    ) -> bool:
        """Update on what is fresh enough; every batch of the update is accounted for in `done`.
        True where that made new weights."""
        fresh = self._fresh(batches, self._version.update)
        episodes = [batch.modules[DEFAULT_MODULE] for batch in fresh]
        if self._learner.in_group:
            # The others cannot go on without this learner, which has nothing to say this time.
            episodes = episodes or [each.silenced() for each in self._any_episodes(batches)]
            self._template = episodes[:1]
        if episodes and not self._membership.lost:
            try:
                share = Share([batch.batch_id for batch in fresh], {DEFAULT_MODULE: episodes})
                self._metrics.add(self._updating.update(share))
            except PeerLost as error:
                self._membership.lose(self._learner, str(error))
        done.peer_lost = self._membership.lost
        self._book(batches, missing, done)
        if not episodes or done.peer_lost:
            return False
        self._version = Version(self._version.generation, self._version.update + 1)
        return True

    def _any_episodes(self, batches: list[HeldBatch]) -> list[EpisodeBatch]:
        """One batch, of those given or of an earlier update; none where there was none yet."""
        return [batch.modules[DEFAULT_MODULE] for batch in batches[:1]] or self._template

    def _fresh(self, batches: Iterable[HeldBatch], update: int) -> list[HeldBatch]:
        """Those that may still be learned from, given the weights of an update."""
        return [each for each in batches if each.staleness(update) <= self._max_staleness]

    def _book(
        self, batches: list[HeldBatch], missing: list[int], done: training_pb2.UpdateDone
    ) -> None:
        """What became of every batch of an update, before the version moves on."""
        for batch in batches:
            staleness = batch.staleness(self._version.update)
            used = done.batches.add(
                batch_id=batch.batch_id, live_steps=batch.live_steps, staleness=staleness
            )
            if staleness > self._max_staleness:
                used.dropped = "stale"
            elif done.peer_lost:
                used.dropped = "learner_lost"
            if used.dropped:
                self._steps_dropped += batch.live_steps
            else:
                self._steps_trained += batch.live_steps
        for batch_id in missing:
            done.batches.add(batch_id=batch_id, dropped="restart")
