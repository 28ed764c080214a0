"""The learner process, which hosts modules and executes the driver's commands."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import grpc
import torch
from google.protobuf import any_pb2
from google.protobuf.message import Message
from grpc_health.v1 import health

from juggler.learner.data.batch_store import HeldBatch
from juggler.learner.group.ring_peers import RingAccess, RingServer
from juggler.learner.process.hosted_module import (
    HostedModule,
    Membership,
    StateHandover,
    hand_over,
    learner_for,
    receive,
)
from juggler.learner.process.learner_program import (
    LEARNER,
    LearnerProgram,
    LearnerSetup,
    device_for,
    devices_here,
    reserved_bytes,
    use_threads,
)
from juggler.learner.shared_parts import SharedParts
from juggler.runtime.actors.attachment import LOST_THE_DRIVER, Attachment, Detached
from juggler.runtime.actors.credentials import call_metadata, why_refused
from juggler.runtime.actors.endpoints import EndpointError, bind, make_server
from juggler.runtime.actors.health import MOST_ASKING, Health, add_reflection
from juggler.runtime.actors.resources import allow_many_open_files, keep_freed_memory
from juggler.runtime.actors.worker import CommandLoop, Inbox, attach_and_run, from_json
from juggler.runtime.near_matches import nearest
from juggler.runtime.streams.episodes import PUSH_METHOD, BatchFrame, EpisodeReceiver
from juggler.runtime.streams.memory_socket import MemorySocket
from juggler.runtime.streams.shared_directory import learner_socket
from juggler.runtime.streams.weights_stream import SUBSCRIBE_METHOD, WeightsPublisher
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1 import attach_pb2, tensors_pb2, training_pb2

M = TypeVar("M", bound=Message)


def main(program: LearnerProgram) -> None:
    """Attach to the driver, and work until it sends Stop."""
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
    """Hosts modules with their learners, and this process's streams.

    Commands are executed in order of arrival, for all modules.

    Attributes:
        modules: modules by id.
        publisher: serves the weights of all modules.
    """

    def __init__(
        self,
        attachment: Attachment,
        inbox: Inbox,
        program: LearnerProgram,
        server: LearnerServer,
        module_factory: Any = None,
        own_connectors: Any = None,
    ) -> None:
        self.modules: dict[str, HostedModule] = {}
        if why := server.share_memory(attachment.run_id, attachment.incarnation):
            attachment.report(training_pb2.Note(text=why))
        self.publisher = WeightsPublisher(self._why_refused, server.memory)
        self._ring = RingServer(self._why_refused)
        self._attachment = attachment
        self._program = program
        self._server = server
        self._module_factory = module_factory
        self._own_connectors = own_connectors
        # States of the program that this one has replaced, when its driver was lost.
        self._received_states = receive()
        self._inbox = inbox
        self._outlives_failures = False
        self._loop = CommandLoop(attachment, inbox)
        # One handler for each command. A failure ends the process, unless it outlives failures.
        self._on(training_pb2.Setup, self._setup)
        self._on(training_pb2.AddModule, self._add_module)
        self._on(training_pb2.RemoveModule, self._remove_module)
        self._on(training_pb2.Restore, self._restore)
        self._on(training_pb2.Group, self._group)
        self._on(training_pb2.Update, self._update)
        self._on(training_pb2.Discard, self._discard)
        self._on(training_pb2.Snapshot, self._snapshot)
        self._on(training_pb2.BeginAnew, self._begin_anew)
        self._on(training_pb2.Reset, self._reset)
        self._seconds = dict.fromkeys(("waiting", "collate", "update", "publish", "receive"), 0.0)
        self._idle_since = time.perf_counter()

    def run(self) -> str:
        reason = self._loop.run()
        known = [each for each in self.modules.values() if each.handover.weights_known]
        if known and reason.startswith(LOST_THE_DRIVER):
            run_id = self._attachment.run_id
            hand_over(
                each.handover.chunks(each.module_id, each.learner, run_id, each.version)
                for each in known
            )
        return reason

    def close(self) -> None:
        for module in self.modules.values():
            module.close()
        self.publisher.close()
        self._server.close()

    # -- commands -------------------------------------------------------------------------------

    def _on(self, kind: type[M], handler: Callable[[int, M], Message | None]) -> None:
        def answer(command_id: int, command: M) -> Message | None:
            try:
                return handler(command_id, command)
            except Exception as error:
                if not self._outlives_failures:
                    raise
                self._attachment.fail(command_id, error)
                return None

        self._loop.on(kind, answer)

    def _setup(self, _: int, command: training_pb2.Setup) -> attach_pb2.Done:
        setup = from_json(command.config, LearnerSetup)
        self._settings = setup
        self._shared = SharedParts(setup.shared)
        self._unpublished: set[str] = set()  # modules that wait for modules with shared parts
        index = int(self._attachment.worker_id.rpartition("-")[2])
        self._device = device_for(setup.device, index, devices_here())
        if (why := use_threads(setup.threads)) and self._device == "cpu":
            self._warn(why)
        # A function, since the memory changes from report to report.
        self._attachment.device_bytes = partial(reserved_bytes, self._device)
        torch.manual_seed(command.seed)  # for modules that draw from it, such as dropout
        self._receiver = EpisodeReceiver(self._store, self._why_refused, self._server.memory)
        self._server.serve(self._receiver.handler(), self.publisher.handler(), self._ring.handler())
        self._outlives_failures = setup.outlives_failures  # but not a failure of this command
        return attach_pb2.Done()

    def _add_module(self, _: int, command: training_pb2.AddModule) -> training_pb2.ModuleReady:
        module_id, setup = command.module_id, self._settings
        if module_id in self.modules:
            raise ValueError(f"module {module_id!r} is here already")
        # Each module has its own group, since modules may have different learners.
        membership = Membership(
            self._attachment.worker_id,
            peer_host(self._program),
            self._program.insecure,
            self._server.ring_access(self._ring, self._attachment),
            self._attachment.progresses,
        )
        own = self._module_factory, self._own_connectors
        learner = learner_for(command, *own, self._device)
        # The driver must see that a long update does not hang.
        learner.progresses = self._attachment.progresses
        module = HostedModule(
            command,
            learner,
            membership,
            self.publisher,
            StateHandover(self._received_states.pop(module_id, None)),
            partial(self._arrived, module_id),
            self._warn,
            lambda: self._loop.coming(training_pb2.Update),
            setup,
        )
        # Whether and where others reach this learner decides which groups can form.
        ready = training_pb2.ModuleReady(
            module_id=module_id,
            description=setup.device if setup.device.startswith("fake:") else self._device,
            meeting_point=membership.meeting_address() if setup.may_meet else "",
            why_alone=module.learner.why_alone() if setup.may_meet else "",
            kept_bytes=int(module.learner.kept_bytes),
        )
        module.take_over(self._attachment.run_id, command, ready)
        self._shared.add(module_id, module.learner)
        self.modules[module_id] = module
        return ready

    def _remove_module(self, _: int, command: training_pb2.RemoveModule) -> attach_pb2.Done:
        module = self.modules.pop(command.module_id, None)
        self._shared.remove(command.module_id)
        if module is not None:
            module.close()
            del module
            gc.collect()  # the module has cycles, and may have a large replay
            if self._device.startswith("cuda"):
                torch.cuda.empty_cache()  # for others on this device
        return attach_pb2.Done()

    def _restore(self, _: int, part: training_pb2.Restore) -> attach_pb2.Done:
        self._module(part.module_id).restore(part)
        if part.last:
            self._shared.broadcast(part.module_id)
        return attach_pb2.Done()

    def _group(self, _: int, group: training_pb2.Group) -> training_pb2.GroupFormed:
        module_id = group.module_id

        def superseded() -> bool:
            return self._loop.waits(training_pb2.Group, lambda each: each.module_id == module_id)

        formed = self._module(module_id).join(group, superseded)
        self._shared.broadcast(module_id)  # the state may be another member's
        self._unpublished.discard(module_id)
        self._server.ready(all(module.serves for module in self.modules.values()))
        return formed

    def _update(self, _: int, update: training_pb2.Update) -> training_pb2.UpdateDone:
        module_id = update.module_id
        if update.metrics_only:
            return self._module(module_id).last_metrics(self._seconds)
        if update.exact:
            return self._module(module_id).update_exactly(update)
        self._seconds["waiting"] += time.perf_counter() - self._idle_since
        self._seconds["receive"] = self._receiver.seconds  # in other threads
        waits = self._settings.synchronous and bool(self._shared.partners(module_id))
        done = self._module(module_id).update(update, self._seconds, publishes=not waits)
        self._shared.broadcast(module_id)
        if waits:
            self._publish_together(module_id)
        self._idle_since = time.perf_counter()
        return done

    def _discard(self, _: int, command: training_pb2.Discard) -> attach_pb2.Done:
        self._module(command.module_id).discard(command.batch_ids)
        return attach_pb2.Done()

    def _snapshot(self, command_id: int, command: training_pb2.Snapshot) -> None:
        """Send a state in chunks, the first in order with updates' replies.

        The remaining chunks follow during later updates, which do not change them.
        """
        module = self._module(command.module_id)
        chunks = module.snapshot(command)
        second = self._send_chunk(command_id, next(chunks), chunks)
        rest = (command_id, second, chunks)
        threading.Thread(target=self._send_chunks, args=rest, name="snapshot", daemon=True).start()
        if command.HasField("seed"):
            self._forget(module, command.seed)

    def _begin_anew(self, _: int, command: training_pb2.BeginAnew) -> attach_pb2.Done:
        self._forget(self._module(command.module_id), command.seed)
        return attach_pb2.Done()

    def _reset(self, _: int, command: training_pb2.Reset) -> attach_pb2.Done:
        self._module(command.module_id).learner.reset(command.seed)
        self._shared.broadcast(command.module_id)
        return attach_pb2.Done()

    # -- parts ----------------------------------------------------------------------------------

    def _module(self, module_id: str) -> HostedModule:
        """Return the module with this id.

        Raises:
            ValueError: this process does not host it.
        """
        if module_id not in self.modules:
            raise ValueError(f"no module {module_id!r} is here{nearest(module_id, self.modules)}")
        return self.modules[module_id]

    def _publish_together(self, module_id: str) -> None:
        """Publish modules with shared parts once all have updated this turn.

        EnvRunners then act with all of these updates, as in a resumed run.
        """
        self._unpublished.add(module_id)
        together = {module_id, *self._shared.partners(module_id)}
        if together <= self._unpublished:
            self._unpublished -= together
            for each in sorted(together):
                self.modules[each].publish_news()

    def _store(self, frame: BatchFrame) -> str:
        """Store a batch for its module; return a refusal's reason, or "".

        Raises:
            WireError: the batch is invalid; a correct EnvRunner never sends it.
        """
        module = self.modules.get(frame.header.module_id)
        if module is None:
            return f"no module {frame.header.module_id!r} is here"
        others = [each.store for each in list(self.modules.values()) if each is not module]
        try:
            return module.store.insert(frame, sum(store.held_bytes for store in others))
        except WireError as error:
            if not self._outlives_failures:
                raise
            module.store.refuse(frame.header.batch_id, str(error))
            return str(error)

    def _arrived(self, module_id: str, batch: HeldBatch) -> None:
        arrival = training_pb2.Arrival(batch_id=batch.batch_id, live_steps=batch.live_steps)
        self._attachment.report(training_pb2.Arrivals(module_id=module_id, arrivals=[arrival]))

    def _warn(self, text: str) -> None:
        self._attachment.report(training_pb2.Note(text=text, warning=True))

    def _forget(self, module: HostedModule, seed: int) -> None:
        """Discard everything unsaved, and reseed torch's random numbers."""
        torch.manual_seed(seed)
        module.learner.forget()

    def _why_refused(self, metadata: Any) -> str | None:
        return why_refused(metadata, self._program.contact.token, self._attachment.run_id)

    def _send_chunks(self, command_id: int, chunk: bytes | None, rest: Iterator[bytes]) -> None:
        try:
            while chunk is not None:
                chunk = self._send_chunk(command_id, chunk, rest)
        except BaseException as error:  # otherwise the driver would wait for the chunks
            self._attachment.fail(command_id, error)
            self._inbox.put(Detached.by(error))

    def _send_chunk(self, command_id: int, chunk: bytes, rest: Iterator[bytes]) -> bytes | None:
        """Send a chunk, marked if the last; return the next chunk."""
        after = next(rest, None)
        kind = tensors_pb2.Chunk.DESCRIPTOR.full_name
        body = any_pb2.Any(type_url=f"type.googleapis.com/{kind}", value=chunk)
        self._attachment.reply_packed(command_id, body, last=after is None)
        return after


