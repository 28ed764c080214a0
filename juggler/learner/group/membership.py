"""A module's place in its group of learners: which generation it is in, and with whom."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch

from juggler.learner.group.peers import MeetingPoint, PeerLost, Peers
from juggler.runtime.actors.endpoints import is_loopback
from juggler.runtime.wire.v1 import training_pb2


class Joins(Protocol):
    """A learner, as far as its group is concerned."""

    device: torch.device
    updates: int

    def join(self, peers: Peers | None) -> int: ...

    def leave(self) -> None: ...


class Membership:
    """Forms the groups of one module's learners that the driver asks for.

    Attributes:
        lost: why the group of the present generation cannot update; "" while it can.
    """

    def __init__(self, worker_id: str, host: str, insecure: bool = False) -> None:
        """
        Args:
            worker_id: of this learner.
            host: by which other learners can reach this process.
            insecure: the network between them is trusted.
        """
        self.lost = ""
        self._worker_id = worker_id
        self._host = host
        self._insecure = insecure

    def meeting_address(self) -> str:
        """Where a group forms whose first member this learner is; "" where others than its members
        could reach that, and nobody said that they may: this learner can only be alone then."""
        return self._meeting_point.address if self._insecure or is_loopback(self._host) else ""

    @cached_property
    def _meeting_point(self) -> MeetingPoint:
        if not is_loopback(self._host):
            # torch.distributed has neither encryption nor a secret, whatever gRPC has.
            text = "learners of a group talk to each other unencrypted and unauthenticated, at"
            text += f" {self._host}, with TLS too: keep that private"
            print(f"juggler {self._worker_id}: {text}", file=sys.stderr)
        return MeetingPoint(self._host)

    def form(
        self, group: training_pb2.Group, learner: Joins, superseded: Callable[[], bool]
    ) -> training_pb2.GroupFormed:
        """Meet the other members, and agree on one state.

        Args:
            group: who they are.
            learner: updates with them from here on.
            superseded: whether there is another group to form already.
        """
        self.lost = ""
        learner.leave()
        formed = training_pb2.GroupFormed(module_id=group.module_id, generation=group.generation)
        members = list(group.members)
        peers = None
        try:
            if len(members) > 1:
                rank = members.index(self._worker_id)
                peers = Peers(
                    group.meeting_point,
                    group.generation,
                    rank,
                    len(members),
                    self._host,
                    superseded,
                    learner.device,
                )
            formed.state_hash = learner.join(peers) % 2**64
        except PeerLost as error:
            if peers is not None:
                peers.close()
            self.lose(learner, str(error))
            formed.peer_lost = self.lost
        formed.update = learner.updates
        return formed

    def lose(self, learner: Joins, why: str) -> None:
        """Somebody of the group is gone: no updates until the next one."""
        self.lost = why
        learner.leave()
