"""Learners that look for each other, and lose each other."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from threading import Event, get_ident
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed
from gymnasium import spaces
from support.batches import MakeBatch
from support.changes import SkippedTime
from support.fake_streams import PATIENCE, FakeDevice
from support.learner_groups import at_once, join, meet, never

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.group import peers as groups
from juggler.learner.group import torch_peers
from juggler.learner.group.peers import PeerLost, Peers, take_over_newest
from juggler.learner.group.ring_peers import RingAccess, RingServer
from juggler.learner.group.torch_peers import GlooPeers, MeetingPoint, NcclGroup, NcclStuck, by_nccl
from juggler.learner.learner import Learner
from juggler.learner.process.hosted_module import Membership
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.wire.v1 import training_pb2


def make_learner() -> Learner:
    space = spaces.Box(-10, 10, (4,), np.float32)
    return build_learner(PpoConfig(), None, space, spaces.Discrete(2), {"hidden_sizes": [8]})


def parameters(learner: Learner) -> torch.Tensor:
    found: torch.Tensor = learner.state["parameters"].clone()
    return found


def test_sums_gathers_and_broadcasts_reach_everybody() -> None:
    group = meet(3)
    sums = at_once([lambda p=p: p.sum(torch.arange(4.0) * p.rank) for p in group])  # type: ignore[misc]
    assert all(torch.equal(each, torch.tensor([0.0, 3.0, 6.0, 9.0])) for each in sums)
    tables = at_once([lambda p=p: p.gather([p.rank, -(2**63)]) for p in group])  # type: ignore[misc]
    assert tables == [[[0, -(2**63)], [1, -(2**63)], [2, -(2**63)]]] * 3
    news = [b"news", b"more than eight", b"x"]

    def broadcast(peers: Peers) -> list[bytes]:
        return list(peers.broadcast(1, iter(news if peers.rank == 1 else [])))

    assert at_once([partial(broadcast, peers) for peers in group]) == [news] * 3


def test_what_cannot_be_sent_is_told_as_itself_and_not_as_a_lost_peer() -> None:
    def error_of(work: Callable[[], Any]) -> Exception:
        with pytest.raises(RuntimeError) as caught:
            work()
        return caught.value

    group = meet(2)
    no_place = torch.zeros(4, device="meta")
    error = error_of(lambda: group[0]._sum_on_host(no_place))
    assert "device type meta" in str(error)
    assert not isinstance(error, PeerLost)
    short = torch.zeros(4, dtype=torch.int16)
    for error in at_once([lambda p=p: error_of(lambda: p.sum(short)) for p in group]):  # type: ignore[misc]
        assert "Invalid scalar type" in str(error)
        assert not isinstance(error, PeerLost)


def test_a_meeting_point_listens_where_it_says_and_nowhere_else() -> None:
    point = MeetingPoint("127.0.0.1")
    port = int(point.address.rpartition(":")[2])
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening


def test_who_waits_for_one_that_does_not_come_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_peers, "COLLECTIVE_SECONDS", 0.3)
    point = MeetingPoint("127.0.0.1")
    with pytest.raises(PeerLost, match="the 2 learners did not meet at"):
        GlooPeers(point.address, 1, 0, 2, "127.0.0.1", never)


def test_nobody_waits_once_there_is_another_group_to_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_peers, "COLLECTIVE_SECONDS", 1000.0)
    point, looks = MeetingPoint("127.0.0.1"), count()
    with pytest.raises(PeerLost):
        GlooPeers(point.address, 1, 0, 2, "127.0.0.1", lambda: next(looks) > 20)


def test_a_meeting_point_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_peers, "COLLECTIVE_SECONDS", 0.1)
    monkeypatch.setattr(torch_peers, "_STORE_SECONDS", 0.1)
    with pytest.raises(PeerLost, match=r"did not meet at 127.0.0.1:9"):
        GlooPeers("127.0.0.1:9", 1, 1, 2, "127.0.0.1", never)


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_named_with_what_to_do(host: str) -> None:
    with pytest.raises(EndpointError, match=rf"cannot listen .* at {host}: .*--advertise"):
        MeetingPoint(host)
    with pytest.raises(EndpointError, match=rf"cannot listen .* at {host}: .*--advertise"):
        GlooPeers("127.0.0.1:9", 1, 1, 2, host, never)


def test_the_first_of_several_interfaces_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,none0")
    torch_peers._device("127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0,lo")
    with pytest.raises(EndpointError, match="interface none0 of"):
        torch_peers._device("127.0.0.1")


def test_an_update_that_loses_a_peer_changes_nothing(make_batch: MakeBatch) -> None:
    first, second = make_learner(), make_learner()
    join([first, second], meet)
    before = parameters(first)
    second.leave()
    with pytest.raises(PeerLost):
        first.update_from_episodes([make_batch(4, 8)])
    assert torch.equal(parameters(first), before)
    assert first.updates == 0

    first.leave()
    first.update_from_episodes([make_batch(4, 8)])
    assert not torch.equal(parameters(first), before), "alone it goes on"
    hashes = join([second, first])
    assert hashes[0] == hashes[1], "the learner left behind takes over the other's state"
    assert second.updates == 1


def test_with_a_gpu_each_what_lies_there_is_summed_there_and_all_else_on_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGpus:
        sums: ClassVar[list[torch.Tensor]] = []
        ended: ClassVar[list[str]] = []

        def sum(self, x: torch.Tensor) -> torch.Tensor:
            self.sums.append(x)
            return x

        def end(self, why: str) -> None:
            self.ended.append(why)

    class Connected:
        @staticmethod
        def connected(*_: Any) -> OnGpus:
            return OnGpus()

    numbers = iter([[3, 1], [3, 2]])
    monkeypatch.setattr(torch_peers, "gpu_number", lambda device: next(numbers))
    monkeypatch.setattr(torch_peers, "NcclGroup", Connected)
    group = meet(2)
    there = torch.ones(2, device="meta")
    assert group[0].sum(there) is there
    sums = at_once([lambda p=p: p.sum(torch.ones(1)) for p in group])  # type: ignore[misc]
    assert sums == [torch.tensor([2.0])] * 2
    assert len(OnGpus.sums) == 1
    group[1].close()
    assert OnGpus.ended == ["the group has ended"]


def test_learners_that_share_a_gpu_sum_on_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_peers, "gpu_number", lambda device: [3, 1])
    for peers in meet(2):
        assert peers._nccl is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_learners_that_share_a_gpu_sum_what_lies_there() -> None:
    device = torch.device("cuda", 0)
    group = meet(2, device)
    sums = at_once([lambda p=p: p.sum(torch.arange(3.0, device=device)) for p in group])  # type: ignore[misc]
    for each in sums:
        assert each.device == device
        assert each.tolist() == [0.0, 2.0, 4.0]


# Where the learners of a group find each other, and which may.


def test_a_learner_beyond_loopback_stays_alone_unless_its_network_is_trusted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Membership("learner-0", "0.0.0.0").meeting_address() == ""
    assert Membership("learner-0", "127.0.0.1").meeting_address().startswith("127.0.0.1:")
    assert capsys.readouterr().err == ""
    trusted = Membership("learner-0", "0.0.0.0", insecure=True)
    assert trusted.meeting_address().startswith("0.0.0.0:")
    plain = "learners of a group talk to each other unencrypted and unauthenticated, at 0.0.0.0"
    said = capsys.readouterr().err
    assert said == f"juggler learner-0: {plain}, even with TLS: keep that network private\n"


def test_a_learner_with_tls_is_met_at_its_own_server_and_nowhere_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ring = RingAccess(RingServer(lambda _: None), "gpu1:5006", (), None)
    membership = Membership("learner-0", "0.0.0.0", ring=ring)
    assert membership.meeting_address() == "tls:gpu1:5006"
    assert "_meeting_point" not in vars(membership), "no store of torch listens"
    assert capsys.readouterr().err == ""


class _Learner:
    """Has a device, and its updates."""

    def __init__(self) -> None:
        self.device, self.updates = torch.device("cpu"), 0
        self.size = 0  # of its group

    def join(self, peers: Peers | None) -> int:
        assert peers is not None
        self.size = int(peers.sum(torch.ones(1)).item())
        return 0

    def leave(self) -> None:
        pass


def test_one_that_began_alone_meets_others_where_the_first_of_them_is_met() -> None:
    members = [Membership(f"learner-{index}", "127.0.0.1") for index in range(3)]
    group = training_pb2.Group(
        module_id="default",
        generation=2,
        members=[f"learner-{index}" for index in range(3)],
        meeting_points=["", members[1].meeting_address(), members[2].meeting_address()],
    )
    learners = [_Learner() for _ in members]
    with ThreadPoolExecutor(3) as pool:
        formed = pool.map(
            lambda member, learner: member.form(group, learner, lambda: False), members, learners
        )
    assert [each.peer_lost for each in formed] == ["", "", ""]
    assert [each.size for each in learners] == [3, 3, 3]


# Groups whose state takes longer to save, hash or restore than an operation of theirs may.


SPACES = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)


def learner_of(updates: int) -> Learner:
    make = partial(ActorCritic, *SPACES, {"hidden_sizes": [8]})
    learner = Learner(Impala(make, ImpalaConfig()), seed=updates)
    learner.updates = updates
    return learner


class Large:
    """A state of 32 MB, whose arrays are not copied."""

    def __init__(self, updates: int) -> None:
        self.updates, self.tree = updates, {"x": np.full(1 << 25, updates, np.uint8)}

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.tree, {"updates": self.updates}

    def restore(self, tree: Any, extras: Mapping[str, Any]) -> None:
        self.tree, self.updates = {"x": tree["x"].copy()}, extras["updates"]


def test_a_state_is_sent_a_chunk_at_a_time() -> None:
    """A replay may be most of the memory: neither side copies it."""
    group = [Large(5), Large(0)]
    tracemalloc.start()
    at_once([partial(take_over_newest, *each) for each in zip(group, meet(2), strict=True)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert group[1].updates == 5
    np.testing.assert_array_equal(group[1].tree["x"], group[0].tree["x"])
    assert peak < 2.5 * (1 << 25)


def test_an_error_of_one_of_them_is_not_hidden_and_keeps_nobody_waiting() -> None:
    first, second = meet(2)

    def fails() -> None:
        raise ValueError("not the state of this learner")

    def first_of_them() -> str:
        with pytest.raises(ValueError, match="not the state") as error:
            first.wait_for_all(fails)
        return str(error.value)

    found = at_once([first_of_them, lambda: second.wait_for_all(lambda: "done")])
    assert found == ["not the state of this learner", "done"]


def test_who_hears_nothing_of_another_one_has_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group = meet(2)
    monkeypatch.setattr(torch_peers, "COLLECTIVE_SECONDS", 0.5)
    with pytest.raises(PeerLost):
        group[1].wait_for_all(lambda: None)


def test_who_waits_for_another_one_makes_progress_and_who_is_waited_for_does_not() -> None:
    first, second = meet(2)
    waits, hung = Event(), Event()
    in_thread: list[int] = []

    def second_progresses() -> None:
        in_thread.append(get_ident())
        waits.set()

    first.progresses, second.progresses = hung.set, second_progresses

    def works() -> bool:
        assert waits.wait(30), "the other one would be taken for hung, too"
        return hung.is_set()

    def second_of_them() -> bool:
        second.wait_for_all(lambda: None)
        return in_thread == [get_ident()] * len(in_thread)

    found = at_once([lambda: first.wait_for_all(works), second_of_them])
    assert found == [False, True]


def test_a_state_of_many_chunks_is_sent_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    group, peers = [learner_of(5), learner_of(0)], meet(2)
    chunks, came = len(list(groups._chunks(group[0])[1])), [0, 0]

    def note(rank: int) -> None:
        came[rank] += 1

    for rank, each in enumerate(peers):
        monkeypatch.setattr(each, "progresses", partial(note, rank))
        monkeypatch.setattr(each, "wait_for_all", lambda work: work())
    at_once([partial(take_over_newest, *pair) for pair in zip(group, peers, strict=True)])
    assert came == [chunks, chunks]


# When learners sum by NCCL, and what becomes of one whose sums hang.


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


class Group:
    """Torch's group, with sums and `abort` under the test's control."""

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


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_peers, "time", SkippedTime())
    monkeypatch.setattr(torch_peers, "_NCCL_POLL_SECONDS", 0.02)


def made(group: Group, superseded: Callable[[], bool] = bool) -> NcclGroup:
    return NcclGroup(group, CPU, superseded)


def test_a_sum_is_there_when_the_device_has_made_it(device: FakeDevice) -> None:
    group = Group()
    together = made(group)
    together.connect()
    device.slow = True

    def finish() -> None:
        device.changes.wait_for(lambda: len(device.events) == 2)
        device.events[1].finish()

    threading.Thread(target=finish).start()
    assert together.sum(torch.ones(2)).tolist() == [2, 2]
    assert group.aborted == 0


@pytest.mark.usefixtures("no_pauses")
def test_a_sum_that_hangs_is_broken_off(device: FakeDevice) -> None:
    device.slow = True
    group = Group()
    with pytest.raises(PeerLost, match="NCCL could not sum: it takes more than 8 s"):
        made(group).sum(torch.ones(2))
    assert group.aborted == 1


@pytest.mark.usefixtures("no_pauses")
def test_nobody_waits_for_a_sum_once_there_is_another_group_to_form(device: FakeDevice) -> None:
    device.slow = True
    group = Group()
    looks = count()
    with pytest.raises(PeerLost, match="there is another group to form"):
        made(group, lambda: next(looks) > 20).sum(torch.ones(2))
    assert group.aborted == 1


def test_what_nccl_says_is_told(device: FakeDevice) -> None:
    class Broken(Group):
        def allreduce(self, tensors: list[torch.Tensor]) -> Group:
            raise RuntimeError("[1.cpp:7] NCCL error: remote process exited\nstack")

    group = Broken()
    with pytest.raises(PeerLost, match="could not sum: NCCL error: remote"):
        made(group).sum(torch.ones(2))
    assert group.aborted == 1
    with pytest.raises(PeerLost, match="could not connect: NCCL error"):
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


@pytest.mark.usefixtures("no_pauses")
def test_a_device_that_does_not_come_back_needs_a_new_process(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_peers, "_NCCL_END_SECONDS", 0.1)
    device.slow = True
    group, released = Group(), threading.Event()
    group.abort_does = lambda: released.wait(PATIENCE) and None
    with pytest.raises(NcclStuck, match=r"cannot be stopped on cpu.* new"):
        made(group).sum(torch.ones(2))
    released.set()


def test_a_device_that_is_broken_needs_a_new_process(device: FakeDevice) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    device.synchronize = broken  # type: ignore[method-assign]
    with pytest.raises(NcclStuck, match="unspecified launch failure"):
        made(Group()).end("the group has ended")


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
        together.end("the group has ended")
    assert torch.ones(2, device=CUDA).sum().item() == 2, "the device is as it was"
