"""The server of a learner process, and the addresses at which others reach the process."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

from juggler.learner.group.ring_peers import RingAccess, RingServer
from juggler.learner.process.program import LearnerProgram
from juggler.runtime.actors.attachment import Attachment
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import (
    EndpointError,
    bind,
    join_address,
    make_server,
    split_address,
)
from juggler.runtime.actors.health import MOST_ASKING, Health
from juggler.runtime.actors.reflection import add_reflection
from juggler.runtime.actors.resources import total_memory
from juggler.runtime.actors.temporary import HeldDirectory
from juggler.runtime.streams.episodes import PUSH_METHOD
from juggler.runtime.streams.memory_sockets import MemorySocket
from juggler.runtime.streams.receivers import ReceiverProgram, Receivers
from juggler.runtime.streams.shared_directory import learner_socket
from juggler.runtime.streams.weights import SUBSCRIBE_METHOD

_MOST_STREAMS = 1024  # of EnvRunners; health checks come on top
_SERVICES = tuple(method.split("/")[1] for method in (PUSH_METHOD, SUBSCRIBE_METHOD))


class LearnerServer:
    """Serves EnvRunners and health checks. It listens from the start of the process.

    Attributes:
        addresses: at which EnvRunners can dial it.
        tcp_address: that of them which is not a Unix socket; "": there is none.
        episode_addresses: at which its receivers take batches; empty: it has none.
        memory: where EnvRunners of this host connect to share memory; None: they cannot, since it
            listens over TCP alone, and in no shared directory.
    """

    def __init__(self, program: LearnerProgram) -> None:
        """
        Raises:
            EndpointError: this process cannot listen at its address.
        """
        self._later = _Later()
        self._health = program.contact.health or Health()
        self._server = make_server(_MOST_STREAMS + 2 * MOST_ASKING)
        self._server.add_generic_rpc_handlers((self._later,))
        self._health.add_to(self._server, *_SERVICES)
        if program.reflection:
            add_reflection(self._server, (*_SERVICES, health.SERVICE_NAME))
        self._program = program
        self.addresses = _bind(self._server, program)
        self.tcp_address = next((a for a in self.addresses if not a.startswith("unix:")), "")
        self.episode_addresses: list[str] = []
        self._directory: HeldDirectory | None = None  # of a socket for receivers
        self._receivers: Receivers | None = None
        local = next((each for each in self.addresses if each.startswith("unix:")), "")
        if program.receivers:
            self._receivers = Receivers(_address_of_receivers(program))
            self.episode_addresses.append(_as_dialled(program, self._receivers.address))
            if not local:
                self._directory = HeldDirectory()
                atexit.register(self._directory.remove)  # in case this is not closed
                local = bind(self._server, f"unix:{self._directory.path}/learner.sock")
        self._local = local
        self.memory: MemorySocket | None = None
        self._server.start()

    def share_memory(self, run_id: str, incarnation: str) -> str:
        """From now on, let EnvRunners of this host connect to share memory.

        Args:
            run_id: of the run.
            incarnation: of this learner.

        Returns:
            Why those of other containers cannot, for people; "": they can, or are not meant to.

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

    def start_receivers(
        self,
        run_id: str,
        permits_key: bytes,
        tell: Callable[[str], None],
        none_left: Callable[[Exception], None],
    ) -> None:
        """Start receivers, if there are to be any.

        Args:
            run_id: of the run.
            permits_key: of the run.
            tell: gets a line for people when one has ended.
            none_left: gets an error when none is left.
        """
        if self._receivers is None:
            return
        count, contact = self._program.receivers, self._program.contact
        program = ReceiverProgram(
            self._receivers.address,
            self._local,
            run_id,
            contact.token,
            permits_key,
            total_memory() // 4 // count,
            contact.tls,
            self._program.insecure,
            contact.log.log_format if contact.log else "text",
        )
        self._receivers.start(count * [program], tell, none_left)

    def ready(self, is_ready: bool) -> None:
        """Tell health checks whether EnvRunners should come."""
        self._health.ready(is_ready)

    def ring_access(self, ring: RingServer, attachment: Attachment) -> RingAccess | None:
        """How this learner sums with those of other hosts over encrypted streams; None: it does
        not, since it listens to none, or trusts its network.

        Args:
            ring: takes their streams.
            attachment: to the driver.
        """
        contact = self._program.contact
        if contact.tls is None or not self.tcp_address or self._program.insecure:
            return None
        metadata = call_metadata(contact.token, attachment.run_id, attachment.incarnation)
        return RingAccess(ring, self.tcp_address, metadata, contact.tls)

    def close(self) -> None:
        self._health.ready(False)
        if self._receivers is not None:
            self._receivers.close()
        self._server.stop(grace=0.2).wait(timeout=2)
        if self.memory is not None:
            self.memory.close()
        if self._directory is not None:
            self._directory.remove()


class _Later(grpc.GenericRpcHandler):
    """Handlers that can be set after the server has started."""

    handlers: Sequence[grpc.GenericRpcHandler] = ()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        found = (handler.service(details) for handler in self.handlers)
        return next((each for each in found if each is not None), None)


def _bind(server: grpc.Server, program: LearnerProgram) -> list[str]:
    """Bind the server; returns the addresses to give to EnvRunners."""
    addresses = []
    contact = program.contact
    if contact.socket_dir:
        path = Path(contact.socket_dir) / f"learner-{contact.index}.sock"
        path.unlink(missing_ok=True)  # a predecessor that was killed leaves its own behind
        addresses.append(bind(server, f"unix:{path}"))
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


def _address_of_receivers(program: LearnerProgram) -> str:
    """Where receivers listen: at the port after that of --bind."""
    host, port = split_address(program.bind)
    return join_address(host, port + 1 if port else 0)


def _as_dialled(program: LearnerProgram, bound: str) -> str:
    """Where EnvRunners dial the receivers: at the port after that of --advertise."""
    if not program.advertise:
        return bound
    host, port = split_address(program.advertise)
    return join_address(host, port + 1 if port else split_address(bound)[1])


def peer_host(program: LearnerProgram) -> str:
    """The host name or address at which other learners can reach this process."""
    if not program.bind:
        return "127.0.0.1"
    host = program.bind.rpartition(":")[0].strip("[]")
    anywhere = host in ("", "0.0.0.0", "::")
    return (program.advertise.rpartition(":")[0].strip("[]") if anywhere else host) or "127.0.0.1"
