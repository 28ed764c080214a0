"""Unencrypted communication between a group's learners over torch.distributed.

A process group of torch is useless once one of its members has died, and a wait in gloo cannot be
aborted. So each generation of a learner group gets a new process group, under its own prefix in a
store, and waits have short time limits. If a learner hangs, the driver notices and kills it; the
others then see at once that a connection has closed.

Learners communicate over gloo, from host to host. If each of them has its own GPU, NCCL sums
tensors on GPUs directly. When a member dies, this sum hangs on the other devices. The host
therefore waits for each sum before the optimizer step that needs it, and aborts the sum if it
hangs. The learner's state does not change then. If the device does not recover, the process has to
be replaced.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any
from uuid import UUID

import torch
import torch.distributed
from torch import Tensor

from juggler.learner.group.peers import COLLECTIVE_SECONDS, PeerLost, Peers, torch_message
from juggler.runtime.actors.endpoints import EndpointError

dist: Any = torch.distributed  # half of the names used here have no types

# An operation, or a meeting, cannot be ended earlier.
_CONNECT_SECONDS = 4.0
_STORE_SECONDS = 1.0
_POLL_SECONDS = 0.005

#: Time limit of a sum by NCCL. Before that, the driver notices a member that hangs, and forms
#: another group.
_NCCL_SUM_SECONDS = 8.0
#: Time limits for connecting, and for aborting.
_NCCL_CONNECT_SECONDS = 30.0
_NCCL_END_SECONDS = 5.0
#: Intervals at which a waiting thread checks whether the device is done, and whether to give up.
_NCCL_POLL_SECONDS = 50e-6
_NCCL_GIVE_UP_SECONDS = 10e-3


class MeetingPoint:
    """The store, at one learner, where a group's learners meet.

    Args:
        host: address to listen on, where the others can reach this process.

    Raises:
        EndpointError: this process cannot listen there.

    Attributes:
        address: "host:port".
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise _not_ours(host, error.strerror or str(error)) from error
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        # Without a listening socket, torch would open one on every interface.
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class GlooPeers(Peers):
    """Peers of one host, or of a trusted network."""

    def __init__(
        self,
        meeting_point: str,
        generation: int,
        rank: int,
        size: int,
        host: str,
        superseded: Callable[[], bool],
        device: torch.device | None = None,
    ) -> None:
        """Meet the other learners.

        Args:
            meeting_point: address of the group's `MeetingPoint`.
            generation: generation of the group.
            rank: rank of this learner.
            size: number of learners.
            host: address where the others can reach this process.
            superseded: returns whether the driver has requested another group.
            device: device of this learner; None: the CPU.

        Raises:
            PeerLost: a learner is absent, or could not connect.
            EndpointError: this process cannot listen at its address.
            NcclStuck: a learner is lost, and this process can no longer use its device.
        """
        super().__init__(rank, size)
        self._nccl: NcclGroup | None = None
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
        options._devices = [_device(host)]
        met = _met(meeting_point, generation, rank, size, superseded)
        store = dist.PrefixStore(str(generation), met)
        # Connecting fails if a learner leaves after all of them have met.
        try:
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise PeerLost(
                f"the {size} learners could not connect: {torch_message(error)}"
            ) from None
        device = device or torch.device("cpu")
        if by_nccl(self.gather(gpu_number(device))):
            self._nccl = NcclGroup.connected(store, rank, size, device, superseded)

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.end("the group has ended")

    def sum(self, x: Tensor) -> Tensor:
        if self._nccl is not None and x.device.type != "cpu":
            return self._nccl.sum(x)
        return super().sum(x)

    def _sum_on_host(self, x: Tensor) -> Tensor:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        work = self._group.allreduce([x], options)  # raises only for its arguments
        try:
            work.wait()
        except RuntimeError as error:
            # gloo's errors name a place in its sources; other errors are about the data.
            if "gloo/" not in str(error):
                raise
            raise PeerLost(torch_message(error)) from None
        return x


def _device(host: str) -> Any:
    """Create gloo's device, which listens at this process's own address.

    Raises:
        EndpointError: gloo cannot listen there.
    """
    # torch accepts a list of interfaces, with a device for each. Only the first is used here.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    named = {"interface": interface} if interface else {"hostname": host}
    try:
        return dist.ProcessGroupGloo.create_device(**named)
    except RuntimeError as error:
        where = f"the interface {interface} of GLOO_SOCKET_IFNAME" if interface else host
        raise _not_ours(where, torch_message(error)) from error


def _not_ours(where: str, why: str) -> EndpointError:
    return EndpointError(
        f"this learner cannot listen for other learners at {where}: {why}. The host in "
        "--advertise, or else in --bind, must be an address of this machine itself; or use --tls "
        "without --insecure: then learners reach each other where EnvRunners reach them"
    )


