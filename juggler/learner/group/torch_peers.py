"""Communication between the learners of a group over torch.distributed, which encrypts nothing.

A process group of torch is useless once one of its members has died, and a wait in gloo cannot be
aborted. So each generation of a learner group gets a new process group, under its own prefix in a
store, and waits have short time limits. If a learner hangs, the driver notices and kills it; the
others then see at once that a connection has closed.

Learners communicate over gloo, from host to host. If each of them has a GPU of its own, NCCL sums
tensors on GPUs directly. When a member dies, this sum hangs on the other devices. The host
therefore waits for each sum before the optimizer step that needs it, and aborts the sum if it
hangs. The learner's state is then as it was. If the device does not recover from that, the process
has to be replaced.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any
from uuid import UUID

import torch
import torch.distributed
from torch import Tensor

from juggler.learner.group.peers import COLLECTIVE_SECONDS, PeerLost, Peers, said
from juggler.runtime.actors.endpoints import EndpointError

dist: Any = torch.distributed  # its types lack half of what is used here

# Nothing can end an operation, or meeting, earlier.
_CONNECT_SECONDS = 4.0
_STORE_SECONDS = 1.0
_LOOK_SECONDS = 0.005

#: Time limit of a sum by NCCL. The driver notices a member that hangs earlier, and forms another
#: group.
_NCCL_SUM_SECONDS = 8.0
#: Time limits for connecting, and for aborting what hangs.
_NCCL_CONNECT_SECONDS = 30.0
_NCCL_END_SECONDS = 5.0
#: How often a waiting thread checks whether the device is done, and whether to give up.
_NCCL_LOOK_SECONDS = 50e-6
_NCCL_ASK_SECONDS = 10e-3


class MeetingPoint:
    """The store, at one learner, where a group's learners meet.

    Args:
        host: the address to listen on, at which the others can reach this process.

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
    """Peers of one host, or of a network that is trusted."""

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
        """Meets the others.

        Args:
            meeting_point: the address of one of theirs.
            generation: of the group.
            rank: of this learner.
            size: the number of learners.
            host: the address at which the others can reach this process.
            superseded: says whether the driver has asked for another group by now.
            device: where this learner computes; None: on the CPU.

        Raises:
            PeerLost: a learner did not come, or could not connect.
            EndpointError: this process cannot listen at its address.
            NcclStuck: the same, and this process cannot use its device any more.
        """
        super().__init__(rank, size)
        self._nccl: NcclGroup | None = None
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
        options._devices = [_device(host)]
        met = _met(meeting_point, generation, rank, size, superseded)
        store = dist.PrefixStore(str(generation), met)
        try:
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise PeerLost(f"the {size} learners could not connect: {said(error)}") from None
        device = device or torch.device("cpu")
        if by_nccl(self.gather(gpu_number(device))):
            self._nccl = NcclGroup.connected(store, rank, size, device, superseded)

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.end("the group is over")

    def sum(self, x: Tensor) -> Tensor:
        if self._nccl is not None and x.device.type != "cpu":
            return self._nccl.sum(x)
        return super().sum(x)

    def broadcast(self, data: bytes | None, root: int, size: int) -> bytes:
        x = torch.empty(size, dtype=torch.uint8)  # [size]
        if data is not None:
            x.numpy()[:] = memoryview(data)
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        self._wait(lambda: self._group.broadcast([x], options))
        return x.numpy().tobytes()

    def _sum_on_host(self, x: Tensor) -> Tensor:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        self._wait(lambda: self._group.allreduce([x], options))
        return x

    def _wait(self, begin: Callable[[], Any]) -> None:
        begun = begin()  # raises only over its arguments
        try:
            begun.wait()
        except RuntimeError as error:
            # gloo's errors name a place in its sources; others are about what was to be sent.
            if "gloo/" not in str(error):
                raise
            raise PeerLost(said(error)) from None


def _device(host: str) -> Any:
    """What gloo listens at, on this process's own address.

    Raises:
        EndpointError: it cannot.
    """
    # torch accepts a list of interfaces, with a device for each. These learners use the first.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    named = {"interface": interface} if interface else {"hostname": host}
    try:
        return dist.ProcessGroupGloo.create_device(**named)
    except RuntimeError as error:
        where = f"the interface {interface} of GLOO_SOCKET_IFNAME" if interface else host
        raise _not_ours(where, said(error)) from error


def _not_ours(where: str, why: str) -> EndpointError:
    return EndpointError(
        f"this learner cannot listen for other learners at {where}: {why}. The host in "
        "--advertise, or else in --bind, must be an address of this machine itself; or use --tls "
        "without --insecure: then learners reach each other where EnvRunners reach them"
    )


