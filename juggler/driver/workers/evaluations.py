"""Evaluations during training, and the confirmation that a run is solved."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from juggler.driver.callbacks import Evaluation
from juggler.driver.checkpoint.snapshots import SnapshotWritten, restores
from juggler.driver.config import RunConfig
from juggler.driver.reporting.episode_returns import ReturnGoals, ReturnStatistics
from juggler.driver.reporting.wording import EPISODE, named, named_returns, spread
from juggler.driver.signals import stop_hint
from juggler.driver.workers.command_sender import everything
from juggler.envrunner.agent_returns import AgentReturns, from_messages
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.envrunner_program import ENVRUNNER, EVALUATOR
from juggler.runtime.actors.hub import Worker
from juggler.runtime.checkpoints.checkpoint import (
    BEST,
    CANDIDATE,
    EVALUATED,
    CheckpointError,
    adopt,
    newest_first,
    write_synced,
)
from juggler.runtime.episodes.version import Version
from juggler.runtime.plain_files import read_json
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.driver.run_parts import RunParts

VIDEOS: Final = "videos"  # directory within a run's directory

#: An evaluation episode may take _MORE_STEPS times as many steps as the longest training episode,
#: which counts as at least _FEW_STEPS.
_MORE_STEPS, _FEW_STEPS = 10, 1000


class Evaluators:
    """The workers that play whole episodes."""

    def __init__(self, parts: RunParts) -> None:
        # Local evaluators are processes of the driver, which can read checkpoints.
        self.only_local, self._parts = parts.only_local, parts
        # With a gateway, the environments belong to its simulators.
        self.are_gateways = bool(parts.config.env_runner.gateway)
        self._role = ENVRUNNER if self.are_gateways else EVALUATOR

    @property
    def there(self) -> bool:
        """Whether an evaluator is ready."""
        return bool(self._parts.registry.of_role(self._role))

    def why_unavailable(self) -> str:
        """Return why no evaluator can be expected, or ""."""
        if self.only_local or self.there:
            return ""
        kind = "gateway with simulators" if self.are_gateways else "`juggler evaluator`"
        return f"no {kind} is attached"

    def stop(self, evaluator: Worker, cut: SnapshotWritten) -> None:
        """Have a gateway give up a checkpoint; others play to the end."""
        if self.are_gateways:
            command = training_pb2.Evaluate(episodes=0, checkpoint=cut.place)
            self._parts.commands.send(evaluator, command)

    def ask(
        self,
        episodes: int,
        update: int,
        cut: SnapshotWritten | None,
        *,
        alone: bool = False,
        video: str = "",
        **what: Any,
    ) -> dict[Worker, training_pb2.Evaluate]:
        """Have evaluators share the episodes, or one play `alone`; return the commands."""
        evaluators = self._parts.registry.of_role(self._role)[: 1 if alone else episodes]
        share, more = divmod(episodes, len(evaluators) or 1)
        commands = {}
        for place, evaluator in enumerate(evaluators):
            command = commands[evaluator] = training_pb2.Evaluate(
                episodes=share + (place < more),
                seed=self._parts.registry.seed(evaluator, update),
                most_steps=most_steps(self._parts.metrics.lengths),
                checkpoint="" if cut is None else cut.place,
                video="" if place else video,
                **what,
            )
            if cut is None or self.only_local:
                self._parts.commands.send(evaluator, command)
                continue
            # On other hosts, evaluators cannot read the checkpoint.
            command.version.CopyFrom(Version(cut.generation, cut.update).message())
            parts = (restores(module_id, tree, {}) for module_id, tree in cut.playing.items())
            messages = chain(chain.from_iterable(parts), [command])
            self._parts.frozen_parts.append(evaluator, messages)
        return commands


@dataclass(slots=True)
class _Playing:
    """An evaluation in progress."""

    waits_for: dict[Worker, training_pb2.Evaluate]  # commands without an answer yet
    path: Path | None  # of the checkpoint; None: the newest weights
    update: int  # of the weights
    steps: int  # steps trained on
    returns: list[float] = field(default_factory=list)  # results so far
    lengths: list[int] = field(default_factory=list)  # same order
    agent_returns: AgentReturns = field(default_factory=dict)  # of the same episodes
    cut: int = 0  # number of these episodes without an end

    def add(self, command: training_pb2.Evaluate, done: training_pb2.Evaluation) -> None:
        """Add the episodes of one evaluator."""
        self.returns += done.episode_returns
        self.lengths += done.episode_lengths
        for played, returns in from_messages(done.agent_returns).items():
            self.agent_returns.setdefault(played, []).extend(returns)
        if most := command.most_steps:
            self.cut += sum(length >= most for length in done.episode_lengths)


class PeriodicEvaluations:
    """Evaluates the weights from time to time.

    A checkpoint is written for each evaluation, and set aside while the evaluators play it: so the
    best one can be kept. In a league, whose players change all the time, the evaluators play the
    newest weights, and no checkpoint is kept.
    """

    def __init__(self, parts: RunParts, evaluators: Evaluators, best: BestCheckpoint) -> None:
        driver = parts.config.driver
        self.best = best
        self._episodes = driver.evaluation_episodes
        self._video_every, self._begun = driver.evaluation_video, 0
        self._keeps_best = not parts.config.agents.league
        self._evaluators, self._parts = evaluators, parts
        self._metrics, self._progress = parts.metrics, parts.progress
        self._checkpointing, self._snapshots = parts.checkpointing, parts.snapshots
        self._wanted = False
        self._wait_was_reported = False  # a waiting evaluation was reported
        self._reported: set[str] = set()  # reasons of gateways that played no episode
        self._playing: _Playing | None = None

    @property
    def under_way(self) -> bool:
        """Whether an evaluation is under way."""
        return self._playing is not None

    def want(self) -> None:
        """Note that an evaluation is due: `begin` starts it once possible."""
        self._wanted = True

    def begin(self) -> None:
        """Begin a due evaluation if one is possible now."""
        if not self._wanted or self.under_way:
            return
        if not self._evaluators.there:
            self._wanted = False
            self._report_missing_evaluators()
        elif self._keeps_best:
            self._checkpointing.begin(EVALUATED)
        elif (core := self._parts.core).members:
            self._play(None, core.updates, core.trained)

    def written(self, event: SnapshotWritten) -> None:
        """Handle a written checkpoint, perhaps one to play."""
        if event.aside != EVALUATED:
            return
        if event.path is None or not self._wanted:
            self._wanted = False
            self._discard()
        else:
            self._play(event, event.update, event.steps)

    def left(self, worker: Worker) -> None:
        """Handle a lost evaluator; the episodes of other evaluators count."""
        playing = self._playing
        if playing is not None and worker in playing.waits_for:
            del playing.waits_for[worker]
            if not playing.waits_for:
                self._finish(playing)

    def give_up(self) -> None:
        """Abandon the evaluation, because the run has ended."""
        self._wanted = False
        self._discard()

    def answered(
        self, worker: Worker, command: training_pb2.Evaluate, done: training_pb2.Evaluation
    ) -> bool:
        """Add an evaluator's results; return whether they are of this evaluation."""
        playing = self._playing
        if playing is None or playing.waits_for.get(worker) != command:
            return False
        del playing.waits_for[worker]
        if not done.episode_returns and done.why_fewer not in self._reported:
            self._reported.add(done.why_fewer)
            text = f"{worker.worker_id} has played no episode of an evaluation: {done.why_fewer}"
            self._progress.message(text, "warning")
        playing.add(command, done)
        if not playing.waits_for:
            self._finish(playing)
        return True

    def _finish(self, playing: _Playing) -> None:
        """Finish the evaluation: all evaluators have answered or left."""
        if not (returns := playing.returns):
            return self._discard()
        self._metrics.evaluated(returns, playing.agent_returns)
        trained = {"update": playing.update, "env_steps_trained": playing.steps}
        best = self.best.summary
        is_best = playing.path is not None and (
            best is None or ReturnStatistics.of(returns).mean > best["return_mean"]
        )
        if is_best and playing.path and (problem := self.best.keep(playing.path, returns, trained)):
            self._progress.message(problem, "error")
            is_best = False
        # The checkpoint is moved first, so `is_best` is true only if that worked.
        evaluation = Evaluation(
            returns, playing.lengths, playing.agent_returns, **trained, is_best=is_best
        )
        self._parts.callbacks.note("on_evaluation", evaluation)
        self._discard()
        if playing.cut:
            self._progress.message(
                f"{playing.cut} of {len(returns)} episodes of an evaluation had no end: each "
                f"counts with its return after {max(playing.lengths)} steps. An environment needs "
                "a limit, such as max_episode_steps = 1000",
                "warning",
            )

    def _report_missing_evaluators(self) -> None:
        """Warn once if no evaluator has dialled in."""
        if (why := self._evaluators.why_unavailable()) and not self._wait_was_reported:
            self._wait_was_reported = True
            how = ": start one on a host, with the same --driver as EnvRunners"
            how = "" if self._evaluators.are_gateways else how
            self._progress.message(f"there are no evaluations while {why}{how}", "warning")

    def _play(self, cut: SnapshotWritten | None, update: int, steps: int) -> None:
        self._wanted = self._wait_was_reported = False
        path = cut.path if cut else None
        learned: dict[str, Any] = {}
        if cut is None:
            learned["connector_state"] = everything(self._parts.connectors)
        video = ""
        if path and self._video_every and self._begun % self._video_every == 0:
            video = str(path.resolve().parent.parent / VIDEOS / f"update-{update:09}")
        players = self._evaluators.ask(self._episodes, update, cut, video=video, **learned)
        if not players:
            return self._discard()
        self._begun += 1
        self._playing = _Playing(players, path, update, steps)

    def _discard(self) -> None:
        self._playing = None
        if self._keeps_best:
            self._snapshots.discard_aside(EVALUATED)


