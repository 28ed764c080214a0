"""The evaluator, and evaluations beside the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.agents_config import listed
from juggler.driver.callbacks import Callbacks, Evaluation
from juggler.driver.checkpoint.best import BestCheckpoint
from juggler.driver.checkpoint.checkpointing import Checkpointing
from juggler.driver.checkpoint.snapshots import SnapshotWriter, SnapshotWritten
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.record.candidates import most_steps
from juggler.driver.record.metrics import Metrics
from juggler.driver.record.progress import Progress
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.connector_state import ConnectorState, everything
from juggler.driver.workers.registry import WorkerRegistry
from juggler.envrunner.agent_returns import from_messages
from juggler.envrunner.program import EVALUATOR
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.checkpoints.checkpoint import EVALUATED
from juggler.runtime.wire.v1 import training_pb2


class Evaluator:
    """The worker that plays whole episodes."""

    def __init__(self, registry: WorkerRegistry, commands: CommandSender, metrics: Metrics) -> None:
        self._registry = registry
        self._commands = commands
        self._metrics = metrics

    @property
    def there(self) -> bool:
        """Somebody can be asked."""
        return bool(self._registry.of_role(EVALUATOR))

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


@dataclass(slots=True)
class _Playing:
    """What an evaluator plays: where it lies, if it is a checkpoint, and what it was trained on."""

    player: Worker
    path: Path | None
    update: int
    steps: int


class Evaluations:
    """How well the weights play, every now and then.

    A checkpoint is written for each evaluation, and the evaluator plays that: so that the best one
    can be kept. Meanwhile it lies aside. Those who play a league change while it goes on, so that
    evaluations of one play the newest weights, and none is kept.

    Attributes:
        best: the checkpoint of the best evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        evaluator: Evaluator,
        core: DriverCore,
        connectors: Mapping[str, ConnectorState],
        metrics: Metrics,
        checkpointing: Checkpointing,
        snapshots: SnapshotWriter,
        best: BestCheckpoint,
        callbacks: Callbacks,
        progress: Progress,
    ) -> None:
        self.best = best
        self._episodes = config.driver.evaluation_episodes
        self._keeps_best = not config.agents.league
        self._evaluator = evaluator
        self._core = core
        self._connectors = connectors
        self._metrics = metrics
        self._checkpointing = checkpointing
        self._snapshots = snapshots
        self._callbacks = callbacks
        self._progress = progress
        self._wanted = False
        self._told = False  # that one waits
        self._playing: _Playing | None = None

    @property
    def under_way(self) -> bool:
        """Somebody plays."""
        return self._playing is not None

    def want(self) -> None:
        """One is due: the next `begin` that can asks for it.

        People are told, once, if the one before still waits because a module has no learner.
        """
        missing = [each.module_id for each in self._core.in_checkpoints() if not each.members]
        if self._wanted and missing and not self.under_way and not self._told:
            self._told = True
            text = (
                f"there are no evaluations while these modules have no learner: {listed(missing)}"
            )
            self._progress.message(text, "warning")
        self._wanted = True

    def begin(self) -> None:
        """Begin with the one that is due, unless another one is under way or a checkpoint is on its
        way. Without an evaluator there is none; one waits for weights to play."""
        if not self._wanted or self.under_way:
            return
        if not self._evaluator.there:
            self._wanted = False
        elif self._keeps_best:
            self._checkpointing.begin(EVALUATED)
        elif self._core.members:
            self._play(None, self._core.updates, self._core.trained)

    def written(self, event: SnapshotWritten) -> None:
        """A state is on the disk, or it is not: perhaps one to play."""
        if event.aside != EVALUATED:
            return
        if event.path is None or not self._wanted:
            self._wanted = False
            self._let_go()
        else:
            self._play(event.path, event.update, event.steps)

    def left(self, worker: Worker) -> None:
        """An evaluator is gone, or could not play."""
        if self._playing is not None and self._playing.player is worker:
            self._let_go()

    def give_up(self) -> None:
        """The run is over."""
        self._wanted = False
        self._let_go()

    def is_of_it(self, command: training_pb2.Evaluate) -> bool:
        """Whether such a command is for an evaluation, and not to confirm that a run is solved."""
        return not command.checkpoint or Path(command.checkpoint).parent.name == EVALUATED

    def answered(self, command: training_pb2.Evaluate, done: training_pb2.Evaluation) -> None:
        """Episodes were played."""
        playing = self._playing
        if playing is None:
            return  # it was given up
        returns, agent_returns = list(done.episode_returns), from_messages(done.agent_returns)
        self._metrics.evaluated(returns, agent_returns)
        trained = {"update": playing.update, "env_steps_trained": playing.steps}
        is_best = playing.path is not None and self.best.is_better(returns)
        if is_best and playing.path and (problem := self.best.keep(playing.path, returns, trained)):
            self._progress.message(problem, "error")
            is_best = False
        self._callbacks.evaluated(
            Evaluation(
                returns, list(done.episode_lengths), agent_returns, **trained, is_best=is_best
            )
        )
        self._let_go()
        cut = sum(length >= command.most_steps for length in done.episode_lengths)
        if cut and command.most_steps:
            self._progress.message(
                f"{cut} of {len(done.episode_lengths)} episodes of an evaluation had no end: each "
                f"counts as it was after {command.most_steps} steps. An environment needs a limit, "
                "such as max_episode_steps = 1000",
                "warning",
            )

    def _play(self, path: Path | None, update: int, steps: int) -> None:
        self._wanted = self._told = False
        learned = everything(self._connectors)
        what = {"checkpoint": str(path.resolve())} if path else {"connector_state": learned}
        player = self._evaluator.ask(self._episodes, update, **what)
        if player is None:
            self._let_go()
        else:
            self._playing = _Playing(player, path, update, steps)

    def _let_go(self) -> None:
        self._playing = None
        if self._keeps_best:
            self._snapshots.let_go(EVALUATED)
