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
_REPORT_SECONDS = 2.0  # until a message explains the wait for a verdict


@dataclass(slots=True)
class _Playing:
    """An evaluation in progress."""

    waits_for: dict[Worker, training_pb2.Evaluate]  # commands without an answer yet
    cut: SnapshotWritten  # the checkpoint
    returns: list[float] = field(default_factory=list)  # results so far
    lengths: list[int] = field(default_factory=list)  # same order
    agent_returns: AgentReturns = field(default_factory=dict)  # of the same episodes
    endless: int = 0  # number of these episodes without an end


@dataclass(slots=True)
class _Candidate:
    """Weights that may have solved the task."""

    # The training returns that reached the goals, by name: see `ReturnGoals`
    proposed: dict[str, float]
    episodes: int  # of the run so far
    cut: SnapshotWritten | None = None  # their state on the disk, once written
    # The command of the evaluator that plays the candidate; {}: no evaluator does
    asked: dict[Worker, training_pb2.Evaluate] = field(default_factory=dict)


#: Gathers events for some seconds, or until a condition holds.
Drain = Callable[[float, Callable[[], bool]], None]


class Evaluations:
    """Has evaluators play weights while training continues.

    From time to time they play a checkpoint, which is written for this and set aside: so the best
    one can be kept. In a league, whose ratings compare players, none is kept.

    When training reaches its goal, they play a candidate, which is set aside, too. If it plays well
    enough, it becomes the run's newest checkpoint, and the run is solved. Otherwise it is deleted.
    """

    def __init__(self, parts: RunParts) -> None:
        config, driver = parts.config, parts.config.driver
        self.best = BestCheckpoint(parts.run_dir)
        # For the summary, once the run is solved; None: not solved
        self.outcome: dict[str, Any] | None = None
        # The candidate that becomes the run's newest checkpoint; None: no candidate
        self.kept: Path | None = None
        self._parts, self._progress = parts, parts.progress
        # With a gateway, the environments belong to its simulators.
        self._by_gateways = bool(config.env_runner.gateway)
        self._role = ENVRUNNER if self._by_gateways else EVALUATOR
        self._video_every, self._begun = driver.evaluation_video, 0
        self._wanted = False  # an evaluation is due
        self._wait_was_reported = False  # a waiting evaluation was reported
        self._reported: set[str] = set()  # reasons of gateways that played no episode
        self._playing: _Playing | None = None
        self._goals = ReturnGoals(driver.stop_return)
        self._why_not = why_not_confirmed(config)
        self._candidate: _Candidate | None = None
        self._waited_for: _Candidate | None = None  # at the last call of `overdue`

    # -- evaluators -----------------------------------------------------------------------------

    @property
    def wants_evaluators(self) -> bool:
        """Whether the driver should start its evaluators."""
        confirms = bool(self._goals) and not self._why_not
        evaluates = self._parts.config.driver.evaluation_seconds > 0
        return self._parts.only_local and (confirms or evaluates)

    def _evaluators(self) -> list[Worker]:
        return self._parts.registry.of_role(self._role)

    def _why_unavailable(self) -> str:
        """Return why no evaluator can be expected, or ""."""
        if self._parts.only_local or self._evaluators():
            return ""
        kind = "gateway with simulators" if self._by_gateways else "`juggler evaluator`"
        return f"no {kind} is attached"

    def _ask(
        self, episodes: int, cut: SnapshotWritten, most: int, **what: Any
    ) -> dict[Worker, training_pb2.Evaluate]:
        """Have up to `most` evaluators share the episodes; return the commands."""
        parts, evaluators = self._parts, self._evaluators()[:most]
        share, more = divmod(episodes, len(evaluators) or 1)
        commands = {}
        for place, evaluator in enumerate(evaluators):
            command = commands[evaluator] = training_pb2.Evaluate(
                episodes=share + (place < more),
                seed=parts.registry.seed(evaluator, cut.update),
                most_steps=most_steps(parts.metrics.lengths),
                checkpoint=cut.place,
                version=Version(cut.generation, cut.update).message(),
                **what,
            )
            what.pop("video", None)  # of the first evaluator alone
            # They may be on other hosts, and cannot read the checkpoint.
            states = (restores(module_id, tree, {}) for module_id, tree in cut.playing.items())
            messages = chain(chain.from_iterable(states), [command])
            parts.frozen_parts.append(evaluator, messages)
        return commands

    def answered(
        self, worker: Worker, command: training_pb2.Evaluate, done: training_pb2.Evaluation
    ) -> None:
        """Handle an evaluator's results; those of an abandoned state are ignored."""
        playing, candidate = self._playing, self._candidate
        if playing and playing.waits_for.get(worker) == command:
            self._add(playing, worker, done)
        elif candidate and candidate.cut and candidate.asked.get(worker) == command:
            candidate.asked = {}
            self._judge(candidate, candidate.cut, command, done)

    def left(self, worker: Worker) -> None:
        """Handle an evaluator that is lost, or has failed.

        It or another one plays the candidate; in an evaluation, the episodes of others count.
        """
        if self._candidate is not None:
            self._candidate.asked.pop(worker, None)
            self.play_candidate()
        playing = self._playing
        if playing and playing.waits_for.pop(worker, None) and not playing.waits_for:
            self._finish(playing)

    def written(self, event: SnapshotWritten) -> None:
        """Handle a written checkpoint, perhaps one to play."""
        if event.aside == EVALUATED:
            if event.path is None or not self._wanted:
                self.give_up()
            else:
                self._evaluate(event)
        elif event.aside == CANDIDATE:
            if self._candidate is None:  # the candidate was abandoned
                self._parts.checkpoints.discard_aside(CANDIDATE)
            elif event.path is not None:
                self._candidate.cut = event
                self.play_candidate()

    # -- evaluations from time to time ----------------------------------------------------------

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation is under way."""
        return self._playing is not None

    def want(self) -> None:
        """Note that an evaluation is due: `begin` starts it once possible."""
        self._wanted = True

    def begin(self) -> None:
        """Begin a due evaluation if one is possible now."""
        if not self._wanted or self.evaluating:
            return
        if not self._evaluators():
            self._wanted = False
            if (why := self._why_unavailable()) and not self._wait_was_reported:
                self._wait_was_reported = True
                how = ": start one on a host, with the same --driver as EnvRunners"
                how = "" if self._by_gateways else how
                self._progress.message(f"there are no evaluations while {why}{how}", "warning")
        else:
            self._parts.checkpoints.begin(EVALUATED)

    def give_up(self) -> None:
        """Abandon the evaluation."""
        self._wanted = False
        self._discard_evaluation()

    def _discard_evaluation(self) -> None:
        self._playing = None
        self._parts.checkpoints.discard_aside(EVALUATED)

    def _evaluate(self, cut: SnapshotWritten) -> None:
        self._wanted = self._wait_was_reported = False
        video = ""
        if self._video_every and self._begun % self._video_every == 0:
            directory = Path(cut.place).parent.parent / VIDEOS
            video = str(directory / f"update-{cut.update:09}")
        episodes = self._parts.config.driver.evaluation_episodes
        if asked := self._ask(episodes, cut, most=episodes, video=video):
            self._begun += 1
            self._playing = _Playing(asked, cut)
        else:
            self.give_up()

    def _add(self, playing: _Playing, worker: Worker, done: training_pb2.Evaluation) -> None:
        """Add the episodes of one evaluator."""
        most = playing.waits_for.pop(worker).most_steps
        if not done.episode_returns and done.why_fewer not in self._reported:
            self._reported.add(done.why_fewer)
            text = f"{worker.worker_id} has played no episode of an evaluation: {done.why_fewer}"
            self._progress.message(text, "warning")
        playing.returns += done.episode_returns
        playing.lengths += done.episode_lengths
        for played, returns in from_messages(done.agent_returns).items():
            playing.agent_returns.setdefault(played, []).extend(returns)
        playing.endless += sum(length >= most for length in done.episode_lengths)
        if not playing.waits_for:
            self._finish(playing)

    def _finish(self, playing: _Playing) -> None:
        """Finish the evaluation: all evaluators have answered or left."""
        if returns := playing.returns:
            self._parts.metrics.evaluated(returns, playing.agent_returns)
            trained = {"update": playing.cut.update, "env_steps_trained": playing.cut.steps}
            # The checkpoint is moved first, so `is_best` is true only if that worked.
            is_best = self._keep_if_best(playing.cut.path, returns, trained)
            evaluation = Evaluation(
                returns, playing.lengths, playing.agent_returns, **trained, is_best=is_best
            )
            self._parts.callbacks.note("on_evaluation", evaluation)
        if playing.endless:
            self._progress.message(
                f"{playing.endless} of {len(returns)} episodes of an evaluation had no end: each "
                f"counts with its return after {max(playing.lengths)} steps. An environment needs "
                "a limit, such as max_episode_steps = 1000",
                "warning",
            )
        self._discard_evaluation()

    def _keep_if_best(
        self, path: Path | None, returns: Sequence[float], trained: Mapping[str, int]
    ) -> bool:
        best = self.best.summary
        worse = best and ReturnStatistics.of(returns).mean <= best["return_mean"]
        if path is None or worse or self._parts.league:
            return False
        if problem := self.best.keep(path, returns, trained):
            self._progress.message(problem, "error")
        return not problem

    # -- the confirmation that the run is solved ------------------------------------------------

    @property
    def confirming(self) -> bool:
        """Whether a candidate has no verdict yet."""
        candidate = self._candidate
        if candidate and candidate.cut is None and not self._parts.checkpoints.under_way:
            self.give_up_candidate()  # its learner is gone, or writing it failed
        return self._candidate is not None

    def is_solved(self) -> bool:
        """Start a candidate; return whether the run is solved without confirmation."""
        metrics = self._parts.metrics
        if self.outcome or self.confirming or not (proposed := self._goals.proposed(metrics)):
            return False
        if why_not := self._why_not or self._why_unavailable():
            self.outcome = {"confirmed": False, "why_not": why_not}
            return True
        if self._parts.checkpoints.begin(CANDIDATE):
            self._candidate = _Candidate(proposed, metrics.episodes)
            self._progress.message(
                f"training has a return of {named_returns(proposed)}: "
                f"{metrics.candidates.episodes} episodes with these weights must confirm it"
            )
        return False

    def play_candidate(self) -> None:
        """Have an evaluator play the candidate, if both are ready."""
        candidate = self._candidate
        if candidate is None or candidate.cut is None or candidate.asked:
            return
        goal = None  # no early end with goals of modules or agents
        if EPISODE in self._goals.by_name:
            best = max(self._parts.metrics.returns)
            goal = training_pb2.Evaluate.Goal(mean=self._goals.by_name[EPISODE], best=best)
        episodes, cut = self._parts.metrics.candidates.episodes, candidate.cut
        candidate.asked = self._ask(episodes, cut, most=1, goal=goal)

    def _judge(
        self,
        candidate: _Candidate,
        cut: SnapshotWritten,
        command: training_pb2.Evaluate,
        done: training_pb2.Evaluation,
    ) -> None:
        """Judge a played candidate, which may end the run as solved."""
        # In a league, the first player may have left: the next candidate has another one.
        if not done.episode_returns and not self._parts.league:
            return self.cannot_confirm(done.why_fewer)
        # An evaluator stops early if the goal is out of reach.
        episodes, given = len(done.episode_returns), self._goals.as_given
        by_agent = from_messages(done.agent_returns)
        played = self._goals.played(done.episode_returns, by_agent) if episodes else {}
        # A gateway also gives up, without simulators: then the proof is incomplete.
        if episodes < command.episodes and (not episodes or self._goals.reached(played)):
            self._progress.message(
                f"not confirmed: update {cut.update} played {episodes} of {command.episodes} "
                f"episodes: {done.why_fewer}; training continues"
            )
            return self.give_up_candidate()
        if not self._goals.reached(played):
            early = "the first " if episodes < command.episodes else ""
            spreads = {name: spread(each.mean, each.deviation) for name, each in played.items()}
            self._progress.message(
                f"not confirmed: update {cut.update} has a return of "
                f"{named(spreads) or 'nothing'} in {early}{episodes} episodes, instead of "
                f"{named_returns(self._goals.by_name)} in {command.episodes}; training continues"
            )
            # The next candidate then waits longer.
            self._parts.metrics.candidates.refuse(candidate.episodes)
            return self._discard_candidate()
        # Not discarded, because this would delete the checkpoint of the solved run.
        self.kept, self._candidate = cut.path, None
        self.outcome = {
            "confirmed": True,
            "return_mean": given({name: each.mean for name, each in played.items()}),
            "return_deviation": given({name: each.deviation for name, each in played.items()}),
            "episodes": episodes,
            "training_return_mean": given(candidate.proposed),
            "env_steps_trained": cut.steps,
            "update": cut.update,
            "candidates_refused": self._parts.metrics.candidates.refused,
        }
        self._parts.end.stop("solved")

    def cannot_confirm(self, why: str) -> None:
        """Stop confirming candidates, and note why it is impossible."""
        self._why_not = self._why_not or why
        self._discard_candidate()

    def give_up_candidate(self) -> None:
        """Abandon this candidate; the next one comes later."""
        if self._candidate is not None:
            self._parts.metrics.candidates.postpone(self._candidate.episodes)
        self._discard_candidate()

    def _discard_candidate(self) -> None:
        candidate, self._candidate = self._candidate, None
        # A gateway gives up the checkpoint; evaluators play to the end.
        if candidate and candidate.cut and self._by_gateways:
            for gateway in candidate.asked:
                command = training_pb2.Evaluate(episodes=0, checkpoint=candidate.cut.place)
                self._parts.commands.send(gateway, command)
        if self.kept is None:
            self._parts.checkpoints.discard_aside(CANDIDATE)

    def wait_for_verdict(self, drain: Drain, seconds: float, patience: float) -> None:
        """Wait for the verdict on the last candidate, `patience` for an evaluator."""
        drain(_REPORT_SECONDS, lambda: not self.confirming)
        if self.confirming:
            how = stop_hint("Ctrl-C leaves without it")
            self._progress.message(f"waiting for the confirmation that the run is solved{how}")
        until = time.monotonic() + patience

        def is_over() -> bool:
            candidate = self._candidate if self.confirming else None
            return not candidate or not (candidate.asked or time.monotonic() < until)

        drain(seconds, is_over)

    def overdue(self) -> str:
        """Describe what a candidate has waited for since the last call."""
        before, self._waited_for = self._waited_for, self._candidate
        if not self.confirming or before is not self._candidate or (before and before.asked):
            return ""
        if why := self._why_unavailable():
            self.give_up_candidate()
            return f"a candidate cannot be confirmed: {why}"
        kind = "a gateway with simulators" if self._by_gateways else f"{EVALUATOR}-0"
        return f"a candidate waits for {kind}, which must confirm it: is it stuck?"


def most_steps(lengths: Iterable[int]) -> int:
    """Return the maximum steps of an evaluation episode, given training lengths.

    Without a limit, a deterministic policy may go in circles forever.
    """
    return _MORE_STEPS * max((_FEW_STEPS, *lengths))


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