def most_steps(lengths: Iterable[int]) -> int:
    """Return the maximum steps of an evaluation episode, given training lengths.

    Without a limit, a deterministic policy may go in circles forever.
    """
    return _MORE_STEPS * max((_FEW_STEPS, *lengths))


_REPORT_SECONDS = 2.0  # until a message explains the wait

#: Gathers events for some seconds, or until a condition holds.
Drain = Callable[[float, Callable[[], bool]], None]


def why_not_confirmed(config: RunConfig) -> str:
    """Return why no evaluator can confirm a solved run, or ""."""
    if not config.driver.confirm:
        return "confirm = false"
    if config.driver.evaluation_seconds > 0:
        return ""  # the run has an evaluator anyway
    if config.env_runner.env.startswith(SCHEME):
        return "an evaluation would need its own simulators; evaluation_seconds requests them"
    if config.env_runner.gateway:
        return "an evaluation would take episodes of its simulators; evaluation_seconds requests it"
    return ""


@dataclass(slots=True)
class _Candidate:
    """Weights that may have solved the task."""

    # The training returns that reached the goals, by name: see `ReturnGoals`
    proposed: dict[str, float]
    episodes: int  # of the run so far
    cut: SnapshotWritten | None = None  # their state on the disk, once written
    player: Worker | None = None  # evaluator that plays the candidate


