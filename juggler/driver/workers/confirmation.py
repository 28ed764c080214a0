"""Whether a run is solved: an evaluation of the very weights that are kept says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.checkpoint.checkpointing import Checkpointing
from juggler.driver.checkpoint.snapshots import SnapshotWriter, SnapshotWritten
from juggler.driver.config import RunConfig
from juggler.driver.record.goals import EPISODE, ReturnGoals
from juggler.driver.record.metrics import Metrics
from juggler.driver.record.progress import Progress
from juggler.driver.record.wording import named_returns, named_spreads
from juggler.driver.signals import way_out
from juggler.driver.workers.evaluations import Evaluators
from juggler.envrunner.agent_returns import from_messages
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.program import EVALUATOR
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.checkpoints.checkpoint import CANDIDATE
from juggler.runtime.wire.v1 import training_pb2

_TELL_SECONDS = 2.0  # until people are told that a verdict is waited for

#: Hears what comes for so many seconds, or until something holds.
Drain = Callable[[float, Callable[[], bool]], None]


def why_not_confirmed(config: RunConfig) -> str:
    """Why nobody can confirm that this run is solved; "": an evaluator can."""
    if not config.driver.confirm:
        return "confirm = false"
    if config.driver.evaluation_seconds > 0:
        return ""  # the run has an evaluator in any case
    if config.env_runner.env.startswith(SCHEME):
        return "an evaluation would need simulators of its own; evaluation_seconds asks for them"
    if config.env_runner.gateway:
        return "an evaluation plays environments, and this run has those of simulators alone"
    return ""


@dataclass(slots=True)
class _Candidate:
    """Weights that may have solved the task.

    Attributes:
        proposed: the training returns that made them one, as `ReturnGoals` names them.
        episodes: of the run until then.
        cut: their state on the disk, once it is there.
        player: who plays it.
    """

    proposed: dict[str, float]
    episodes: int
    cut: SnapshotWritten | None = None
    player: Worker | None = None


class Confirmation:
    """Takes one candidate after the other to its verdict, while training goes on.

    A candidate's state is cut as for a checkpoint, and lies aside while an evaluator plays it. If
    it plays well enough, it becomes the run's newest checkpoint; else it is deleted.

    Attributes:
        outcome: for the summary, once the run is solved; None: it is not.
        kept: the candidate that is to be the run's newest checkpoint; None: there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        evaluators: Evaluators,
        metrics: Metrics,
        checkpointing: Checkpointing,
        snapshots: SnapshotWriter,
        progress: Progress,
    ) -> None:
        self.outcome: dict[str, Any] | None = None
        self.kept: Path | None = None
        self._goals = ReturnGoals(config.driver.stop_return)
        self._evaluators = evaluators
        self._metrics = metrics
        self._checkpointing = checkpointing
        self._snapshots = snapshots
        self._progress = progress
        self._why_not = why_not_confirmed(config)
        self._candidate: _Candidate | None = None
        self._waited_for: _Candidate | None = None

    @property
    def wants_evaluator(self) -> bool:
        """The driver is to start one."""
        return bool(self._goals) and not self._why_not and self._evaluators.only_local

    @property
    def under_way(self) -> bool:
        """There is a candidate, and no verdict yet."""
        candidate = self._candidate
        if candidate is not None and candidate.cut is None and not self._snapshots.under_way:
            self.give_up()  # its learner is gone, or the disk refused it
        return self._candidate is not None

    def look(self) -> bool:
        """Begin with a candidate if there is one. True: the run is solved, and nobody can confirm
        it."""
        if self.outcome or self.under_way:
            return False
        proposed = self._goals.proposed(self._metrics)
        if not proposed:
            return False
        if why_not := self._why_not or self._evaluators.why_nobody_comes():
            self.outcome = {"confirmed": False, "why_not": why_not}
            return True
        if self._checkpointing.begin(CANDIDATE):
            self._candidate = _Candidate(proposed, self._metrics.episodes)
            self._progress.message(
                f"training has a return of {named_returns(proposed)}: "
                f"{self._metrics.candidates.episodes} episodes with these weights are to confirm it"
            )
        return False

    def written(self, event: SnapshotWritten) -> None:
        """A state is on the disk, or it is not: perhaps that of the candidate."""
        if event.aside != CANDIDATE:
            return
        if self._candidate is None:  # it was given up
            self._snapshots.let_go(CANDIDATE)
        elif event.path is not None:
            self._candidate.cut = event
            self.play()

    def play(self) -> None:
        """Have an evaluator play the candidate, if both are there."""
        candidate = self._candidate
        if candidate is None or candidate.cut is None or candidate.player:
            return
        goal = None  # of a module or an agent, whose evaluations do not end early
        if EPISODE in self._goals.by_name:
            best = max(self._metrics.returns)
            goal = training_pb2.Evaluate.Goal(mean=self._goals.by_name[EPISODE], best=best)
        candidate.player = self._evaluators.ask_one(
            self._metrics.candidates.episodes,
            candidate.cut,
            goal=goal,
        )

    def evaluated(
        self, command: training_pb2.Evaluate, evaluation: training_pb2.Evaluation
    ) -> bool:
        """A candidate was played. True: the run is solved."""
        candidate = self._candidate
        if candidate is None or candidate.cut is None:
            return False
        if command.checkpoint != candidate.cut.place:
            return False  # one that was given up
        episodes = len(evaluation.episode_returns)
        played = self._goals.played(
            evaluation.episode_returns, from_messages(evaluation.agent_returns)
        )
        if episodes < command.episodes or not self._goals.reached(played):
            early = "the first " if episodes < command.episodes else ""
            self._progress.message(
                f"not confirmed: update {candidate.cut.update} has a return of "
                f"{named_spreads(played)} in {early}{episodes} episodes, and not "
                f"{named_returns(self._goals.by_name)} in {command.episodes}; training goes on"
            )
            self._metrics.candidates.refuse(candidate.episodes)
            self._let_go()
            return False
        self.kept, given = candidate.cut.path, self._goals.as_given
        self.outcome = {
            "confirmed": True,
            "return_mean": given({name: each.mean for name, each in played.items()}),
            "return_deviation": given({name: each.deviation for name, each in played.items()}),
            "episodes": episodes,
            "training_return_mean": given(candidate.proposed),
            "env_steps_trained": candidate.cut.steps,
            "update": candidate.cut.update,
            "candidates_refused": self._metrics.candidates.refused,
        }
        self._candidate = None
        return True

    def left(self, worker: Worker) -> None:
        """An evaluator is gone. The one in its place plays the candidate."""
        if self._candidate is not None and self._candidate.player is worker:
            self._candidate.player = None

    def impossible(self, why: str) -> None:
        """Nobody evaluates any more."""
        self._why_not = self._why_not or why
        if self._candidate is not None:
            self._let_go()

    def give_up(self) -> None:
        """Of this candidate, if there is one, nobody will know. The next one comes later."""
        if self._candidate is not None:
            self._metrics.candidates.put_off(self._candidate.episodes)
        if self.kept is None:
            self._let_go()

    def wait(self, drain: Drain, seconds: float, patience: float) -> None:
        """For the verdict on the last candidate, when nothing else is left to do.

        Args:
            drain: hears what comes for so many seconds, or until something holds.
            seconds: at most.
            patience: seconds for an evaluator to be there; who plays is watched as all workers are.
        """
        drain(_TELL_SECONDS, lambda: not self.under_way)
        if self.under_way:
            how = way_out("Ctrl-C leaves without it")
            self._progress.message(f"waiting for what confirms that the run is solved{how}")
        until = time.monotonic() + patience
        drain(seconds, lambda: not self.under_way or not (self._plays or time.monotonic() < until))

    def overdue(self) -> str:
        """For people, who ask every now and then: what a candidate waits for since they asked last;
        "": nothing."""
        before, self._waited_for = self._waited_for, self._candidate
        if self._plays or not self.under_way or before is not self._candidate:
            return ""
        if why := self._evaluators.why_nobody_comes():
            self.give_up()
            return f"nobody confirms what a candidate has learned: {why}"
        return f"a candidate waits for {EVALUATOR}-0, which is to confirm it: is it stuck?"

    @property
    def _plays(self) -> bool:
        return self._candidate is not None and self._candidate.player is not None

    def _let_go(self) -> None:
        self._candidate = None
        self._snapshots.let_go(CANDIDATE)