def _met(
    address: str, generation: int, rank: int, size: int, superseded: Callable[[], bool]
) -> Any:
    """The store at a meeting point, once all learners have come.

    Connecting waits for absent learners and cannot be aborted, so it begins only then.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + COLLECTIVE_SECONDS
    keys = [f"{generation}/here/{each}" for each in range(size)]
    store: Any = None
    problem = "some have not come"
    while not superseded() and time.monotonic() < deadline:
        try:
            if store is None:
                patience = timedelta(seconds=_STORE_SECONDS)
                store = dist.TCPStore(host, int(port), timeout=patience, wait_for_workers=False)
                store.set(keys[rank], "")
            if store.check(keys):
                return store
        except RuntimeError as error:
            store, problem = None, said(error)
        time.sleep(_LOOK_SECONDS)
    raise PeerLost(f"the {size} learners did not meet at {address}: {problem}")


class NcclStuck(RuntimeError):
    """NCCL does not stop: only a new process can use this device."""


def gpu_number(device: torch.device) -> list[int]:
    """UUID of a GPU as two int64; zeros without NCCL support."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return [0, 0]
    number = UUID(str(torch.cuda.get_device_properties(device).uuid)).int
    return [(number >> 64) - 2**63, (number & (2**64 - 1)) - 2**63]


def by_nccl(gpu_numbers: Sequence[Sequence[int]]) -> bool:
    """Whether NCCL can make the sums of learners with these GPUs.

    It needs a GPU of its own for each learner. Otherwise the sums are made on the hosts.
    """
    distinct = {tuple(number) for number in gpu_numbers}
    return (0, 0) not in distinct and len(distinct) == len(gpu_numbers)


class NcclGroup:
    """This learner's membership in one generation of its group."""

    def __init__(self, group: Any, device: torch.device, superseded: Callable[[], bool]) -> None:
        self._group = group
        self._device = device
        self._superseded = superseded

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
            NcclStuck: the same, and this process cannot use its device any more.
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
        """Make a first sum, because NCCL connects with it.

        Raises:
            PeerLost: a member does not connect.
            NcclStuck: the same, and this process cannot use its device any more.
        """
        connected = _beside(self._summed, torch.zeros(1, device=self._device))  # [1]
        why = self._awaited(connected.done, _NCCL_CONNECT_SECONDS)
        if not why and (error := connected.exception()) is not None:
            why = said(error)
        if why:
            self.end(why)
            raise PeerLost(f"the learners' GPUs could not connect: {why}")

    def sum(self, x: Tensor) -> Tensor:
        """Sum elementwise over all learners, bitwise equal. Changes x.

        Raises:
            PeerLost: a member is gone.
            NcclStuck: the same, and this process cannot use its device any more.
        """
        try:
            why = self._awaited(self._begun(x).query, _NCCL_SUM_SECONDS)
        except RuntimeError as error:
            why = said(error)
        if why:
            self.end(why)
            raise PeerLost(f"NCCL could not sum: {why}")
        return x

    def end(self, why: str) -> None:
        """Abort what is under way, and leave the group.

        Args:
            why: the reason, for the message.

        Raises:
            NcclStuck: the device does not come back.
        """
        if self._group is None:
            return
        group, self._group = self._group, None
        ended = _beside(self._break_off, group)
        deadline = time.monotonic() + _NCCL_END_SECONDS
        while not ended.done() and time.monotonic() < deadline:
            time.sleep(_NCCL_LOOK_SECONDS)
        if not ended.done():
            problem = f"it does not stop within {_NCCL_END_SECONDS:.0f} s"
        elif (error := ended.exception()) is not None:
            problem = said(error)
        else:
            return
        raise NcclStuck(
            f"NCCL cannot be stopped on {self._device}: {problem}. A new process has to replace "
            f"this learner, with the state of another one. NCCL had to be stopped: {why}"
        )

    def _begun(self, x: Tensor) -> Any:
        """Begin a sum; the event returned follows it on the device."""
        self._group.allreduce([x]).wait()  # makes the device's stream wait, not the host
        device_module = torch.get_device_module(self._device)
        event = device_module.Event()
        event.record(device_module.current_stream(self._device))
        return event

    def _summed(self, x: Tensor) -> None:
        self._begun(x).synchronize()

    def _awaited(self, over: Callable[[], bool], seconds: float) -> str:
        """Wait until it is done; return why waiting ended early, or ""."""
        started = asked = time.monotonic()
        while not over():
            now = time.monotonic()
            if now - started > seconds:
                return f"it takes more than {seconds:.0f} s"
            if now - asked > _NCCL_ASK_SECONDS:
                asked = now
                if self._superseded():
                    return "there is another group to form"
            time.sleep(_NCCL_LOOK_SECONDS)
        return ""

    def _break_off(self, group: Any) -> None:
        group.abort()
        torch.get_device_module(self._device).synchronize(self._device)


def _beside(work: Callable[..., None], *arguments: Any) -> Future[None]:
    """Do work in a thread of its own, which may hang."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name="nccl", daemon=True).start()
    return future
