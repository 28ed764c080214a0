"""A module of a gateway, with its weights, player and batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gymnasium import Space

from juggler.envrunner.datasets.sampled_episodes import SampledEpisodes
from juggler.envrunner.deliveries import receipt_for
from juggler.envrunner.evaluation import load_tree
from juggler.envrunner.finiteness import NonFinite, check_finite
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.learner_streams import FIRST_WEIGHTS_SECONDS, LearnerStreams
from juggler.envrunner.paced.rows import oldest_version
from juggler.envrunner.rounds import Played
from juggler.envrunner.setup import ActingSetup
from juggler.envrunner.stage import ActingParts, OwnCode
from juggler.gateway.episode_log import EpisodeLog, EpisodeWriter
from juggler.gateway.player import Player
from juggler.runtime.acting.actor import Actor, RandomActions
from juggler.runtime.connectors.building import EnvToModule
from juggler.runtime.connectors.mergeable_state import from_bytes, to_bytes
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


class ServedModule:
    """A module of a gateway, trained or not.

    Args:
        module_id: of the module; `random` draws its actions.
        streams: to and from the learners of the module; None: it is not trained.
        setup: what the module is built from; None: of `random`.
        seed: of its noise.
        frozen: what it plays with if it is not trained.

    Attributes:
        module_id: as given.
        player: acts for its agents; None: no simulator has told their spaces.
        rows: of a batch, one for each of its agents in each environment.
    """

    def __init__(
        self,
        module_id: str,
        streams: LearnerStreams | None,
        setup: ActingSetup | None,
        seed: int,
        frozen: FrozenWeights,
    ) -> None:
        self.module_id, self._streams, self._setup = module_id, streams, setup
        self._seed, self._frozen = seed, frozen
        self.player: Player | None = None
        self.rows = 0
        self._has_weights = False
        self._parts: ActingParts
        self._build: Callable[[], ActingParts]
        self._greedy: Actor | None = None
        self._writer: EpisodeWriter | None = None

    @property
    def is_trained(self) -> bool:
        return self._streams is not None

    @property
    def streams(self) -> LearnerStreams:
        """To and from the learners of a module that is trained."""
        assert self._streams is not None
        return self._streams

    def prepare(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        rows: int,
        steps: int,
        own_code: OwnCode,
        episodes: SampledEpisodes | None = None,
    ) -> Player:
        """Make the player.

        Args:
            observation_space: of its agents.
            action_space: of its agents.
            rows: of a batch.
            steps: T.
            own_code: may be used in the setup.
            episodes: take the episodes that are recorded, if they are.

        Raises:
            ValueError: what it plays with is not what the setup says.
        """
        spaces = observation_space, action_space
        if self._setup is None:
            policy = Actor(RandomActions(action_space), seed=self._seed)
            connectors, row_age = EnvToModule({}, {}, observation_space), 0
        else:
            self._build = partial(ActingParts.build, self._setup, *spaces, own_code)
            parts = self._parts = self._build()
            connectors, row_age = parts.connectors, self._setup.row_age
            policy = Actor(parts.module, 1, 0, self._seed, parts.module_to_env, connectors)
            if self._setup.digest:
                self._frozen.load(self.module_id, self._setup.digest, policy, connectors)
        self.player = Player(*spaces, policy, connectors, steps, row_age)
        if episodes is not None:
            self._writer = EpisodeWriter(episodes)
            self.player.episode_log = EpisodeLog(policy, action_space, self._writer.add)
        self.rows = rows
        return self.player

    def greedy_actor(self, tree: Tree) -> Actor:
        """An actor that plays a checkpoint in the same spaces.

        Args:
            tree: the part of the module.

        Raises:
            ValueError: it is of another module.
        """
        if self._greedy is None:
            parts = self._build()
            self._greedy = Actor(parts.module, 1, 0, 0, parts.module_to_env, parts.connectors)
        assert self._greedy.connectors is not None
        load_tree(self.module_id, tree, self._greedy, self._greedy.connectors)
        self._greedy.forget()
        return self._greedy

    def close(self) -> None:
        """Let go of the learners, and complete what was recorded."""
        try:
            if self._streams is not None:
                self._streams.close()
        finally:
            if self._writer is not None:
                self._writer.close()

    @property
    def ready(self) -> training_pb2.Ready.Module:
        """What the driver is told of a trained module with a player."""
        assert self.player is not None
        return self._parts.ready(self.module_id, self.rows, self.player.rows.steps)

    @property
    def complete(self) -> int:
        """Rows that are ready for a batch."""
        return 0 if self.player is None else len(self.player.rows.complete)

    def fullness(self) -> tuple[int, int]:
        """Steps that are here for the next batch, and its size."""
        if self.player is None:
            return 0, 0
        environments = self.player
        whole = self.rows * environments.rows.steps
        complete = environments.rows.columns["lengths"][environments.rows.complete]
        filling = environments.of["step"][environments.of["row"] >= 0]
        return min(int(complete.sum() + filling.sum()), whole), whole

    def take_weights(self) -> None:
        """Act with the newest weights that have come."""
        weights = None if self._streams is None else self._streams.newest
        player = self.player
        if player is None or weights is None:
            return
        if not self._has_weights or weights.version > player.version:
            tree: Any = weights.tree
            player.load(self._parts.as_here(tree[self.module_id]), weights.version)
            self._has_weights = True

    def take_played(self) -> Played:
        """What an untrained module has done since the last call."""
        if self.player is None:
            return Played()
        steps, ended = self.player.new("steps"), self.player.take_ended()
        returns, lengths = [each[0] for each in ended], [each[1] for each in ended]
        return Played(steps, returns, lengths)

    def take_notes(self) -> list[training_pb2.Note]:
        """What is to be said of how the module acts, each once."""
        return [] if self.player is None else self.player.take_notes()

    def can_begin(self, request: training_pb2.SampleRequest, since: float) -> bool:
        """Whether a request has its weights, or no learner.

        Args:
            request: for a batch.
            since: when it came, in seconds of `time.monotonic`.

        Raises:
            LearnerOutOfReach: no weights came for long.
        """
        streams, player = self.streams, self.player
        if player is None:
            return False
        if not streams.subscribed or streams.sender(request.learner) is None:
            return True
        if not self._has_weights and time.monotonic() - since > FIRST_WEIGHTS_SECONDS:
            raise streams.out_of_reach(TimeoutError("no weights came from the learner."))
        return self._has_weights and player.version >= Version.of(request.at_least)

    def begin(self, request: training_pb2.SampleRequest, seed: int | None) -> None:
        """Begin to record for a request.

        Args:
            request: for a batch.
            seed: of the noise from now on; None: it goes on.
        """
        assert self.player is not None
        if request.connector_state:
            self.player.learn_from_others(from_bytes(request.connector_state))
        if seed is not None:
            self.player.policy.seed(seed)

    def hand_over(
        self, request: training_pb2.SampleRequest
    ) -> tuple[training_pb2.Receipt, EpisodeBatch | None, NonFinite | None]:
        """A receipt, a batch if a row is complete, or its error.

        Args:
            request: for a batch.
        """
        player = self.player
        assert player is not None
        receipt = receipt_for(request)
        receipt.version.CopyFrom(player.version.message())
        player.drop_stale()
        receipt.stale_steps = player.new("steps_stale")
        rows = min(self.rows, self.complete)
        if not rows:
            _tell(receipt, player.take_ended())
            return receipt, None, None
        batch, ended, delta = player.batch(rows)
        receipt.live_steps = batch.live_steps
        receipt.version.CopyFrom(oldest_version(batch).message())
        _tell(receipt, ended)
        try:
            check_finite(batch)
        except NonFinite as error:
            return receipt, None, error
        if delta:
            receipt.connector_delta = to_bytes(delta)
        return receipt, batch, None


def _tell(receipt: training_pb2.Receipt, ended: list[tuple[float, int]]) -> None:
    receipt.episode_returns.extend(episode[0] for episode in ended)
    receipt.episode_lengths.extend(episode[1] for episode in ended)
