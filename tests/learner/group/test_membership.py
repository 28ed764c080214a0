"""Where the learners of a group find each other, and who may."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from juggler.learner.group.membership import Membership
from juggler.learner.group.peers import Peers
from juggler.learner.group.ring_peers import RingAccess, RingServer
from juggler.runtime.wire.v1 import training_pb2


def test_a_learner_beyond_loopback_stays_alone_unless_its_network_is_trusted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Membership("learner-0", "0.0.0.0").meeting_address() == ""
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


def test_a_group_on_loopback_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert Membership("learner-0", "127.0.0.1").meeting_address().startswith("127.0.0.1:")
    assert capsys.readouterr().err == ""
