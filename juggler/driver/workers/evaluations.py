"""The evaluators, and evaluations beside the training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from juggler.driver.callbacks import Callbacks, Evaluation
from juggler.driver.checkpoint.best import BestCheckpoint
from juggler.driver.checkpoint.checkpointing import Checkpointing
from juggler.driver.checkpoint.restoring import restores
from juggler.driver.checkpoint.snapshots import SnapshotWriter, SnapshotWritten
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.record.metrics import Metrics
from juggler.driver.record.progress import Progress
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.connector_state import ConnectorState, everything
from juggler.driver.workers.frozen_parts import FrozenParts
from juggler.driver.workers.registry import WorkerRegistry
from juggler.envrunner.agent_returns import AgentReturns, from_messages
from juggler.envrunner.program import EVALUATOR
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.checkpoints.checkpoint import EVALUATED
from juggler.runtime.episodes.version import Version
from juggler.runtime.nearest import listed
from juggler.runtime.wire.v1 import training_pb2

#: In the directory of a run.
VIDEOS: Final = "videos"

#: An episode may take _MORE_STEPS times the longest training episode, which counts as at least
#: _FEW_STEPS.
_MORE_STEPS, _FEW_STEPS = 10, 1000


class Evaluators:
    """The workers that play whole episodes.

    Args:
        registry: who is here.
        commands: sends them what to play.
        parts: sends what a checkpoint plays with to those that dial in.
        metrics: of the run.
        only_local: they are processes of this host, which read checkpoints.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        commands: CommandSender,
        parts: FrozenParts,
        metrics: Metrics,
        *,
        only_local: bool,
    ) -> None:
        self.only_local = only_local
        self._registry = registry
        self._commands = commands
        self._parts = parts
        self._metrics = metrics

    @property
    def there(self) -> bool:
        """Somebody can be asked."""
        return bool(self._registry.of_role(EVALUATOR))

    def why_nobody_comes(self) -> str:
        """Why nobody is to be expected who plays; "": somebody is here, or is started."""
        return "" if self.only_local or self.there else "no `juggler evaluator` is here"

    def ask_one(self, episodes: int, cut: SnapshotWritten, **what: Any) -> Worker | None:
        """Have one of them play.

        Args:
            episodes: how many.
            cut: the checkpoint that it is to play.
            what: more fields of an `Evaluate`.

        Returns:
            Who plays; None: there is no evaluator.
        """
        evaluators = self._registry.of_role(EVALUATOR)
        if not evaluators:
            return None
        self._send(evaluators[0], episodes, cut.update, cut, what)
        return evaluators[0]

    def ask_all(
        self, episodes: int, update: int, cut: SnapshotWritten | None, video: str, **what: Any
    ) -> dict[Worker, training_pb2.Evaluate]:
        """Have each of them play its share of the episodes.

        Args:
            episodes: as in `ask_one`.
            update: of the weights that they are to play.
            cut: the checkpoint with these; None: they play the newest weights.
            video: where the first one records one more episode; "": nowhere.
            what: as in `ask_one`.

        Returns:
            The commands, by who plays; {}: there is no evaluator.
        """
        evaluators = self._registry.of_role(EVALUATOR)[:episodes]
        share, more = divmod(episodes, len(evaluators) or 1)
        return {
            each: self._send(
                each,
                share + (place < more),
                update,
                cut,
                {**what, "video": "" if place else video},
            )
            for place, each in enumerate(evaluators)
        }

    def _send(
        self,
        evaluator: Worker,
        episodes: int,
        update: int,
        cut: SnapshotWritten | None,
        what: Mapping[str, Any],
    ) -> training_pb2.Evaluate:
        command = training_pb2.Evaluate(
            episodes=episodes,
            seed=self._registry.seed(evaluator, update),
            most_steps=most_steps(self._metrics.lengths),
            checkpoint="" if cut is None else cut.place,
            **what,
        )
        if cut is None or self.only_local:
            self._commands.send(evaluator, command)
        else:
            command.version.CopyFrom(Version(cut.generation, cut.update).message())
            parts = (restores(module_id, tree, {}) for module_id, tree in cut.playing.items())
            messages = chain(chain.from_iterable(parts), [command])
            self._parts.append(evaluator, messages, self._commands.send)
        return command


@dataclass(slots=True)
class _Playing:
    """What evaluators play.

    Attributes:
        waits_for: who has yet to answer, with the command.
        path: of the checkpoint; None: the newest weights.
        update: that it has.
        steps: that it was trained on.
        returns: what was played so far.
        lengths: likewise.
        agent_returns: likewise.
        cut: how many of these episodes had no end.
    """

    waits_for: dict[Worker, training_pb2.Evaluate]
    path: Path | None
    update: int
    steps: int
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    agent_returns: AgentReturns = field(default_factory=dict)
    cut: int = 0

    def add(self, command: training_pb2.Evaluate, done: training_pb2.Evaluation) -> None:
        """Episodes were played."""
        self.returns += done.episode_returns
        self.lengths += done.episode_lengths
        for played, returns in from_messages(done.agent_returns).items():
            self.agent_returns.setdefault(played, []).extend(returns)
        if most := command.most_steps:
            self.cut += sum(length >= most for length in done.episode_lengths)