_MAX_STREAMS = 1024  # of EnvRunners, without health checks
_SERVICES = tuple(method.split("/")[1] for method in (PUSH_METHOD, SUBSCRIBE_METHOD))


class LearnerServer:
    """Serves EnvRunners and health checks, from the process's start.

    Attributes:
        addresses: addresses for EnvRunners.
        tcp_address: the address that is not a Unix socket; "": none.
        memory: socket where EnvRunners of this host connect to share memory; None: they cannot, as
            it listens only over TCP, and there is no shared directory.
    """

    def __init__(self, program: LearnerProgram) -> None:
        """Start to listen.

        Raises:
            EndpointError: this process cannot listen at its address.
        """
        self._later = _DeferredHandlers()
        self._health = program.contact.health or Health()
        self._server = make_server(_MAX_STREAMS + 2 * MOST_ASKING)
        self._server.add_generic_rpc_handlers((self._later,))
        self._health.add_to(self._server, *_SERVICES)
        if program.reflection:
            add_reflection(self._server, (*_SERVICES, health.SERVICE_NAME))
        self._program = program
        self.addresses = _bind(self._server, program)
        self.tcp_address = next((a for a in self.addresses if not a.startswith("unix:")), "")
        self._local = next((each for each in self.addresses if each.startswith("unix:")), "")
        self.memory: MemorySocket | None = None
        self._server.start()

    def share_memory(self, run_id: str, incarnation: str) -> str:
        """Let EnvRunners of this host connect to share memory.

        Args:
            run_id: id of the run.
            incarnation: incarnation of this learner.

        Returns:
            Why EnvRunners of other containers cannot, for people; "": they can, or need not.

        Raises:
            EndpointError: it cannot listen at the socket next to its own.
        """
        why = ""
        try:
            shared = learner_socket(self._program.contact.token, run_id, incarnation)
            if shared:
                self.memory = MemorySocket(*filter(None, (self._local, shared)))
        except (EndpointError, OSError) as error:
            why = f"shares no memory with other containers: {error}"
        try:
            if self._local and self.memory is None:
                self.memory = MemorySocket(self._local)
        except OSError as error:
            raise EndpointError(f"cannot listen next to {self._local}: {error}") from error
        return why

    def serve(self, *handlers: grpc.GenericRpcHandler) -> None:
        """Serve EnvRunners with these handlers from now on."""
        self._later.handlers = handlers

    def ready(self, is_ready: bool) -> None:
        """Set whether health checks report readiness."""
        self._health.ready(is_ready)

    def ring_access(self, ring: RingServer, attachment: Attachment) -> RingAccess | None:
        """Return access to encrypted sums; None: not needed or not possible.

        Args:
            ring: accepts streams of other learners.
            attachment: the attachment to the driver.
        """
        contact = self._program.contact
        if contact.tls is None or not self.tcp_address or self._program.insecure:
            return None
        metadata = call_metadata(contact.token, attachment.run_id, attachment.incarnation)
        return RingAccess(ring, self.tcp_address, metadata, contact.tls)

    def close(self) -> None:
        self._health.ready(False)
        self._server.stop(grace=0.2).wait(timeout=2)
        if self.memory is not None:
            self.memory.close()