def _met(
    address: str, generation: int, rank: int, size: int, superseded: Callable[[], bool]
) -> Any:
    """Return the store at a meeting point, once all learners are there.

    Connecting waits for absent learners and cannot be aborted, so it starts only afterwards.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + COLLECTIVE_SECONDS
    keys = [f"{generation}/here/{each}" for each in range(size)]
    store: Any = None
    problem = "some have not arrived"
    while not superseded() and time.monotonic() < deadline:
        try:
            # The learner with the store may be the last one to start.
            if store is None:
                patience = timedelta(seconds=_STORE_SECONDS)
                store = dist.TCPStore(host, int(port), timeout=patience, wait_for_workers=False)
                store.set(keys[rank], "")
            if store.check(keys):
                return store
        except RuntimeError as error:
            store, problem = None, torch_message(error)
        time.sleep(_POLL_SECONDS)
    raise PeerLost(f"the {size} learners did not meet at {address}: {problem}")


class NcclStuck(RuntimeError):
    """NCCL does not stop: only a new process can use this device."""


def gpu_number(device: torch.device) -> list[int]:
    """Return a GPU's UUID as two int64; zeros without NCCL support."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return [0, 0]
    number = UUID(str(torch.cuda.get_device_properties(device).uuid)).int
    return [(number >> 64) - 2**63, (number & (2**64 - 1)) - 2**63]


def by_nccl(gpu_numbers: Sequence[Sequence[int]]) -> bool:
    """Return whether NCCL can make the sums of learners with these GPUs.

    It needs a separate GPU for each learner. Otherwise hosts make the sums.
    """
    distinct = {tuple(number) for number in gpu_numbers}
    return (0, 0) not in distinct and len(distinct) == len(gpu_numbers)


@dataclass(eq=False)
class NcclGroup:
    """This learner's membership in one generation of its group."""

    _group: Any
    _device: torch.device
    _superseded: Callable[[], bool]

    @classmethod
    def connected(
        cls,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        superseded: Callable[[], bool],
    ) -> NcclGroup:
        """Connect to the other members, all of which call this too.

        Raises:
            PeerLost: a member does not connect.
            NcclStuck: in addition, this process can no longer use its device.
        """
        # Otherwise torch ends the process when a member is lost.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(int(_NCCL_CONNECT_SECONDS)))
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0  # so that connecting can be aborted too
        options._timeout = timedelta(seconds=_NCCL_CONNECT_SECONDS)
        made = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        found = cls(made, device, superseded)
        found.connect()
        return found

    def connect(self) -> None:
        """Make a first sum, with which NCCL connects.

        Raises:
            PeerLost: a member does not connect.
            NcclStuck: in addition, this process can no longer use its device.
        """
        x = torch.zeros(1, device=self._device)  # [1]
        connected = _in_thread(lambda: self._started_sum(x).synchronize())
        why = self._awaited(connected.done, _NCCL_CONNECT_SECONDS)
        if not why and (error := connected.exception()) is not None:
            why = torch_message(error)
        if why:
            self.end(why)
            raise PeerLost(f"the learners' GPUs could not connect: {why}")

    def sum(self, x: Tensor) -> Tensor:
        """Sum elementwise over all learners, bitwise equal. Changes x.

        Raises:
            PeerLost: a member is gone.
            NcclStuck: in addition, this process can no longer use its device.
        """
        try:
            why = self._awaited(self._started_sum(x).query, _NCCL_SUM_SECONDS)
        except RuntimeError as error:
            why = torch_message(error)
        if why:
            self.end(why)
            raise PeerLost(f"NCCL could not sum: {why}")
        return x

    def end(self, why: str) -> None:
        """Abort unfinished sums, and leave the group.

        Args:
            why: the reason, for the message.

        Raises:
            NcclStuck: the device does not recover.
        """
        if self._group is None:
            return
        group, self._group = self._group, None

        # The device may hang, so another thread stops it.
        def abort() -> None:
            group.abort()
            torch.get_device_module(self._device).synchronize(self._device)

        ended = _in_thread(abort)
        if wait([ended], timeout=_NCCL_END_SECONDS).not_done:
            problem = f"it does not stop within {_NCCL_END_SECONDS:.0f} s"
        elif (error := ended.exception()) is not None:
            problem = torch_message(error)
        else:
            return
        raise NcclStuck(
            f"NCCL cannot be stopped on {self._device}: {problem}. A new process has to replace "
            f"this learner, with the state of another one. NCCL had to be stopped: {why}"
        )

    def _started_sum(self, x: Tensor) -> Any:
        """Start a sum; return an event after it on the device."""
        self._group.allreduce([x]).wait()  # makes the device's stream wait, not the host
        device_module = torch.get_device_module(self._device)
        event = device_module.Event()
        event.record(device_module.current_stream(self._device))
        return event

    def _awaited(self, done: Callable[[], bool], seconds: float) -> str:
        """Wait for the device; return why waiting ended early, or ""."""
        started = checked = time.monotonic()
        while not done():
            now = time.monotonic()
            if now - started > seconds:
                return f"it takes more than {seconds:.0f} s"
            if now - checked > _NCCL_GIVE_UP_SECONDS:
                checked = now
                if self._superseded():
                    return "there is another group to form"
            time.sleep(_NCCL_POLL_SECONDS)
        return ""


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Do work that may hang in its own thread."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name="nccl", daemon=True).start()
    return future
