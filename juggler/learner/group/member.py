"""GroupMember: the part of a learner that makes updates together with other learners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from juggler.learner.core.learner_core import Aux, Grads, LearnerCore
from juggler.learner.data.sources import DataSource
from juggler.learner.group.peers import Peers
from juggler.learner.group.reduction import mean_over_learners
from juggler.learner.group.state_sync import state_hash, take_over_newest
from juggler.runtime.wire.trees import Tree


class GroupMember(ABC):
    """A learner, alone or in a group. It is the `Seam` that its core sends gradients and sums
    through."""

    core: LearnerCore[Any]
    """The algorithm."""

    state: Any
    """Of the core."""

    updates: int
    """Made so far."""

    progresses: Callable[[], None] = staticmethod(lambda: None)
    """Called after each part of an update: one that has many takes long, and does not hang."""

    _data: DataSource
    """What it learns from, and when."""

    _peers: Peers | None = None

    @property
    def in_group(self) -> bool:
        """Whether updates are made together with other learners."""
        return self._peers is not None

    def after_gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        """For a subclass: gradients of all learners together, before they are clipped and a step of
        the optimizer is made of them -> those to use instead."""
        return grads, aux

    def why_alone(self) -> str:
        """Why no update can be made together with other learners; "": it can."""
        if not self.core.trains_in_groups:
            return f"{self.core.name} cannot train in a group of learners"
        return self._data.why_alone()

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        """As `Seam`."""
        self.progresses()
        if self._peers is not None:
            grads, aux = mean_over_learners(grads, aux, self._peers.sum)
        return self.after_gradients(grads, aux)

    def sums(self, x: Tensor) -> Tensor:
        """As `Seam`."""
        return x if self._peers is None else self._peers.sum(x)

    def join(self, peers: Peers | None) -> int:
        """From here on, make every update together with other learners, or alone again (None).

        All go on from the state of the one with most updates, and without samples that were to be
        used again. Each update is then made by all of them, on samples of their own, as one learner
        would make it on all of these samples. If an update fails, it fails at all of them, or some
        are one update ahead; then the next `join` gives everybody the newest state.

        Returns:
            A hash of the state, the same at all of them.

        Raises:
            PeerLost: somebody is gone; this learner is as it was, or has taken over a state.
            ValueError: it cannot be one of a group, as `why_alone` says.
        """
        self.forget()
        self.leave()
        if peers is None:
            found, rank = state_hash(self), 0
        elif why := self.why_alone():
            raise ValueError(why)
        else:
            take_over_newest(self, peers)
            found, rank = peers.wait_for_all(lambda: state_hash(self)), peers.rank
        self._peers = peers
        self.draw_apart(rank)
        return found

    def leave(self) -> None:
        """Make no update with the others any more: one of them is lost."""
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close()

    @abstractmethod
    def save(self) -> tuple[dict[str, Tree], dict[str, Any]]:
        """All that `restore` needs: arrays by name, and what of the state JSON can hold."""

    @abstractmethod
    def restore(self, tree: Tree, extras: Mapping[str, Any]) -> None:
        """Go on from where `save` was called."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of what `save` does not save."""

    @abstractmethod
    def draw_apart(self, rank: int) -> None:
        """Draw other kept samples from now on than learners of other ranks, which have the same."""
