"""A shard of a LearnerGroup: a process that trains several modules, one update after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.learner.learner import Learner, fetch_metrics
from juggler.learner.process.devices import device_for, devices_here
from juggler.learner.process.listening import LearnerServer
from juggler.learner.process.program import SHARD, LearnerProgram
from juggler.runtime.actors.attachment import Attachment
from juggler.runtime.actors.credentials import why_refused
from juggler.runtime.actors.memory import keep_freed_memory
from juggler.runtime.actors.worker import CommandLoop, Inbox, attach_and_run
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.episodes.batch import DEFAULT_MODULE
from juggler.runtime.nearest import nearest
from juggler.runtime.streams.episodes import BatchFrame, EpisodeReceiver
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, Limits, encode_frame
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import attach_pb2, shards_pb2, training_pb2

M = TypeVar("M", bound=Message)

_STATE_BYTES = 64 << 30


def main(program: LearnerProgram) -> None:
    """Attach and work until told to stop."""
    keep_freed_memory()
    torch.set_num_threads(1)
    server = LearnerServer(program)
    attach_and_run(
        program.contact,
        SHARD,
        lambda attachment, inbox: ShardWorker(attachment, inbox, program, server),
        devices=devices_here(),
        data_addresses=server.addresses,
    )


@dataclass(slots=True)
class _Member:
    """A module of this shard.

    Its learner knows it as "default", as that of a run knows its own.
    """

    learner: Learner
    store: BatchStore  # of what waits for an update
    loading: FrameReader[training_pb2.StateHeader] | None = None


class ShardWorker:
    """Modules by id, each with a Learner of its own; commands are carried out in order.

    What a module cannot do is told as the answer to its command, and nobody else is concerned.
    """

    def __init__(
        self, attachment: Attachment, inbox: Inbox, program: LearnerProgram, server: LearnerServer
    ) -> None:
        self._attachment = attachment
        self._token = program.contact.token
        self._server = server
        self._members: dict[str, _Member] = {}
        self._loop = CommandLoop(attachment, inbox)
        self._on(shards_pb2.AddModule, self._add)
        self._on(shards_pb2.RemoveModule, self._remove)
        self._on(shards_pb2.UpdateModule, self._update)
        self._on(shards_pb2.FetchModule, self._fetch)
        self._on(shards_pb2.LoadModule, self._load)
        self._on(training_pb2.Discard, self._discard)
        receiver = EpisodeReceiver(self._take, self._why_refused, Limits())
        server.serve(receiver.handler())

    def run(self) -> str:
        return self._loop.run()

    def close(self) -> None:
        self._server.close()

    # -- commands -------------------------------------------------------------------------------

    def _on(self, kind: type[M], handler: Callable[[int, M], Message | None]) -> None:
        """Unlike a run's learner, a shard stays for its other modules when something fails."""

        def answer(command_id: int, command: M) -> Message | None:
            try:
                return handler(command_id, command)
            except Exception as error:
                self._attachment.fail(command_id, error)
                return None

        self._loop.on(kind, answer)

    def _add(self, _: int, command: shards_pb2.AddModule) -> attach_pb2.Done:
        parts = json.loads(command.config)
        observation_space = space_from_message(command.observation_space)
        action_space = space_from_message(command.action_space)
        learner = build_learner(
            parts["learner"],
            parts["module"]["module"],
            observation_space,
            action_space,
            parts["module"]["model"],
            distribution=parts["module"]["distribution"],
            check_specs=parts["module"]["check_specs"],
            connectors=ConnectorsConfig.parse(parts["connectors"]),
            device=device_for(parts["device"], 0, devices_here()),
            seed=command.seed,
        )
        states = learner.example_states()
        store = BatchStore(
            {command.module_id: (observation_space, action_space)},
            _arrived,
            states={command.module_id: states.get(DEFAULT_MODULE, {})},
        )
        self._members[command.module_id] = _Member(learner, store)
        return attach_pb2.Done()

    def _remove(self, _: int, command: shards_pb2.RemoveModule) -> attach_pb2.Done:
        member = self._members.pop(command.module_id, None)
        if member is not None and member.learner.device.type == "cuda":
            del member
            torch.cuda.empty_cache()  # for others on its device
        return attach_pb2.Done()

    def _update(self, _: int, command: shards_pb2.UpdateModule) -> shards_pb2.ModuleUpdated:
        member = self._member(command.module_id)
        held, missing = member.store.pop(command.batch_ids)
        if missing:
            raise ValueError(f"batches {missing} are not here")
        episodes = [batch.modules[command.module_id] for batch in held]
        updated = member.learner.update_from_episodes(
            episodes,
            minibatch_size=command.minibatch_size or None,
            num_epochs=command.num_epochs or None,
        )
        metrics = fetch_metrics(updated)[DEFAULT_MODULE]
        if metrics.get("skipped") == 1.0:
            member.learner.forget()  # or the same samples would be used again
            raise ValueError(
                "the loss or its gradients were not finite, and this update changed nothing. "
                "Lower lr, or look at the episodes"
            )
        return shards_pb2.ModuleUpdated(
            metrics=training_pb2.ModuleMetrics(values=metrics),
            live_steps=sum(batch.live_steps for batch in held),
            updates=member.learner.updates,
        )

    def _discard(self, _: int, command: training_pb2.Discard) -> attach_pb2.Done:
        for member in self._members.values():
            member.store.pop(command.batch_ids)
        return attach_pb2.Done()

    def _fetch(self, command_id: int, command: shards_pb2.FetchModule) -> None:
        learner = self._member(command.module_id).learner
        if command.weights:
            tree: Tree = learner.get_weights()[DEFAULT_MODULE]
            header = training_pb2.StateHeader(extra="{}")
        else:
            tree, extra = learner.save()
            header = training_pb2.StateHeader(extra=json.dumps(extra))
        chunks = list(encode_frame(header, tree, digest=True))
        kind = training_pb2.StateChunk.DESCRIPTOR.full_name
        for number, chunk in enumerate(chunks, start=1):
            body = any_pb2.Any(type_url=f"type.googleapis.com/{kind}", value=chunk)
            self._attachment.reply_packed(command_id, body, last=number == len(chunks))

    def _load(self, _: int, part: shards_pb2.LoadModule) -> attach_pb2.Done:
        member = self._member(part.module_id)
        if member.loading is None:
            limits = Limits(payload_bytes=_STATE_BYTES)
            member.loading = FrameReader(training_pb2.StateHeader, limits, digests=True)
        frame = member.loading.feed(part.chunk)
        if part.last:
            member.loading = None
            if frame is None:
                raise ValueError("the state to go on from ended in the middle")
            if part.weights:
                member.learner.set_weights({DEFAULT_MODULE: frame.tree})
            else:
                member.learner.restore(frame.tree, json.loads(frame.header.extra))
        return attach_pb2.Done()

    # -- parts ----------------------------------------------------------------------------------

    def _take(self, frame: BatchFrame) -> str:
        """As `BatchStore.take`; a batch that does not fit does not end the stream of the others."""
        module_ids = list(frame.tree) if isinstance(frame.tree, dict) else []
        member = self._members.get(module_ids[0]) if len(module_ids) == 1 else None
        if member is None:
            return f"a batch must be of one module of this shard, not of {module_ids}"
        try:
            return member.store.take(frame)
        except WireError as error:
            return str(error)

    def _member(self, module_id: str) -> _Member:
        if module_id not in self._members:
            raise ValueError(f"no module {module_id!r} is here{nearest(module_id, self._members)}")
        return self._members[module_id]

    def _why_refused(self, metadata: Any) -> str | None:
        return why_refused(metadata, self._token, self._attachment.run_id)


def _arrived(_: HeldBatch) -> None:
    """Its acknowledgement says so."""
