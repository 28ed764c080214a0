"""Sums over learners that compute on a GPU each, from GPU to GPU: NCCL.

A sum hangs on the devices when a member dies. The host waits for each sum, so that no step of an
optimizer is made of one that failed, and breaks it off. The learner's state is then as it was, and
the next generation of the group gets an NCCL group of its own. Where the device does not come back
from that, the process has to be replaced.
"""

from __future__ import annotations

import os
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

from juggler.learner.group.peer_lost import PeerLost, said

dist: Any = torch.distributed  # half of what is used here its types do not know

#: What a sum may take. The driver finds a member that hangs before that, and forms another group.
_SUM_SECONDS = 8.0
#: What it may take to connect, and to break off what hangs.
_CONNECT_SECONDS = 30.0
_END_SECONDS = 5.0
#: How often a thread that waits looks whether the device is done, and whether it waits in vain.
_LOOK_SECONDS = 50e-6
_ASK_SECONDS = 10e-3


class NcclStuck(RuntimeError):
    """NCCL cannot be stopped any more: only a new process can use this device again."""


def gpu_number(device: torch.device) -> list[int]:
    """Which GPU of the world a device is, in two whole numbers of 64 bits: zeros for one that NCCL
    does not reach from here."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return [0, 0]
    number = UUID(str(torch.cuda.get_device_properties(device).uuid)).int
    return [(number >> 64) - 2**63, (number & (2**64 - 1)) - 2**63]


def by_nccl(gpu_numbers: Sequence[Sequence[int]]) -> bool:
    """Whether NCCL makes the sums of learners with these GPUs.

    It wants a GPU for each of them. Several on one, or some on a CPU, sum on their hosts.
    """
    distinct = {tuple(number) for number in gpu_numbers}
    return (0, 0) not in distinct and len(distinct) == len(gpu_numbers)


class NcclGroup:
    """This learner among the others, in one generation of their group."""

    def __init__(self, group: Any, device: torch.device, superseded: Callable[[], bool]) -> None:
        """
        Args:
            group: torch's.
            device: of this learner.
            superseded: whether there is no use in waiting any longer.
        """
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
        """With the others, who all call this too.

        Raises:
            PeerLost: one of them does not.
            NcclStuck: nor can this process go on.
        """
        # Otherwise torch ends the process where a member is lost.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(int(_CONNECT_SECONDS)))
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0  # so that connecting, too, can be broken off
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
        made = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        found = cls(made, device, superseded)
        found.connect()
        return found

    def connect(self) -> None:
        """NCCL does so with the first sum, which this is.

        Raises:
            PeerLost: another one does not.
            NcclStuck: nor can this process go on.
        """
        connected = _beside(self._summed, torch.zeros(1, device=self._device))  # [1]
        why = self._awaited(connected.done, _CONNECT_SECONDS)
        if not why and (error := connected.exception()) is not None:
            why = said(error)
        if why:
            self.end(why)
            raise PeerLost(f"the learners' GPUs could not connect: {why}")

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise over all learners, the same bit for bit at each of them. Changes x.

        Raises:
            PeerLost: somebody is gone.
            NcclStuck: nor can this process go on.
        """
        try:
            why = self._awaited(self._begun(x).query, _SUM_SECONDS)
        except RuntimeError as error:
            why = said(error)
        if why:
            self.end(why)
            raise PeerLost(f"NCCL could not sum: {why}")
        return x

    def end(self, why: str) -> None:
        """Break off whatever is under way; there are no more sums in this group.

        Args:
            why: for people.

        Raises:
            NcclStuck: the device does not come back.
        """
        if self._group is None:
            return
        group, self._group = self._group, None
        ended = _beside(self._break_off, group)
        deadline = time.monotonic() + _END_SECONDS
        while not ended.done() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if not ended.done():
            problem = f"it does not stop within {_END_SECONDS:.0f} s"
        elif (error := ended.exception()) is not None:
            problem = said(error)
        else:
            return
        raise NcclStuck(
            f"NCCL cannot be stopped on {self._device}: {problem}. A new process has to take this "
            f"learner's place, with the state of one that is left. It was to be stopped since {why}"
        )

    def _begun(self, x: Tensor) -> Any:
        """The event behind a sum."""
        self._group.allreduce([x]).wait()  # it is the device's stream that waits
        device_module = torch.get_device_module(self._device)
        event = device_module.Event()
        event.record(device_module.current_stream(self._device))
        return event

    def _summed(self, x: Tensor) -> None:
        self._begun(x).synchronize()

    def _awaited(self, over: Callable[[], bool], seconds: float) -> str:
        """Why it is in vain to wait any longer; "" where it is over."""
        started = asked = time.monotonic()
        while not over():
            now = time.monotonic()
            if now - started > seconds:
                return f"it takes more than {seconds:.0f} s"
            if now - asked > _ASK_SECONDS:
                asked = now
                if self._superseded():
                    return "there is another group to form"
            time.sleep(_LOOK_SECONDS)
        return ""

    def _break_off(self, group: Any) -> None:
        group.abort()
        torch.get_device_module(self._device).synchronize(self._device)


def _beside(work: Callable[..., None], *arguments: Any) -> Future[None]:
    """Have work done in a thread of its own, which may hang."""
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
