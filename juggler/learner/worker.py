"""The Learner process: take episodes, update when told to, publish weights, keep books."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from google.protobuf import any_pb2

from juggler.learner.algorithms import build_learner
from juggler.learner.learner import Learner, fetch_metrics
from juggler.learner.program import LEARNER, LearnerProgram
from juggler.learner.store import BatchStore, HeldBatch
from juggler.runtime.actors.attachment import Attachment
from juggler.runtime.actors.credentials import why_refused
from juggler.runtime.actors.endpoints import EndpointError, bind, make_server
from juggler.runtime.actors.memory import keep_freed_memory
from juggler.runtime.actors.worker import CommandLoop, Contact, Inbox, attach_and_run
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.episodes.batch import DEFAULT_MODULE
from juggler.runtime.episodes.stream import EpisodeReceiver
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.modules.weights import WeightsPublisher
from juggler.runtime.wire.frames import FrameReader, Limits, encode_frame
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

#: Updates in a row with gradients that are not finite, after which there is no hope.
_HOPELESS = 5
_METRICS_SECONDS = 0.5


def main(program: LearnerProgram) -> None:
    """Attach and work until told to stop."""
    keep_freed_memory()
    torch.set_num_threads(1)
    server = make_server()
    try:
        addresses = _listen(server, program)
    except EndpointError as error:
        raise SystemExit(f"juggler learner: {error}") from None
    _, *own_code = cloudpickle.loads(program.own_code) if program.own_code else (None, None, None)
    attach_and_run(
        program.contact,
        LEARNER,
        lambda attachment, inbox: LearnerWorker(
            attachment, inbox, program.contact, server, *own_code
        ),
        devices=_devices(),
        data_addresses=addresses,
    )


def _listen(server: Any, program: LearnerProgram) -> list[str]:
    addresses = []
    contact = program.contact
    if contact.socket_dir:
        path = Path(contact.socket_dir) / f"learner-{contact.index}.sock"
        path.unlink(missing_ok=True)  # a predecessor that was killed leaves its own behind
        addresses.append(bind(server, f"unix:{path}"))
    if program.bind:
        bound = bind(server, program.bind, insecure=program.insecure)
        host, _, port = program.advertise.rpartition(":")
        if program.advertise and port == "0":
            addresses.append(f"{host}:{bound.rpartition(':')[2]}")
        else:
            addresses.append(program.advertise or bound)
    return addresses


def _devices() -> list[str]:
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def _device(asked: str) -> str:
    """Where to compute, for the key `devices`.

    Raises:
        ValueError: this host has no such device.
    """
    here = _devices()
    if asked == "auto":
        return here[0]
    if asked not in ("cpu", "cuda", *here):
        raise ValueError(f"devices = {asked!r}: this host has {', '.join(here)}")
    return asked


class LearnerWorker:
    """A Learner, the batches that wait for it, and the streams in and out."""

    def __init__(
        self,
        attachment: Attachment,
        inbox: Inbox,
        contact: Contact,
        server: Any,
        module_factory: Any = None,
        own_connectors: Any = None,
    ) -> None:
        self._attachment = attachment
        self._token = contact.token
        self._server = server
        self._module_factory = module_factory
        self._own_connectors = own_connectors
        self._loop = CommandLoop(attachment, inbox)
        self._loop.on(training_pb2.Setup, self._setup)
        self._loop.on(training_pb2.Restore, self._restore)
        self._loop.on(training_pb2.Group, self._group)
        self._loop.on(training_pb2.Update, self._update)
        self._loop.on(training_pb2.Discard, self._discard)
        self._loop.on(training_pb2.Snapshot, self._snapshot)
        self._publisher = WeightsPublisher(self._why_refused)
        self._restoring: FrameReader[training_pb2.StateHeader] | None = None
        self._in_group = False
        self._steps_trained = 0
        self._steps_dropped = 0
        self._pending: list[dict[str, dict[str, torch.Tensor]]] = []  # metrics not yet fetched
        self._skipped_in_a_row: dict[str, int] = {}  # updates, by module id
        self._metrics_at = 0.0
        self._seconds = dict.fromkeys(("waiting", "collate", "update", "publish"), 0.0)
        self._idle_since = time.perf_counter()

    def run(self) -> str:
        return self._loop.run()

    def close(self) -> None:
        self._publisher.close()
        self._server.stop(grace=0.2).wait(timeout=2)

    # -- commands -------------------------------------------------------------------------------

    def _setup(self, _: int, setup: training_pb2.Setup) -> training_pb2.Ready:
        parts = json.loads(setup.config)
        module_config = ModuleConfig(**parts["module"])
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
            device=_device(parts["device"]),
            seed=setup.seed,
        )
        self._version = Version.of(setup.version)
        self._store = BatchStore(
            {DEFAULT_MODULE: (observation_space, action_space)},
            self._arrived,
            states=self._learner.example_states(),
        )
        if setup.state_bytes:
            limits = Limits(payload_bytes=setup.state_bytes)
            self._restoring = FrameReader(training_pb2.StateHeader, limits, digests=True)
        self._receiver = EpisodeReceiver(self._store.take, self._why_refused, Limits())
        self._server.add_generic_rpc_handlers((self._receiver.handler(), self._publisher.handler()))
        self._server.start()
        self._begin_anew(setup.seed)
        return training_pb2.Ready(description=str(self._learner.device))

    def _restore(self, _: int, part: training_pb2.Restore) -> attach_pb2.Done:
        assert self._restoring is not None
        frame = self._restoring.feed(part.chunk)
        if part.last:
            if frame is None:
                raise ValueError("the state to restore ended in the middle")
            self._learner.restore(frame.tree, json.loads(frame.header.extra))
            self._restoring = None
        return attach_pb2.Done()

    def _group(self, _: int, group: training_pb2.Group) -> attach_pb2.Done:
        """A new membership. Its first weights are the current ones under the new generation."""
        if not self._in_group:
            self._in_group = True
            self._store.serve(joined=group.generation)
        self._version = Version(group.generation, self._version.update)
        self._publish()
        return attach_pb2.Done()

    def _update(self, _: int, update: training_pb2.Update) -> training_pb2.UpdateDone:
        started, collated = time.perf_counter(), self._learner.collate_seconds
        self._seconds["waiting"] += started - self._idle_since
        batches, missing = self._store.pop(update.batch_ids)
        done = training_pb2.UpdateDone(update_id=update.update_id)
        fresh = self._book(batches, missing, done)
        if fresh:
            episodes = [batch.modules[DEFAULT_MODULE] for batch in fresh]
            self._pending.append(self._learner.update_from_episodes({DEFAULT_MODULE: episodes}))
            self._version = Version(self._version.generation, self._version.update + 1)
        updated = time.perf_counter()
        if fresh:
            self._publish()
        self._fetch_metrics(done)
        done.version.CopyFrom(self._version.message())
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
        tree, extra = self._learner.save()
        header = training_pb2.StateHeader(version=self._version.message(), extra=json.dumps(extra))
        chunks = list(encode_frame(header, tree, digest=True))
        kind = training_pb2.StateChunk.DESCRIPTOR.full_name
        for index, chunk in enumerate(chunks):
            body = any_pb2.Any(type_url=f"type.googleapis.com/{kind}", value=chunk)
            self._attachment.reply_packed(command_id, body, last=index == len(chunks) - 1)
        if command.HasField("seed"):
            self._begin_anew(command.seed)

    # -- parts ----------------------------------------------------------------------------------

    def _why_refused(self, metadata: Any) -> str | None:
        return why_refused(metadata, self._token, self._attachment.run_id)

    def _arrived(self, batch: HeldBatch) -> None:
        arrival = training_pb2.Arrival(batch_id=batch.batch_id, live_steps=batch.live_steps)
        self._attachment.report(training_pb2.Arrivals(arrivals=[arrival]))

    def _begin_anew(self, seed: int) -> None:
        """Have nothing but what a checkpoint holds, and random numbers of this seed."""
        torch.manual_seed(seed)  # for modules that draw from torch's generators, as dropout does
        self._learner.forget()

    def _publish(self) -> None:
        self._publisher.publish(self._version, self._learner.get_weights())

    def _book(
        self, batches: list[HeldBatch], missing: list[int], done: training_pb2.UpdateDone
    ) -> list[HeldBatch]:
        """Who is fresh enough to train on; every batch of the update is accounted for in `done`."""
        fresh = []
        for batch in batches:
            staleness = max(0, self._version.update - batch.version.update)
            used = done.batches.add(
                batch_id=batch.batch_id, live_steps=batch.live_steps, staleness=staleness
            )
            if staleness > self._learner.config.max_staleness:
                used.dropped = "stale"
                self._steps_dropped += batch.live_steps
            else:
                fresh.append(batch)
                self._steps_trained += batch.live_steps
        for batch_id in missing:
            done.batches.add(batch_id=batch_id, dropped="restart")
        return fresh

    def _fetch_metrics(self, done: training_pb2.UpdateDone) -> None:
        """Twice a second: reading a metric makes the host wait for the device."""
        now = time.perf_counter()
        if not self._pending or now - self._metrics_at < _METRICS_SECONDS:
            return
        self._metrics_at = now
        pending, self._pending = self._pending, []
        means = {
            module_id: {
                name: torch.stack([each[module_id][name].float() for each in pending]).mean()  # []
                for name in names
            }
            for module_id, names in pending[-1].items()
        }
        for module_id, values in fetch_metrics(means).items():
            done.metrics[module_id].values.update(values)
            skipped = torch.stack([each[module_id]["skipped"] for each in pending])  # [updates]
            self._notice_skips(module_id, skipped.tolist())
        # Batches are received in other threads, beside all the rest.
        done.seconds.update(self._seconds, receive=self._receiver.seconds)

    def _notice_skips(self, module_id: str, skipped: list[float]) -> None:
        """Of each of the newest updates."""
        for update, skip in enumerate(skipped, self._version.update - len(skipped) + 1):
            in_a_row = self._skipped_in_a_row.get(module_id, 0) + 1 if skip else 0
            self._skipped_in_a_row[module_id] = in_a_row
            if in_a_row >= _HOPELESS:
                raise FloatingPointError(
                    f"module {module_id!r}: the loss or its gradients were not finite in "
                    f"{_HOPELESS} updates in a row, the last of them update {update}. Lower lr, or "
                    "look at the rewards' scale"
                )