class Evaluations:
    """How well the weights play, every now and then.

    A checkpoint is written for each evaluation, and the evaluators play that: so that the best one
    can be kept. Meanwhile it lies aside. Those who play a league change while it goes on: there the
    evaluators play the newest weights, and none is kept.

    Attributes:
        best: the checkpoint of the best evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        evaluators: Evaluators,
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
        self._video_every, self._begun = config.driver.evaluation_video, 0
        self._keeps_best = not config.agents.league
        self._evaluators = evaluators
        self._core = core
        self._connectors = connectors
        self._metrics = metrics
        self._checkpointing = checkpointing
        self._snapshots = snapshots
        self._callbacks = callbacks
        self._progress = progress
        self._wanted = False
        self._told = False  # that one waits
        self._told_how_long = False  # an evaluation may take
        self._playing: _Playing | None = None

    @property
    def under_way(self) -> bool:
        """Somebody plays."""
        return self._playing is not None

    def want(self) -> None:
        """One is due: the next `begin` that can asks for it.

        People are told, once, if the one before still waits because a module has no learner.
        """
        missing = self._checkpointing.waits_for
        if self._wanted and missing and not self.under_way and not self._told:
            self._told = True
            text = (
                f"there are no evaluations while these modules have no learner: {listed(missing)}"
            )
            self._progress.message(text, "warning")
        if self._playing and self._metrics.evaluation_return is None and not self._told_how_long:
            self._told_how_long = True
            most = most_steps(self._metrics.lengths)
            self._progress.message(
                "the first evaluation has not ended, and the next one is due: it plays "
                f"{self._episodes} episodes of at most {most:,} steps. "
                "If they may never end, set a limit, such as max_episode_steps = 1000",
                "warning",
            )
        self._wanted = True

    def begin(self) -> None:
        """Begin with the one that is due, unless another one is under way or a checkpoint is on its
        way. Without an evaluator there is none; one waits for weights to play."""
        if not self._wanted or self.under_way:
            return
        if not self._evaluators.there:
            self._wanted = False
            self._tell_that_nobody_is_there()
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
            self._play(event, event.update, event.steps)

    def left(self, worker: Worker) -> None:
        """An evaluator is gone, or could not play. What the others play counts."""
        playing = self._playing
        if playing is not None and worker in playing.waits_for:
            del playing.waits_for[worker]
            if not playing.waits_for:
                self._finish(playing)

    def give_up(self) -> None:
        """The run is over."""
        self._wanted = False
        self._let_go()

    def is_of_it(self, command: training_pb2.Evaluate) -> bool:
        """Whether such a command is for an evaluation, and not to confirm that a run is solved."""
        return not command.checkpoint or Path(command.checkpoint).parent.name == EVALUATED

    def answered(
        self, worker: Worker, command: training_pb2.Evaluate, done: training_pb2.Evaluation
    ) -> None:
        """Episodes were played."""
        playing = self._playing
        if playing is None or playing.waits_for.get(worker) != command:
            return  # it was given up
        del playing.waits_for[worker]
        playing.add(command, done)
        if not playing.waits_for:
            self._finish(playing)

    def _finish(self, playing: _Playing) -> None:
        """All evaluators have played, or are gone."""
        if not (returns := playing.returns):
            return self._let_go()
        self._metrics.evaluated(returns, playing.agent_returns)
        trained = {"update": playing.update, "env_steps_trained": playing.steps}
        is_best = playing.path is not None and self.best.is_better(returns)
        if is_best and playing.path and (problem := self.best.keep(playing.path, returns, trained)):
            self._progress.message(problem, "error")
            is_best = False
        self._callbacks.evaluated(
            Evaluation(returns, playing.lengths, playing.agent_returns, **trained, is_best=is_best)
        )
        self._let_go()
        if playing.cut:
            self._progress.message(
                f"{playing.cut} of {len(returns)} episodes of an evaluation had no end: each "
                f"counts as it was after {max(playing.lengths)} steps. An environment needs a "
                "limit, such as max_episode_steps = 1000",
                "warning",
            )

    def _tell_that_nobody_is_there(self) -> None:
        """Once, in a run whose evaluators dial in."""
        if not self._evaluators.only_local and not self._told:
            self._told = True
            self._progress.message(
                "there are no evaluations while no evaluator is here: start `juggler evaluator` on "
                "a host, with the same --driver as EnvRunners have",
                "warning",
            )

    def _play(self, cut: SnapshotWritten | None, update: int, steps: int) -> None:
        self._wanted = self._told = False
        path = cut.path if cut else None
        learned = {} if cut else {"connector_state": everything(self._connectors)}
        video = ""
        if path and self._video_every and self._begun % self._video_every == 0:
            video = str(path.resolve().parent.parent / VIDEOS / f"update-{update:09}")
        players = self._evaluators.ask_all(self._episodes, update, cut, video, **learned)
        if not players:
            return self._let_go()
        self._begun += 1
        self._playing = _Playing(players, path, update, steps)

    def _let_go(self) -> None:
        self._playing = None
        if self._keeps_best:
            self._snapshots.let_go(EVALUATED)


def most_steps(lengths: Iterable[int]) -> int:
    """Return the limit of an evaluation episode's steps, from the lengths of training episodes.

    Without a limit, a deterministic policy may go in circles for ever.
    """
    return _MORE_STEPS * max((_FEW_STEPS, *lengths))
