"""A player of a run's module, with its weights and batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gymnasium import Space

from juggler.envrunner.datasets.sampled_episodes import SampledEpisodes
from juggler.envrunner.evaluation import load_tree
from juggler.envrunner.finiteness import NonFinite
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.learner_streams import LearnerStreams
from juggler.envrunner.rounds import Played, Recorded
from juggler.envrunner.setup import ActingSetup
from juggler.envrunner.stage import ActingParts, OwnCode
from juggler.gateway.episode_log import EpisodeLog, EpisodeWriter
from juggler.gateway.player import Player
from juggler.runtime.acting.actor import Actor, RandomActions
from juggler.runtime.connectors.building import EnvToModule
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


class ServedPlayer(Player):
    """Plays with a module of the run, trained or not.

    Args:
        module_id: of the module; `random` draws its actions.
        observation_space: of its agents.
        action_space: of its agents.
        setup: what the module is built from; None: of `random`.
        streams: to and from the learners of the module; None: it is not trained.
        seed: of its noise.
        rows: of a batch, one for each of its agents in each environment.
        steps: T.
        own_code: may be used in the setup.
        frozen: what it plays with if it is not trained.
        episodes: take the episodes that are recorded, if they are.

    Attributes:
        module_id: as given.
        streams: as given.
        most_rows: of a batch.
        has_weights: weights of a learner have come.

    Raises:
        ValueError: what it plays with is not what the setup says.
    """

    def __init__(
        self,
        module_id: str,
        observation_space: Space[Any],
        action_space: Space[Any],
        *,
        setup: ActingSetup | None,
        streams: LearnerStreams | None,
        seed: int,
        rows: int,
        steps: int,
        own_code: OwnCode,
        frozen: FrozenWeights,
        episodes: SampledEpisodes | None,
    ) -> None:
        spaces = observation_space, action_space
        self._build: Callable[[], ActingParts]
        self._parts: ActingParts
        if setup is None:
            policy = Actor(RandomActions(action_space), seed=seed)
            connectors, row_age = EnvToModule({}, {}, observation_space), 0
        else:
            self._build = partial(ActingParts.build, setup, *spaces, own_code)
            parts = self._parts = self._build()
            connectors, row_age = parts.connectors, setup.row_age
            policy = Actor(parts.module, 1, 0, seed, parts.module_to_env, connectors)
            if setup.digest:
                frozen.load(module_id, setup.digest, policy, connectors)
        super().__init__(*spaces, policy, connectors, steps, row_age)
        self.module_id, self.streams, self.most_rows = module_id, streams, rows
        self.has_weights = False
        self._writer = None if episodes is None else EpisodeWriter(episodes)
        if self._writer is not None:
            self.episode_log = EpisodeLog(policy, action_space, self._writer.add)

    def close(self) -> None:
        """Complete what was recorded."""
        if self._writer is not None:
            self._writer.close()

    def greedy_actor(self, tree: Tree) -> Actor:
        """An actor that plays a checkpoint in the same spaces.

        Args:
            tree: the part of the module.

        Raises:
            ValueError: it is of another module.
        """
        parts = self._build()
        actor = Actor(parts.module, 1, 0, 0, parts.module_to_env, parts.connectors)
        load_tree(self.module_id, tree, actor, parts.connectors)
        return actor

    @property
    def ready(self) -> training_pb2.Ready.Module:
        """What the driver is told of a trained module."""
        return self._parts.ready(self.module_id, self.most_rows, self.rows.steps)

    @property
    def complete_batches(self) -> int:
        """Batches whose rows are complete."""
        return len(self.rows.complete) // self.most_rows

    def fullness(self) -> tuple[int, int]:
        """Steps that are here for the next batch, and its size."""
        whole = self.most_rows * self.rows.steps
        complete = self.rows.columns["lengths"][self.rows.complete]
        filling = self.of["step"][self.of["row"] >= 0]
        return min(int(complete.sum() + filling.sum()), whole), whole

    def take_weights(self) -> None:
        """Act with the newest weights that have come."""
        weights = None if self.streams is None else self.streams.newest
        if weights is None:
            return
        if not self.has_weights or weights.version > self.version:
            tree: Any = weights.tree
            self.load(self._parts.as_here(tree[self.module_id]), weights.version)
            self.has_weights = True

    def result(self) -> Recorded | NonFinite:
        """The batch of a round: the oldest complete rows."""
        self.drop_stale()
        return self.take_batch(self.most_rows)

    def played(self) -> Played:
        """What an untrained module has done since the last call."""
        return Played(self.new("steps"), *self.take_ended())
