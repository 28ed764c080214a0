"""Receiver processes: they take what a learner's EnvRunners send over a network, on more cores than
the learner's own.

All of them listen at one port (SO_REUSEPORT), and the kernel spreads connections over them. If one
ends, its streams break, and their batches without an answer count as lost, as with any broken
stream; the EnvRunners then reach another one, and it is started again.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from juggler.runtime.actors.credentials import call_metadata, why_refused
from juggler.runtime.actors.endpoints import (
    EndpointError,
    bind,
    join_address,
    make_server,
    split_address,
)
from juggler.runtime.actors.logs import LogFormat, WorkerLog
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.memory import keep_freed_memory
from juggler.runtime.actors.open_files import allow_many_open_files
from juggler.runtime.actors.processes import (
    WorkerProgram,
    let_go_of_forkserver,
    share_forkserver,
)
from juggler.runtime.actors.supervisor import Exited, RestartPolicy, Supervisor
from juggler.runtime.actors.tls import Tls
from juggler.runtime.streams.batch_relay import EpisodeRelay
from juggler.runtime.streams.permits import Permits
from juggler.runtime.streams.pulse import Pulse
from juggler.runtime.wire.layouts import Limits

_MOST_STREAMS = 1024  # of one process
# Nobody counts uses of a receiver, so that it stays down only if it ends too often in a minute.
_POLICY = RestartPolicy(quarantine_after=sys.maxsize)
_GATHER_SECONDS = 3600.0
_START_SECONDS = 60.0
_NEWS_SECONDS = 0.2  # from the first end to the line about all: a driver cuts off who says too much


@dataclass(frozen=True, slots=True)
class ReceiverProgram:
    """All that a receiver process is started with.

    Attributes:
        address: "host:port" to listen at, with others.
        learner: the learner's address on this host, "unix:path".
        run_id: of the run.
        token: of the run.
        permits_key: of the run: batches that nobody asked for end here.
        most_bytes: of memory, for batches that wait.
        tls: of this host; None: no TLS.
        insecure: listen beyond loopback even without TLS or without a token.
        log_format: of this process's own messages.
        pulse_address: "unix:path", at which the learner sees whether it lives; `Receivers` sets it.
    """

    address: str
    learner: str
    run_id: str
    token: str = field(repr=False)
    permits_key: bytes = field(repr=False)
    most_bytes: int
    tls: Tls | None = None
    insecure: bool = False
    log_format: LogFormat = "text"
    pulse_address: str = ""


def run(program: ReceiverProgram) -> None:
    """Receive until the learner's end."""
    keep_freed_memory()
    allow_many_open_files()
    log = WorkerLog("receiver", program.log_format)
    relay = EpisodeRelay(
        program.learner,
        call_metadata(program.token, program.run_id, "receiver"),
        lambda metadata: why_refused(metadata, program.token, program.run_id),
        Limits(),
        Permits(program.permits_key).check,
        program.most_bytes,
        _once(log.error),
    )
    server = make_server(_MOST_STREAMS, shares_port=True)
    server.add_generic_rpc_handlers((relay.handler(),))
    bind(
        server,
        program.address,
        token=program.token,
        tls=program.tls,
        insecure=program.insecure,
    )
    bind(server, program.pulse_address)
    server.start()
    server.wait_for_termination()


class Receivers:
    """The receiver processes of this process, a learner.

    Attributes:
        address: "host:port" at which they listen.
    """

    def __init__(self, address: str) -> None:
        """Take the port; call this in the thread that lives as long as the process.

        Args:
            address: "host:port". Port 0: any free port.

        Raises:
            EndpointError: the address cannot be listened at.
        """
        host, _ = split_address(address)
        self._port = _port_of_our_own(address)
        self.address = join_address(host, self._port.getsockname()[1])
        self._events: Mailbox[Exited] = Mailbox()
        self._supervisor = Supervisor(self._events)
        self._over = threading.Event()
        self._last_end = ""
        self._thread: threading.Thread | None = None
        self._pulse: Pulse | None = None
        share_forkserver()  # it is ready when they start

    def start(
        self,
        programs: list[ReceiverProgram],
        tell: Callable[[str], None],
        none_left: Callable[[Exception], None],
    ) -> None:
        """Start processes, keep them running, and wait until one listens.

        Args:
            programs: one for each process.
            tell: gets a line for people when one has ended.
            none_left: gets an error when none is left, and none is started again.

        Raises:
            EndpointError: none of them listens.
        """
        pulses: dict[str, str] = {}
        for number, program in enumerate(programs):
            worker_id, target = f"receiver-{number}", f"{__name__}:{run.__name__}"
            pulses[worker_id] = f"{program.learner}-{number}"
            program = replace(program, pulse_address=pulses[worker_id])
            self._supervisor.add(worker_id, WorkerProgram(target, program), _POLICY)
        arguments = (len(programs), tell, none_left)
        self._thread = threading.Thread(
            target=self._watch, args=arguments, name="receivers", daemon=True
        )
        self._thread.start()
        self._pulse = Pulse(self._supervisor, pulses, tell)
        self._wait_until_one_listens(self._thread)

    def close(self) -> None:
        self._over.set()
        if self._pulse is not None:
            self._pulse.close()
        self._events.wake()
        if self._thread is not None:
            self._thread.join()
        self._supervisor.close(grace=0.0)
        let_go_of_forkserver()
        self._port.close()

    def _wait_until_one_listens(self, watch: threading.Thread) -> None:
        began = time.monotonic()
        while True:
            try:
                return socket.create_connection(split_address(self.address), 1.0).close()
            except OSError as error:
                waited = time.monotonic() - began
                if waited > _START_SECONDS or not watch.is_alive():  # which ends when none is left
                    why = self._last_end or error.strerror or str(error)
                    raise EndpointError(
                        f"no receiver listens at {self.address} after {waited:.0f} s: {why}"
                    ) from None
            time.sleep(0.05)

    def _watch(
        self, running: int, tell: Callable[[str], None], none_left: Callable[[Exception], None]
    ) -> None:
        # Looked at each time: the second gather may have taken the wake-up of `close`.
        while not self._over.is_set():
            ends = self._events.gather(_GATHER_SECONDS)
            if self._over.wait(_NEWS_SECONDS if ends else 0.0):
                return
            news = []
            for each in (*ends, *self._events.gather()):
                self._last_end = each.how
                what = f"lost its {each.worker_id} ({each.how})"
                if each.restart_in is not None:
                    news.append(f"{what}: it starts again in {each.restart_in:.1f} s")
                else:
                    running -= 1
                    news.append(f"{what}, which keeps ending: {running} receivers are left")
            if news:
                tell("; ".join(news))
            if not running:
                return none_left(RuntimeError(f"no receiver is left: {self._last_end}"))


def _port_of_our_own(address: str) -> socket.socket:
    """A socket that holds a port, and lets processes of this user listen there too.

    Raises:
        EndpointError: somebody else listens there, or the address is not of this host.
    """
    host, port = split_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(where)
            # Only now: before, it would have shared the port of others that share theirs.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            held.close()
            raise
    except OSError as error:
        raise EndpointError(
            f"receivers cannot listen on {address}: {error.strerror}. With --receivers, a learner "
            "takes the port after that of --bind too: choose another one"
        ) from error
    return held


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    """The same for each text, once."""
    said: set[str] = set()

    def once(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    return once
