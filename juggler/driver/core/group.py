"""The learners that update one module together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from juggler.driver.core.events import WorkerKey
from juggler.driver.core.ledger import OpenBatch


@dataclass(slots=True, eq=False)
class GroupMember:
    worker: WorkerKey
    open_batches: int = 0  # requested for it, held by it, or in its share of an update
    open_steps: int = 0  # in them
    held_steps: int = 0
    updating_steps: int = 0  # steps in its shares of updates
    held: deque[OpenBatch] = field(default_factory=deque)  # in order of arrival
    leaves: bool = False  # the learner leaves as soon as it can

    def opens(self, batch: OpenBatch) -> None:
        self.open_batches += 1
        self.open_steps += batch.steps

    def closes(self, batch: OpenBatch) -> None:
        self.open_batches -= 1
        self.open_steps -= batch.steps

    def hold(self, batch: OpenBatch) -> None:
        self.held.append(batch)
        self.held_steps += batch.steps

    def pop(self) -> OpenBatch:
        """Take the learner's oldest batch for an update."""
        batch = self.held.popleft()
        self.held_steps -= batch.steps
        self.updating_steps += batch.steps
        return batch

    def answers(self, share: list[OpenBatch]) -> None:
        """Close its share of an update."""
        for batch in share:
            self.closes(batch)
            self.updating_steps -= batch.steps


class Group:
    """Membership of the learners of one module, with a generation number.

    The number increases whenever the members change, or their weights are replaced.

    The first group forms when `size` learners have joined, or earlier by `begin_with_fewer`.
    Learners that join later are admitted when no update is in flight. A group that has lost its
    last member has lost its weights: the next learner brings weights from a checkpoint. So a
    leaving member works like any other until another member has its weights.
    """

    def __init__(self, size: int, generation: int) -> None:
        self.generation = generation
        self.members: dict[str, GroupMember] = {}  # by rank
        self.joiners: dict[str, GroupMember] = {}
        self._needed = size
        self._have_met = False  # the members of this generation

    @property
    def missing(self) -> int:
        """Number of learners that the first group still waits for."""
        return max(0, self._needed - len(self.joiners)) if self._needed > 1 else 0

    def begin_with_fewer(self) -> None:
        """Form the first group without waiting for all of its learners."""
        self._needed = 1

    def named(self, worker_id: str) -> GroupMember | None:
        """Return the learner with this id."""
        return self.members.get(worker_id) or self.joiners.get(worker_id)

    def find(self, worker: WorkerKey) -> GroupMember | None:
        """Return this incarnation of a learner, if it is still there."""
        learner = self.named(worker.worker_id)
        return learner if learner is not None and learner.worker == worker else None

    def join(self, worker: WorkerKey) -> None:
        """Add a waiting learner; `admit` makes it a member."""
        if self.find(worker) is None:
            self.joiners[worker.worker_id] = GroupMember(worker)

    def met(self, generation: int) -> None:
        """Note that the members of this generation have the same state."""
        self._have_met = self._have_met or generation == self.generation

    def release(self, learner: GroupMember) -> None:
        """Remove a waiting learner, or mark a member, which leaves later."""
        if self.joiners.pop(learner.worker.worker_id, None) is None:
            learner.leaves = True

    @property
    def staying(self) -> list[GroupMember]:
        """Members for which further steps are requested."""
        members = list(self.members.values())
        return [each for each in members if not each.leaves] or members

    @property
    def leaving(self) -> list[GroupMember]:
        """Members that only train on batches already requested."""
        found = [each for each in self.members.values() if each.leaves]
        return found if len(found) < len(self.members) else []

    def can_spare(self, worker_id: str) -> bool:
        """Return whether the group keeps its weights if this learner leaves."""
        return worker_id not in self.members or (self._have_met and bool(self.leaving))

    @property
    def done(self) -> list[GroupMember]:
        """Leaving members without open batches; staying members have their weights."""
        return [each for each in self.leaving if not each.open_steps] if self._have_met else []

    def remove_leaving(self) -> tuple[str, ...] | None:
        """Remove members that are done; return the rest by rank, or None."""
        done = self.done
        for learner in done:
            del self.members[learner.worker.worker_id]
        return self._form() if done else None

    @property
    def admissible(self) -> frozenset[str]:
        """Learners that `admit` would make members now."""
        return frozenset(self.joiners if len(self.joiners) >= self._needed else ())

    def admit(self) -> tuple[str, ...] | None:
        """Make all waiting learners members, and return all by rank, or None."""
        if not self.admissible:
            return None
        for worker_id in sorted(self.joiners, key=worker_order):
            self.members[worker_id] = self.joiners.pop(worker_id)
        return self._form()

    def leave(self, learner: GroupMember) -> tuple[str, ...] | None:
        """Remove a learner, and return the remaining members by rank.

        None: no member remains, or it was not a member yet.
        """
        worker_id = learner.worker.worker_id
        if self.joiners.pop(worker_id, None) is not None:
            return None
        del self.members[worker_id]
        return self._form() if self.members else None

    def renew(self, generation: int) -> tuple[str, ...] | None:
        """Start a new generation with the same members; None if already changed."""
        return self._form() if self.members and generation == self.generation else None

    def _form(self) -> tuple[str, ...]:
        self._needed = 1
        self._have_met = False
        self.generation += 1
        return tuple(self.members)


def worker_order(worker_id: str) -> tuple[str, int]:
    """Sort worker ids by role, then by number: envrunner-2 comes before envrunner-10."""
    role, _, index = worker_id.rpartition("-")
    return (role, int(index)) if index.isdecimal() else (worker_id, -1)
