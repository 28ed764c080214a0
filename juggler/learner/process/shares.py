"""Shares: which batches a learner makes an update of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from juggler.learner.data.batch_store import HeldBatch
from juggler.learner.group.membership import Membership
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch


class Share(NamedTuple):
    """A learner's part of an update."""

    batch_ids: list[int]
    episodes: Sequence[EpisodeBatch]  # views of those batches


class Shares:
    """Chooses the batches that are fresh enough for an update, and a stand-in for them where the
    others of a group cannot go on without this learner."""

    def __init__(self, module_id: str, learner: Learner, membership: Membership) -> None:
        """Args:
        module_id: of the module that the batches are of.
        learner: learns from them.
        membership: its group of learners.
        """
        self._module_id = module_id
        self._learner = learner
        self._membership = membership
        self._template: list[EpisodeBatch] = []  # one batch, once there is one

    def due(self, batches: list[HeldBatch]) -> Share | None:
        """The share of the update that is made now. None if no batch is fresh enough, or if the
        group is lost: then the update makes no weights."""
        fresh = self._fresh(batches, self._learner.updates)
        episodes = self._episodes(fresh)
        if self._learner.in_group:
            # The others cannot go on without this learner, even if it has no fresh batch.
            episodes = episodes or self._silenced(batches)
            self._template = episodes[:1]
        if not episodes or self._membership.lost:
            return None
        return Share([batch.batch_id for batch in fresh], episodes)

    def coming(self, batches: list[HeldBatch]) -> Share | None:
        """The share of the next update, if this one makes new weights. None if no batch will be
        fresh enough."""
        fresh = self._fresh(batches, self._learner.updates + 1)
        if not fresh:
            return None
        return Share([batch.batch_id for batch in fresh], self._episodes(fresh))

    def _fresh(self, batches: list[HeldBatch], update: int) -> list[HeldBatch]:
        """The batches that are not too old for an update that starts from these weights."""
        most = self._learner.config.max_staleness
        return [batch for batch in batches if batch.staleness(update) <= most]

    def _silenced(self, batches: list[HeldBatch]) -> list[EpisodeBatch]:
        """One batch of those given, else of an earlier update, without a live step; none if there
        was none yet."""
        any_episodes = self._episodes(batches[:1]) or self._template
        return [each.silenced() for each in any_episodes]

    def _episodes(self, batches: list[HeldBatch]) -> list[EpisodeBatch]:
        return [batch.modules[self._module_id] for batch in batches]
