"""Where the learners of a group find each other, and who may."""

from __future__ import annotations

import pytest

from juggler.learner.group.membership import Membership
from juggler.learner.group.ring_peers import RingAccess
from juggler.learner.group.ring_server import RingServer


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


def test_a_group_on_loopback_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert Membership("learner-0", "127.0.0.1").meeting_address().startswith("127.0.0.1:")
    assert capsys.readouterr().err == ""
