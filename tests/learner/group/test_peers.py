"""Learners that look for each other, and lose each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.groups import at_once, join, meet, never, update

from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.group import torch_peers
from juggler.learner.group.peers import PeerLost
from juggler.learner.group.torch_peers import GlooPeers, MeetingPoint
from juggler.learner.learner import Learner
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]


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
    data = at_once(
        [lambda p=p: p.broadcast(b"news" if p.rank == 1 else None, 1, 4) for p in group]  # type: ignore[misc]
    )
    assert data == [b"news"] * 3


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
    with pytest.raises(
        PeerLost, match=r"the 2 learners did not meet at 127.0.0.1:.* have not come"
    ):
        GlooPeers(point.address, 1, 0, 2, "127.0.0.1", never)


def test_nobody_waits_once_there_is_another_group_to_form() -> None:
    point = MeetingPoint("127.0.0.1")
    started = time.monotonic()
    with pytest.raises(PeerLost):
        GlooPeers(point.address, 1, 0, 2, "127.0.0.1", lambda: time.monotonic() > started + 0.2)
    assert time.monotonic() - started < 6, "less than others wait"


def test_a_meeting_point_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_peers, "COLLECTIVE_SECONDS", 0.5)
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


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(EndpointError, match=r"the interface none0 of GLOO_SOCKET_IFNAME: "):
        GlooPeers("127.0.0.1:9", 1, 1, 2, "127.0.0.1", never)


def test_an_update_that_loses_a_peer_changes_nothing(make_batch: MakeBatch) -> None:
    first, second = make_learner(), make_learner()
    join([first, second])
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
    assert hashes[0] == hashes[1], "who was left behind takes over what the other has learned"
    assert second.updates == 1


def test_an_update_that_only_some_have_made_is_everybodys_in_the_next_group(
    make_batch: MakeBatch,
) -> None:
    group = [make_learner() for _ in range(3)]
    join(group)
    shards = [[make_batch(4, 8, seed=seed)] for seed in range(3)]
    update(group, shards)
    ahead = parameters(group[1])
    group[0].restore(*make_learner().save())  # as if its last reduction had failed
    join(group)
    for learner in group:
        assert torch.equal(parameters(learner), ahead)
        assert learner.updates == 1


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
    assert OnGpus.ended == ["the group is over"]


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