class _DeferredHandlers(grpc.GenericRpcHandler):
    """Handlers that can be set after the server has started."""

    handlers: Sequence[grpc.GenericRpcHandler] = ()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        found = (handler.service(details) for handler in self.handlers)
        return next((each for each in found if each is not None), None)


def _bind(server: grpc.Server, program: LearnerProgram) -> list[str]:
    """Bind the server; return its addresses for EnvRunners."""
    addresses = []
    contact = program.contact
    if contact.socket_dir:
        path = Path(contact.socket_dir) / f"learner-{contact.index}.sock"
        path.unlink(missing_ok=True)  # a killed predecessor leaves its socket behind
        addresses.append(bind(server, f"unix:{path}"))
    # EnvRunners of other hosts cannot use the socket.
    if program.bind:
        bound = bind(
            server,
            program.bind,
            token=contact.token,
            tls=contact.tls,
            insecure=program.insecure,
        )
        host, _, port = program.advertise.rpartition(":")
        if program.advertise and port == "0":
            addresses.append(f"{host}:{bound.rpartition(':')[2]}")
        else:
            addresses.append(program.advertise or bound)
    return addresses


def peer_host(program: LearnerProgram) -> str:
    """Return the host name or address of this process for other learners."""
    if not program.bind:
        return "127.0.0.1"
    host = program.bind.rpartition(":")[0].strip("[]")
    anywhere = host in ("", "0.0.0.0", "::")
    return (program.advertise.rpartition(":")[0].strip("[]") if anywhere else host) or "127.0.0.1"
