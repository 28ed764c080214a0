"""The evaluator, and evaluations beside the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from juggler.driver.config import RunConfig
from juggler.driver.record.candidates import most_steps
from juggler.driver.record.metrics import Metrics
from juggler.driver.record.progress import Progress
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.connector_state import ConnectorState, everything
from juggler.driver.workers.registry import WorkerRegistry
from juggler.envrunner.agent_returns import from_messages
from juggler.envrunner.program import EVALUATOR
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.wire.v1 import training_pb2


class Evaluator:
    """The worker that plays whole episodes."""

    def __init__(self, registry: WorkerRegistry, commands: CommandSender, metrics: Metrics) -> None:
        self._registry = registry
        self._commands = commands
        self._metrics = metrics

    def ask(self, episodes: int, update: int, **what: Any) -> Worker | None:
        """Have it play.

        Args:
            episodes: how many.
            update: of the weights that it is to play.
            what: more fields of an `Evaluate`.

        Returns:
            Who plays; None: there is no evaluator.
        """
        evaluators = self._registry.of_role(EVALUATOR)
        if not evaluators:
            return None
        command = training_pb2.Evaluate(
            episodes=episodes,
            seed=self._registry.seed(evaluators[0], update),
            most_steps=most_steps(self._metrics.lengths),
            **what,
        )
        self._commands.send(evaluators[0], command)
        return evaluators[0]


class Evaluations:
    """How well the newest weights play, every now and then."""

    def __init__(
        self,
        config: RunConfig,
        evaluator: Evaluator,
        connectors: Mapping[str, ConnectorState],
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        self._episodes = config.driver.evaluation_episodes
        self._evaluator = evaluator
        self._connectors = connectors
        self._metrics = metrics
        self._progress = progress
        self._player: Worker | None = None

    @property
    def under_way(self) -> bool:
        """Somebody plays the newest weights."""
        return self._player is not None

    def begin(self, update: int) -> None:
        """Ask for one, unless one is under way or there is nobody to ask.

        Args:
            update: that the weights have.
        """
        if not self.under_way:
            learned = everything(self._connectors)
            self._player = self._evaluator.ask(self._episodes, update, connector_state=learned)

    def left(self) -> None:
        """The evaluator is gone, or could not play."""
        self._player = None

    def answered(self, command: training_pb2.Evaluate, done: training_pb2.Evaluation) -> None:
        """Episodes were played."""
        self._player = None
        self._metrics.evaluated(done.episode_returns, from_messages(done.agent_returns))
        cut = sum(length >= command.most_steps for length in done.episode_lengths)
        if cut and command.most_steps:
            self._progress.message(
                f"{cut} of {len(done.episode_lengths)} episodes of an evaluation had no end: each "
                f"counts as it was after {command.most_steps} steps. An environment needs a limit, "
                "such as max_episode_steps = 1000",
                "warning",
            )
