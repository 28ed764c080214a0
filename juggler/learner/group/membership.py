"""Membership of one module's learner in its group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch

from juggler.learner.group.peers import PeerLost, Peers
from juggler.learner.group.ring_peers import RingAccess, RingPeers
from juggler.learner.group.torch_peers import GlooPeers, MeetingPoint
from juggler.runtime.actors.endpoints import is_loopback
from juggler.runtime.wire.v1 import training_pb2

#: Before the address of a learner that sums over encrypted streams.
_ENCRYPTED = "tls:"


class Joins(Protocol):
    """The part of a learner that its group needs."""

    device: torch.device
    updates: int

    def join(self, peers: Peers | None) -> int: ...

    def leave(self) -> None: ...


class Membership:
    """Forms groups with the other learners of a module when the driver asks for it.

    Attributes:
        lost: why the group of the present generation cannot update; "" while it can.
    """

    def __init__(
        self,
        worker_id: str,
        host: str,
        insecure: bool = False,
        ring: RingAccess | None = None,
        progresses: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            worker_id: of this learner.
            host: the address at which other learners can reach this process.
            insecure: whether the network between them is trusted.
            ring: how this learner sums over encrypted streams; None: over torch.distributed.
            progresses: called while a group forms and this learner does not hang.
        """
        self.lost = ""
        self._worker_id = worker_id
        self._host = host
        self._insecure = insecure
        self._ring = ring
        self._progresses = progresses

    def meeting_address(self) -> str:
        """Where others meet this learner. "" if others than the members could reach it, nothing is
        encrypted and `insecure` was not given: then this learner can only train alone."""
        if self._ring is not None:
            return f"{_ENCRYPTED}{self._ring.address}"
        return self._meeting_point.address if self._insecure or is_loopback(self._host) else ""

    @cached_property
    def _meeting_point(self) -> MeetingPoint:
        if not is_loopback(self._host):
            # torch.distributed has neither encryption nor a secret, whatever gRPC has.
            text = "learners of a group talk to each other unencrypted and unauthenticated, at"
            text += f" {self._host}, even with TLS: keep that network private"
            print(f"juggler {self._worker_id}: {text}", file=sys.stderr)
        return MeetingPoint(self._host)

    def form(
        self, group: training_pb2.Group, learner: Joins, superseded: Callable[[], bool]
    ) -> training_pb2.GroupFormed:
        """Meet the other members, and agree on one state.

        Args:
            group: names the members.
            learner: this learner, which makes its updates with them from now on.
            superseded: says whether the driver has asked for another group by now.
        """
        self.lost = ""
        learner.leave()
        formed = training_pb2.GroupFormed(module_id=group.module_id, generation=group.generation)
        peers: Peers | None = None
        try:
            if superseded():  # to hash a large state for nothing takes long
                raise PeerLost("there is another group to form")
            if len(group.members) > 1:
                peers = self._met(group, learner.device, superseded)
                peers.progresses = self._progresses
            formed.state_hash = learner.join(peers) % 2**64
        except PeerLost as error:
            if peers is not None:
                peers.close()
            self.lose(learner, str(error))
            formed.peer_lost = self.lost
        formed.update = learner.updates
        return formed

    def _met(
        self, group: training_pb2.Group, device: torch.device, superseded: Callable[[], bool]
    ) -> Peers:
        rank = list(group.members).index(self._worker_id)
        points = list(group.meeting_points)
        if self._ring is not None:
            addresses = [point.removeprefix(_ENCRYPTED) for point in points]
            name = f"{group.module_id}/{group.generation}"
            return RingPeers(self._ring, name, rank, addresses, superseded)
        # One that began alone has none.
        point = next(each for each in points if each)
        return GlooPeers(point, group.generation, rank, len(points), self._host, superseded, device)

    def lose(self, learner: Joins, why: str) -> None:
        """Leave the group because a member is gone: no updates until the next group."""
        self.lost = why
        learner.leave()
