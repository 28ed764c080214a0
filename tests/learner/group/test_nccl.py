"""When learners sum by NCCL, and what becomes of one whose sums hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from support.fake_streams import PATIENCE, FakeDevice

from juggler.learner.group import torch_peers
from juggler.learner.group.peers import PeerLost
from juggler.learner.group.torch_peers import (
    MeetingPoint,
    NcclGroup,
    NcclStuck,
    by_nccl,
    gpu_number,
)

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FIRST, SECOND, NONE = [-5, 7], [-5, 8], [0, 0]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([FIRST, SECOND], True),
        ([FIRST], True),
        ([FIRST, FIRST], False),
        ([FIRST, SECOND, FIRST], False),
        ([FIRST, NONE], False),
        ([NONE, NONE], False),
    ],
    ids=["a GPU each", "one", "one GPU for two", "two for three", "a mix", "on CPUs"],
)
def test_nccl_wants_a_gpu_for_each_learner(gpus: list[list[int]], expected: bool) -> None:
    assert by_nccl(gpus) is expected


def test_the_cpu_is_no_gpu() -> None:
    assert gpu_number(CPU) == NONE


class Group:
    """torch's, where a sum is over as soon as the device is, and `abort` does what a test says."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []
        self.aborted = 0
        self.abort_does: Callable[[], None] = int

    def allreduce(self, tensors: list[torch.Tensor]) -> Group:
        self.sums += tensors
        tensors[0] *= 2
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted += 1
        self.abort_does()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


def made(group: Group, superseded: Callable[[], bool] = bool) -> NcclGroup:
    return NcclGroup(group, CPU, superseded)


def test_a_sum_is_there_when_the_device_has_made_it(device: FakeDevice) -> None:
    group = Group()
    together = made(group)
    together.connect()
    device.slow = True

    def finish() -> None:
        while len(device.events) < 2:
            time.sleep(0.001)
        device.events[1].finish()

    threading.Thread(target=finish).start()
    assert together.sum(torch.ones(2)).tolist() == [2, 2]
    assert group.aborted == 0


def test_a_sum_that_hangs_is_broken_off(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_peers, "_NCCL_SUM_SECONDS", 0.1)
    device.slow = True
    group = Group()
    with pytest.raises(PeerLost, match="NCCL could not sum: it takes more than 0 s"):
        made(group).sum(torch.ones(2))
    assert group.aborted == 1


def test_nobody_waits_for_a_sum_once_there_is_another_group_to_form(device: FakeDevice) -> None:
    device.slow = True
    group = Group()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="there is another group to form"):
        made(group, lambda: time.monotonic() > started + 0.1).sum(torch.ones(2))
    assert time.monotonic() - started < 6, "less than the longest sum"
    assert group.aborted == 1


def test_what_nccl_says_is_told(device: FakeDevice) -> None:
    class Broken(Group):
        def allreduce(self, tensors: list[torch.Tensor]) -> Group:
            raise RuntimeError("[1.cpp:7] NCCL error: remote process exited\nstack")

    group = Broken()
    with pytest.raises(PeerLost, match=r"could not sum: NCCL error: remote process exited$"):
        made(group).sum(torch.ones(2))
    assert group.aborted == 1
    with pytest.raises(PeerLost, match=r"could not connect: NCCL error: remote process exited$"):
        made(group).connect()


def test_connecting_that_hangs_is_broken_off(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_peers, "_NCCL_CONNECT_SECONDS", 0.1)
    hangs = threading.Event()

    class Hanging(Group):
        def allreduce(self, tensors: list[torch.Tensor]) -> Group:
            hangs.wait(PATIENCE)
            return self

        def abort(self) -> None:
            super().abort()
            hangs.set()

    group = Hanging()
    with pytest.raises(PeerLost, match="the learners' GPUs could not connect: it takes more"):
        made(group).connect()
    assert group.aborted == 1


def test_a_device_that_does_not_come_back_needs_a_new_process(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_peers, "_NCCL_SUM_SECONDS", 0.05)
    monkeypatch.setattr(torch_peers, "_NCCL_END_SECONDS", 0.1)
    device.slow = True
    group, released = Group(), threading.Event()
    group.abort_does = lambda: released.wait(PATIENCE) and None
    with pytest.raises(NcclStuck, match=r"cannot be stopped on cpu.* new process .* it takes more"):
        made(group).sum(torch.ones(2))
    released.set()


def test_a_device_that_is_broken_needs_a_new_process(device: FakeDevice) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    device.synchronize = broken  # type: ignore[method-assign]
    with pytest.raises(NcclStuck, match="unspecified launch failure"):
        made(Group()).end("the group is over")


def test_a_group_ends_once(device: FakeDevice) -> None:
    group = Group()
    together = made(group)
    for _ in range(2):
        together.end("the group is over")
    assert group.aborted == 1


@ON_GPU
def test_a_gpu_has_a_number() -> None:
    number = gpu_number(CUDA)
    assert number != NONE
    assert all(-(2**63) <= part < 2**63 for part in number)
    assert by_nccl([number])


@ON_GPU
def test_on_a_gpu_groups_form_sum_and_end_again_and_again() -> None:
    point = MeetingPoint("127.0.0.1")
    host, _, port = point.address.rpartition(":")
    dist: Any = torch.distributed
    store = dist.TCPStore(host, int(port), wait_for_workers=False)
    for generation in range(3):
        prefixed = dist.PrefixStore(str(generation), store)
        together = NcclGroup.connected(prefixed, 0, 1, CUDA, bool)
        assert together.sum(torch.arange(3.0, device=CUDA)).tolist() == [0, 1, 2]
        together.end("the group is over")
    assert torch.ones(2, device=CUDA).sum().item() == 2, "the device is as it was"
