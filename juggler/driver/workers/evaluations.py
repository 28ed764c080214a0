"""Evaluations beside the training, by a worker of their own."""

from __future__ import annotations

from juggler.driver.config import RunConfig
from juggler.driver.record.candidates import most_steps
from juggler.driver.record.metrics import Metrics
from juggler.driver.record.progress import Progress
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.connector_state import ConnectorState
from juggler.driver.workers.registry import WorkerRegistry
from juggler.envrunner.program import EVALUATOR
from juggler.runtime.wire.v1 import training_pb2


class Evaluations:
    """How well the newest weights play, every now and then.

    Attributes:
        under_way: somebody plays them.
    """

    def __init__(
        self,
        config: RunConfig,
        metrics: Metrics,
        registry: WorkerRegistry,
        commands: CommandSender,
        connectors: ConnectorState,
        progress: Progress,
    ) -> None:
        self.under_way = False
        self._episodes = config.driver.evaluation_episodes
        self._metrics = metrics
        self._registry = registry
        self._commands = commands
        self._connectors = connectors
        self._progress = progress

    def begin(self, update: int) -> None:
        """Ask for one, unless one is under way or there is nobody to ask.

        Args:
            update: that the weights have.
        """
        evaluators = self._registry.of_role(EVALUATOR)
        if evaluators and not self.under_way:
            self.under_way = True
            command = training_pb2.Evaluate(
                episodes=self._episodes,
                seed=self._registry.seed(evaluators[0], update),
                connector_state=self._connectors.everything(),
                most_steps=most_steps(self._metrics.lengths),
            )
            self._commands.send(evaluators[0], command)

    def answered(self, command: training_pb2.Evaluate, done: training_pb2.Evaluation) -> None:
        """Episodes were played."""
        self.under_way = False
        self._metrics.evaluation_return = sum(done.episode_returns) / len(done.episode_returns)
        cut = sum(length >= command.most_steps for length in done.episode_lengths)
        if cut and command.most_steps:
            self._progress.message(
                f"{cut} of {len(done.episode_lengths)} episodes of an evaluation had no end: each "
                f"counts as it was after {command.most_steps} steps. An environment needs a limit, "
                "such as max_episode_steps in env_kwargs",
                "warning",
            )
