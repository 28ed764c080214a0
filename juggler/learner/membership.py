"""A learner's place in its group: which generation it is in, and with whom."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from juggler.learner.learner import Learner
from juggler.learner.peers import MeetingPoint, PeerLost, Peers
from juggler.runtime.wire.v1 import training_pb2


class Membership:
    """Forms the groups that the driver asks for.

    Attributes:
        lost: why the group of the present generation cannot update; "" while it can.
    """

    def __init__(self, worker_id: str, host: str) -> None:
        """
        Args:
            worker_id: of this learner.
            host: by which other learners can reach this process.
        """
        self.lost = ""
        self._worker_id = worker_id
        self._host = host

    @cached_property
    def meeting_point(self) -> MeetingPoint:
        """Of a group whose first member this learner is."""
        return MeetingPoint(self._host)

    def form(
        self, group: training_pb2.Group, learner: Learner, superseded: Callable[[], bool]
    ) -> training_pb2.GroupFormed:
        """Meet the other members, and agree on one state.

        Args:
            group: who they are.
            learner: updates with them from here on.
            superseded: whether there is another group to form already.
        """
        self.lost = ""
        learner.leave()
        formed = training_pb2.GroupFormed(generation=group.generation)
        members = list(group.members)
        try:
            peers = None
            if len(members) > 1:
                rank = members.index(self._worker_id)
                peers = Peers(
                    group.meeting_point,
                    group.generation,
                    rank,
                    len(members),
                    self._host,
                    superseded,
                )
            formed.state_hash = learner.join(peers) % 2**64
        except PeerLost as error:
            self.lose(learner, str(error))
            formed.peer_lost = self.lost
        formed.update = learner.updates
        return formed

    def lose(self, learner: Learner, why: str) -> None:
        """Somebody of the group is gone: no updates until the next one."""
        self.lost = why
        learner.leave()
