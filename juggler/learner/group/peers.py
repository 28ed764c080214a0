"""The learners of a group, to each other: torch.distributed, made anew for every generation.

A process group of torch is of no use once one of its members has died, and a wait in gloo cannot be
broken off. So each generation of a learner group gets one of its own, under a prefix of its own in
a store, waits are short, and whoever hangs in one is for the driver to find and to kill: the others
then notice at once that a connection has closed.

What learners tell each other goes over gloo, from host to host. Where each of them has a GPU of its
own, sums of what lies there are made by NCCL, from GPU to GPU.
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
from juggler.learner.group.peer_lost import PeerLost as PeerLost
from juggler.learner.group.peer_lost import said

dist: Any = torch.distributed  # half of what is used here its types do not know

#: What one operation may take, and what it may take to meet. Nothing can end it before.
COLLECTIVE_SECONDS = 8.0
_CONNECT_SECONDS = 4.0
_STORE_SECONDS = 1.0
_LOOK_SECONDS = 0.005


class MeetingPoint:
    """A place where the learners of a group find each other, if this one is their first.

    Attributes:
        address: "host:port".
    """

    def __init__(self, host: str) -> None:
        """
        Args:
            host: by which the others can reach this process, and to listen on.

        Raises:
            OSError: this process cannot listen there.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        # Given a socket that listens, torch opens none of its own on every interface.
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class Peers:
    """This learner among those of its group, in one generation of it.

    Attributes:
        rank: of this learner.
        size: how many there are.
    """

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
            meeting_point: address of that of rank 0.
            generation: of the group.
            rank: of this learner.
            size: how many there are.
            host: by which the others can reach this process.
            superseded: whether there is no use in waiting any longer.
            device: where this learner computes; None: on the CPU.

        Raises:
            PeerLost: not all of them came.
            NcclStuck: they did, and then not, and this process cannot go on.
        """
        self.rank, self.size = rank, size
        self._nccl: NcclGroup | None = None
        met = _met(meeting_point, generation, rank, size, superseded)
        store = dist.PrefixStore(str(generation), met)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        options._devices = [
            dist.ProcessGroupGloo.create_device(interface=interface)
            if interface
            else dist.ProcessGroupGloo.create_device(hostname=host)
        ]
        try:
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise PeerLost(f"the {size} learners could not connect: {said(error)}") from None
        device = device or torch.device("cpu")
        if by_nccl(self.gather(gpu_number(device))):
            self._nccl = NcclGroup.connected(store, rank, size, device, superseded)

    def close(self) -> None:
        """Leave the others alone.

        Raises:
            NcclStuck: this process cannot go on.
        """
        if self._nccl is not None:
            self._nccl.end("the group is over")

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise over all learners, the same bit for bit at each of them. May change x.

        Raises:
            PeerLost: somebody is gone.
            NcclStuck: the same, and this process cannot go on.
        """
        if self._nccl is not None and x.device.type != "cpu":
            return self._nccl.sum(x)
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        on_host = _on_host(x)
        self._wait(lambda: self._group.allreduce([on_host], options))
        return on_host.to(x.device, non_blocking=True)

    def gather(self, values: list[int]) -> list[list[int]]:
        """By rank, the whole numbers of 64 bits that each learner has."""
        table = torch.zeros((self.size, len(values)), dtype=torch.int64)  # [k, n]
        table[self.rank] = torch.tensor(values)
        return self.sum(table).tolist()

    def broadcast(self, data: bytes | None, root: int, size: int) -> bytes:
        """What the learner with rank `root` has, `size` bytes; the others pass None."""
        x = torch.empty(size, dtype=torch.uint8)  # [size]
        if data is not None:
            x.numpy()[:] = memoryview(data)
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        self._wait(lambda: self._group.broadcast([x], options))
        return x.numpy().tobytes()

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise PeerLost(said(error)) from None


def _met(
    address: str, generation: int, rank: int, size: int, superseded: Callable[[], bool]
) -> Any:
    """The store at a meeting point, once all learners of this generation are there.

    Connecting cannot be broken off, and waits for whoever is not there. So nobody begins with it
    before all have come.
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


def _on_host(x: Tensor) -> Tensor:
    """Page-locked where it comes from a GPU: the copies there and back run at full speed."""
    if x.device.type == "cpu":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)