class Confirmation:
    """Has candidates confirmed one by one, while training continues.

    A candidate's state is saved like a checkpoint, and set aside while an evaluator plays it. If
    it plays well enough, it becomes the run's newest checkpoint; otherwise it is deleted.
    """

    def __init__(self, parts: RunParts, evaluators: Evaluators) -> None:
        # For the summary, once the run is solved; None: not solved
        self.outcome: dict[str, Any] | None = None
        # The candidate that becomes the run's newest checkpoint; None: no candidate
        self.kept: Path | None = None
        self._goals = ReturnGoals(parts.config.driver.stop_return)
        self._evaluators = evaluators
        self._metrics, self._progress = parts.metrics, parts.progress
        self._checkpointing, self._snapshots = parts.checkpointing, parts.snapshots
        self._why_not = why_not_confirmed(parts.config)
        self._candidate: _Candidate | None = None
        self._waited_for: _Candidate | None = None

    @property
    def wants_evaluator(self) -> bool:
        """Whether the driver should start an evaluator."""
        return bool(self._goals) and not self._why_not and self._evaluators.only_local

    @property
    def under_way(self) -> bool:
        """Whether a candidate has no verdict yet."""
        candidate = self._candidate
        if candidate is not None and candidate.cut is None and not self._snapshots.under_way:
            self.give_up()  # its learner is gone, or writing it failed
        return self._candidate is not None

    def check(self) -> bool:
        """Start a candidate; return whether the run is solved without confirmation."""
        if self.outcome or self.under_way:
            return False
        proposed = self._goals.proposed(self._metrics)
        if not proposed:
            return False
        if why_not := self._why_not or self._evaluators.why_unavailable():
            self.outcome = {"confirmed": False, "why_not": why_not}
            return True
        if self._checkpointing.begin(CANDIDATE):
            self._candidate = _Candidate(proposed, self._metrics.episodes)
            self._progress.message(
                f"training has a return of {named_returns(proposed)}: "
                f"{self._metrics.candidates.episodes} episodes with these weights must confirm it"
            )
        return False

    def written(self, event: SnapshotWritten) -> None:
        """Handle a written checkpoint, perhaps the candidate's."""
        if event.aside != CANDIDATE:
            return
        if self._candidate is None:  # the candidate was abandoned
            self._snapshots.discard_aside(CANDIDATE)
        elif event.path is not None:
            self._candidate.cut = event
            self.play()

    def play(self) -> None:
        """Have an evaluator play the candidate, if both are ready."""
        candidate = self._candidate
        if candidate is None or candidate.cut is None or candidate.player:
            return
        goal = None  # no early end with goals of modules or agents
        if EPISODE in self._goals.by_name:
            best = max(self._metrics.returns)
            goal = training_pb2.Evaluate.Goal(mean=self._goals.by_name[EPISODE], best=best)
        episodes, cut = self._metrics.candidates.episodes, candidate.cut
        asked = self._evaluators.ask(episodes, cut.update, cut, alone=True, goal=goal)
        candidate.player = next(iter(asked), None)

    def evaluated(
        self, command: training_pb2.Evaluate, evaluation: training_pb2.Evaluation
    ) -> bool:
        """Judge a played candidate; return whether the run is solved."""
        candidate = self._candidate
        if candidate is None or candidate.cut is None:
            return False
        if command.checkpoint != candidate.cut.place:
            return False  # an abandoned candidate
        candidate.player = None
        if not evaluation.episode_returns:
            self.impossible(evaluation.why_fewer)
            return False
        # An evaluator stops early if the goal is out of reach.
        episodes = len(evaluation.episode_returns)
        played = self._goals.played(
            evaluation.episode_returns, from_messages(evaluation.agent_returns)
        )
        is_reached = self._goals.reached(played)
        # A gateway also gives up, without simulators: then the proof is incomplete.
        if is_reached and episodes < command.episodes:
            self._progress.message(
                f"not confirmed: update {candidate.cut.update} played {episodes} of "
                f"{command.episodes} episodes: {evaluation.why_fewer}; training continues"
            )
            self.give_up()
            return False
        if not is_reached:
            early = "the first " if episodes < command.episodes else ""
            spreads = {name: spread(each.mean, each.deviation) for name, each in played.items()}
            self._progress.message(
                f"not confirmed: update {candidate.cut.update} has a return of "
                f"{named(spreads) or 'nothing'} in {early}{episodes} episodes, instead of "
                f"{named_returns(self._goals.by_name)} in {command.episodes}; training continues"
            )
            # The next candidate then waits longer.
            self._metrics.candidates.refuse(candidate.episodes)
            self._discard()
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
        # Not discarded, because this would delete the checkpoint of the solved run.
        self._candidate = None
        return True

    def left(self, worker: Worker) -> None:
        """Handle a lost evaluator: its successor plays the candidate."""
        if self._candidate is not None and self._candidate.player is worker:
            self._candidate.player = None

    def impossible(self, why: str) -> None:
        """Stop confirming candidates, and note why it is impossible."""
        self._why_not = self._why_not or why
        if self._candidate is not None:
            self._discard()

    def give_up(self) -> None:
        """Abandon this candidate; the next one comes later."""
        if self._candidate is not None:
            self._metrics.candidates.postpone(self._candidate.episodes)
        if self.kept is None:
            self._discard()

    def wait(self, drain: Drain, seconds: float, patience: float) -> None:
        """Wait for the verdict on the last candidate, `patience` for an evaluator."""
        drain(_REPORT_SECONDS, lambda: not self.under_way)
        if self.under_way:
            how = stop_hint("Ctrl-C leaves without it")
            self._progress.message(f"waiting for the confirmation that the run is solved{how}")
        until = time.monotonic() + patience
        drain(seconds, lambda: not self.under_way or not (self._plays or time.monotonic() < until))

    def overdue(self) -> str:
        """Describe what a candidate has waited for since the last call."""
        before, self._waited_for = self._waited_for, self._candidate
        if self._plays or not self.under_way or before is not self._candidate:
            return ""
        if why := self._evaluators.why_unavailable():
            self.give_up()
            return f"a candidate cannot be confirmed: {why}"
        kind = "a gateway with simulators" if self._evaluators.are_gateways else f"{EVALUATOR}-0"
        return f"a candidate waits for {kind}, which must confirm it: is it stuck?"

    @property
    def _plays(self) -> bool:
        return self._candidate is not None and self._candidate.player is not None

    def _discard(self) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None and candidate.player and candidate.cut:
            self._evaluators.stop(candidate.player, candidate.cut)
        self._snapshots.discard_aside(CANDIDATE)


