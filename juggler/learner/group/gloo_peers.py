"""Communication between the learners of a group over torch.distributed, which encrypts nothing.

A process group of torch is useless once one of its members has died, and a wait in gloo cannot be
aborted. So each generation of a learner group gets a new process group, under its own prefix in a
store, and waits have short time limits. If a learner hangs, the driver notices and kills it; the
others then see at once that a connection has closed.

Learners communicate over gloo, from host to host. If each of them has a GPU of its own, NCCL sums
tensors on GPUs directly.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from juggler.learner.group.nccl import NcclGroup, by_nccl, gpu_number
from juggler.learner.group.peer_lost import PeerLost, said
from juggler.learner.group.peers import COLLECTIVE_SECONDS, Peers
from juggler.runtime.actors.endpoints import EndpointError

dist: Any = torch.distributed  # its types lack half of what is used here

# Nothing can end an operation, or meeting, earlier.
_CONNECT_SECONDS = 4.0
_STORE_SECONDS = 1.0
_LOOK_SECONDS = 0.005


class MeetingPoint:
    """The store where the learners of a group find each other, at one of them.

    Attributes:
        address: "host:port".
    """

    def __init__(self, host: str) -> None:
        """
        Args:
            host: the address to listen on, at which the others can reach this process.

        Raises:
            EndpointError: this process cannot listen there.
        """
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
        begun = begin()  # raises over its arguments alone
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
    """The store at a meeting point, once all learners of this generation have come there.

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
