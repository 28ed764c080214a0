"""Sums over learners with a GPU each, made by NCCL.

When a member dies, a sum hangs on the devices of the others. The host therefore waits for each sum
before the optimizer step that needs it, and aborts the sum if it hangs. The learner's state is then
as it was, and the next generation of the group gets an NCCL group of its own. If the device does
not recover from that, the process has to be replaced.
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

dist: Any = torch.distributed  # its types lack half of what is used here

#: Time limit of a sum. The driver notices a member that hangs earlier, and forms another group.
_SUM_SECONDS = 8.0
#: Time limits for connecting, and for aborting what hangs.
_CONNECT_SECONDS = 30.0
_END_SECONDS = 5.0
#: How often a waiting thread checks whether the device is done, and whether to give up.
_LOOK_SECONDS = 50e-6
_ASK_SECONDS = 10e-3


class NcclStuck(RuntimeError):
    """NCCL does not stop: only a new process can use this device again."""


def gpu_number(device: torch.device) -> list[int]:
    """The UUID of a GPU as two signed 64-bit integers; zeros for a device that NCCL cannot use."""
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
        """
        Args:
            group: the process group of torch.
            device: of this learner.
            superseded: says whether the driver has asked for another group by now.
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
        """Connect to the other members, all of which call this too.

        Raises:
            PeerLost: a member does not connect.
            NcclStuck: the same, and this process cannot use its device any more.
        """
        # Otherwise torch ends the process when a member is lost.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(int(_CONNECT_SECONDS)))
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0  # so that connecting can be aborted too
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
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
        why = self._awaited(connected.done, _CONNECT_SECONDS)
        if not why and (error := connected.exception()) is not None:
            why = said(error)
        if why:
            self.end(why)
            raise PeerLost(f"the learners' GPUs could not connect: {why}")

    def sum(self, x: Tensor) -> Tensor:
        """Sum elementwise over all learners, with the same bits at each. Changes x.

        Raises:
            PeerLost: a member is gone.
            NcclStuck: the same, and this process cannot use its device any more.
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
        """Abort whatever is under way, and leave the group.

        Args:
            why: the reason, for the message.

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
        """Wait until it is over; returns why waiting was given up, or ""."""
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