#: File in the checkpoint's directory with the results of its evaluation.
_EVALUATION_FILE = "evaluation.json"
_RESULTS = ("return_mean", "return_deviation", "episodes", "update", "env_steps_trained")


class BestCheckpoint:
    """The checkpoint in `RUN/best`, kept by resumed runs."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / BEST
        # Its path and results, for the summary; None: no best checkpoint
        self.summary: dict[str, Any] | None = _read(self._directory)

    def keep(self, path: Path, returns: Sequence[float], trained: Mapping[str, int]) -> str:
        """Move a checkpoint here; return what prevents it, or ""."""
        played = ReturnStatistics.of(returns)
        results = {
            "return_mean": played.mean,
            "return_deviation": played.deviation,
            "episodes": played.episodes,
            **trained,
        }
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Before it is moved, so that a checkpoint always has its results.
            write_synced(path / _EVALUATION_FILE, json.dumps(results).encode() + b"\n")
            kept = adopt(path, self._directory, keep=1)
        except OSError as error:
            return f"cannot keep the best checkpoint in {self._directory}: {error}"
        except CheckpointError as error:
            return str(error)
        self.summary = {"checkpoint": str(kept), **results}
        return ""


def _read(directory: Path) -> dict[str, Any] | None:
    """Read the best checkpoint so far, or return None."""
    try:
        path = newest_first(directory)[0]
        results = read_json(path / _EVALUATION_FILE)
        found = {key: results[key] + 0 for key in _RESULTS}
    except (OSError, IndexError, ValueError, TypeError, KeyError):
        return None
    return {"checkpoint": str(path), **found}
