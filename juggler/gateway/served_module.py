"""One module that a gateway acts with: its weights, its player and its batches."""

from __future__ import annotations

import time
from typing import Any

from gymnasium import Space

from juggler.envrunner.datasets.sampled_episodes import SampledEpisodes
from juggler.envrunner.deliveries import receipt_for
from juggler.envrunner.finiteness import NonFinite, check_finite
from juggler.envrunner.learner_streams import FIRST_WEIGHTS_SECONDS, LearnerStreams
from juggler.envrunner.paced.rows import oldest_version
from juggler.envrunner.setup import ActingSetup
from juggler.envrunner.stage import ActingParts, OwnCode
from juggler.gateway.episode_log import EpisodeLog
from juggler.gateway.episode_writer import EpisodeWriter
from juggler.gateway.player import Player
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.mergeable_state import from_bytes, to_bytes
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2


class ServedModule:
    """
    Args:
        streams: to and from the learners of the module.
        setup: what the module is built from.
        seed: of its noise.

    Attributes:
        streams: as given.
        player: acts for its agents; None: no simulator has told their spaces.
        rows: of a batch, one for each of its agents in each environment.
        ready: what the driver is told of it, once it has a player.
    """

    def __init__(self, streams: LearnerStreams, setup: ActingSetup, seed: int) -> None:
        self.streams, self._setup, self._seed = streams, setup, seed
        self.player: Player | None = None
        self.rows = 0
        self.ready: training_pb2.Ready.Module
        self._has_weights = False
        self._parts: ActingParts
        self._writer: EpisodeWriter | None = None

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
        """
        parts = ActingParts.build(self._setup, observation_space, action_space, own_code)
        self._parts = parts
        policy = Actor(parts.module, 1, 0, self._seed, parts.module_to_env, parts.connectors)
        self.player = Player(
            observation_space,
            action_space,
            policy,
            parts.connectors,
            steps,
            self._setup.row_age,
        )
        if episodes is not None:
            self._writer = EpisodeWriter(episodes)
            self.player.episode_log = EpisodeLog(
                self.player.layout, policy, action_space, self._writer.add
            )
        self.rows = rows
        self.ready = parts.ready(self.streams.module_id, rows, steps)
        return self.player

    def close(self) -> None:
        """Let go of the learners, and complete what was recorded."""
        try:
            self.streams.close()
        finally:
            if self._writer is not None:
                self._writer.close()

    @property
    def complete(self) -> int:
        """Rows that are ready for a batch."""
        return 0 if self.player is None else len(self.player.environments.rows.complete)

    def fullness(self) -> tuple[int, int]:
        """Steps that are here for the next batch, and those of a whole one."""
        if self.player is None:
            return 0, 0
        environments = self.player.environments
        whole = self.rows * environments.rows.steps
        complete = environments.rows.columns["lengths"][environments.rows.complete]
        filling = environments.of["step"][environments.of["row"] >= 0]
        return min(int(complete.sum() + filling.sum()), whole), whole

    def take_weights(self) -> None:
        """Act with the newest weights that have come."""
        weights, player = self.streams.newest, self.player
        if player is None or weights is None:
            return
        if not self._has_weights or weights.version > player.version:
            tree: Any = weights.tree
            player.use(self._parts.as_here(tree[self.streams.module_id]), weights.version)
            self._has_weights = True

    def take_notes(self) -> list[training_pb2.Note]:
        """What is to be said of how the module acts, each once."""
        return [] if self.player is None else self.player.take_notes()

    def can_begin(self, request: training_pb2.SampleRequest, since: float) -> bool:
        """Whether the weights of a request are here, or its learner is gone.

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
            self.player.seed(seed)

    def hand_over(
        self, request: training_pb2.SampleRequest
    ) -> tuple[training_pb2.Receipt, EpisodeBatch | None, NonFinite | None]:
        """The receipt for a request, its batch, if a row is complete, and why that is lost.

        Args:
            request: for a batch.
        """
        player = self.player
        assert player is not None
        receipt = receipt_for(request)
        receipt.version.CopyFrom(player.version.message())
        receipt.stale_steps = player.take_stale()
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
