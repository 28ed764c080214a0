"""The evaluators, and evaluations beside the training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from juggler.driver.callbacks import Evaluation
from juggler.driver.checkpoint.restoring import restores
from juggler.driver.checkpoint.snapshots import SnapshotWritten
from juggler.driver.config import RunConfig
from juggler.driver.record.episode_returns import EPISODE, Played, ReturnGoals
from juggler.driver.record.wording import named_returns, named_spreads
from juggler.driver.signals import way_out
from juggler.driver.workers.command_sender import everything
from juggler.envrunner.agent_returns import AgentReturns, from_messages
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.runtime.actors.hub_events import Worker
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
from juggler.runtime.nearest import listed
from juggler.runtime.plain_files import read_json
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.driver.parts import RunParts

#: In the directory of a run.
VIDEOS: Final = "videos"

#: Why a gateway has played no episode.
_NO_SIMULATOR: Final = "no simulator was there that lets its gateway act"

#: An episode may take _MORE_STEPS times the longest training episode, which counts as at least
#: _FEW_STEPS.
_MORE_STEPS, _FEW_STEPS = 10, 1000


class Evaluators:
    """The workers that play whole episodes."""

    def __init__(self, parts: RunParts) -> None:
        # Those of this host are processes of the driver, which read checkpoints.
        self.only_local, self._parts = parts.only_local, parts
        # The environments of a run with a gateway are those of its simulators.
        self.are_gateways = bool(parts.config.env_runner.gateway)
        self._role = ENVRUNNER if self.are_gateways else EVALUATOR

    @property
    def there(self) -> bool:
        """Whether an evaluator can be asked."""
        return bool(self._parts.registry.of_role(self._role))

    def why_none_comes(self) -> str:
        """Why no evaluator is to be expected, or ""."""
        if self.only_local or self.there:
            return ""
        kind = "gateway with simulators" if self.are_gateways else "`juggler evaluator`"
        return f"no {kind} is here"

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
        """Have each evaluator, or one alone, play its share of the episodes.

        Args:
            cut: the checkpoint with these weights; None: they play the newest ones.
            video: where the first one records one more episode; "": nowhere.
            what: more fields of an `Evaluate`.

        Returns:
            The commands, by evaluator; {}: there is none.
        """
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
            command.version.CopyFrom(Version(cut.generation, cut.update).message())
            parts = (restores(module_id, tree, {}) for module_id, tree in cut.playing.items())
            messages = chain(chain.from_iterable(parts), [command])
            self._parts.frozen_parts.append(evaluator, messages, self._parts.commands.send)
        return commands


@dataclass(slots=True)
class _Playing:
    """What evaluators play."""

    waits_for: dict[Worker, training_pb2.Evaluate]  # commands without an answer yet
    path: Path | None  # of the checkpoint; None: the newest weights
    update: int  # that it has
    steps: int  # that it was trained on
    returns: list[float] = field(default_factory=list)  # what was played so far
    lengths: list[int] = field(default_factory=list)  # likewise
    agent_returns: AgentReturns = field(default_factory=dict)  # likewise
    cut: int = 0  # how many of these episodes had no end

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
    can be kept. Meanwhile it lies aside. Players of a league change meanwhile: there the
    evaluators play the newest weights, and none is kept.
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
        self._told = False  # that one waits
        self._told_how_long = False  # an evaluation may take
        self._told_of_none = False  # that a gateway has played no episode
        self._playing: _Playing | None = None

    @property
    def under_way(self) -> bool:
        """Whether an evaluator plays."""
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
        """Begin a due evaluation if one is possible now."""
        if not self._wanted or self.under_way:
            return
        if not self._evaluators.there:
            self._wanted = False
            self._tell_that_none_is_there()
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
            self._let_go()
        else:
            self._play(event, event.update, event.steps)

    def left(self, worker: Worker) -> None:
        """Handle a lost evaluator; other episodes count."""
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
        """Whether a command is for an evaluation, not a confirmation."""
        return not command.checkpoint or Path(command.checkpoint).parent.name == EVALUATED

    def answered(
        self, worker: Worker, command: training_pb2.Evaluate, done: training_pb2.Evaluation
    ) -> None:
        """Episodes were played, or none."""
        playing = self._playing
        if playing is None or playing.waits_for.get(worker) != command:
            return  # it was given up
        del playing.waits_for[worker]
        if not done.episode_returns and not self._told_of_none:
            self._told_of_none = True
            text = f"{worker.worker_id} has played no episode of an evaluation: {_NO_SIMULATOR}"
            self._progress.message(text, "warning")
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
        evaluation = Evaluation(
            returns, playing.lengths, playing.agent_returns, **trained, is_best=is_best
        )
        self._parts.callbacks.note("on_evaluation", evaluation)
        self._let_go()
        if playing.cut:
            self._progress.message(
                f"{playing.cut} of {len(returns)} episodes of an evaluation had no end: each "
                f"counts as it was after {max(playing.lengths)} steps. An environment needs a "
                "limit, such as max_episode_steps = 1000",
                "warning",
            )

    def _tell_that_none_is_there(self) -> None:
        """Once, in a run whose evaluators dial in."""
        if (why := self._evaluators.why_none_comes()) and not self._told:
            self._told = True
            how = ": start one on a host, with the same --driver as EnvRunners have"
            how = "" if self._evaluators.are_gateways else how
            self._progress.message(f"there are no evaluations while {why}{how}", "warning")

    def _play(self, cut: SnapshotWritten | None, update: int, steps: int) -> None:
        self._wanted = self._told = False
        path = cut.path if cut else None
        learned: dict[str, Any] = {}
        if cut is None:
            learned["connector_state"] = everything(self._parts.connectors)
        video = ""
        if path and self._video_every and self._begun % self._video_every == 0:
            video = str(path.resolve().parent.parent / VIDEOS / f"update-{update:09}")
        players = self._evaluators.ask(self._episodes, update, cut, video=video, **learned)
        if not players:
            return self._let_go()
        self._begun += 1
        self._playing = _Playing(players, path, update, steps)

    def _let_go(self) -> None:
        self._playing = None
        if self._keeps_best:
            self._snapshots.let_go(EVALUATED)


def most_steps(lengths: Iterable[int]) -> int:
    """Return the maximum steps of an evaluation episode, given training lengths.

    Without a limit, a deterministic policy may go in circles for ever.
    """
    return _MORE_STEPS * max((_FEW_STEPS, *lengths))


_TELL_SECONDS = 2.0  # until people are told that a verdict is waited for

#: Gathers events for some seconds, or until something holds.
Drain = Callable[[float, Callable[[], bool]], None]


def why_not_confirmed(config: RunConfig) -> str:
    """Why no evaluator can confirm a solved run, or ""."""
    if not config.driver.confirm:
        return "confirm = false"
    if config.driver.evaluation_seconds > 0:
        return ""  # the run has an evaluator in any case
    if config.env_runner.env.startswith(SCHEME):
        return "an evaluation would need simulators of its own; evaluation_seconds asks for them"
    if config.env_runner.gateway:
        return "an evaluation would take episodes of its simulators; evaluation_seconds asks for it"
    return ""


@dataclass(slots=True)
class _Candidate:
    """Weights that may have solved the task."""

    # The training returns that made them one, as `ReturnGoals` names them
    proposed: dict[str, float]
    episodes: int  # of the run until then
    cut: SnapshotWritten | None = None  # their state on the disk, once it is there
    player: Worker | None = None  # that plays it


class Confirmation:
    """Takes candidates one by one to their verdicts, while training continues.

    A candidate's state is cut as for a checkpoint, and lies aside while an evaluator plays it. If
    it plays well enough, it becomes the run's newest checkpoint; else it is deleted.

    Attributes:
        outcome: for the summary, once the run is solved; None: it is not.
        kept: the candidate that is to be the run's newest checkpoint; None: there is none.
    """

    def __init__(self, parts: RunParts, evaluators: Evaluators) -> None:
        self.outcome: dict[str, Any] | None = None
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
        """Begin with a candidate; return whether the run is solved without confirmation."""
        if self.outcome or self.under_way:
            return False
        proposed = self._goals.proposed(self._metrics)
        if not proposed:
            return False
        if why_not := self._why_not or self._evaluators.why_none_comes():
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
        """Handle a written checkpoint, perhaps the candidate's."""
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
        episodes, cut = self._metrics.candidates.episodes, candidate.cut
        asked = self._evaluators.ask(episodes, cut.update, cut, alone=True, goal=goal)
        candidate.player = next(iter(asked), None)

    def evaluated(
        self, command: training_pb2.Evaluate, evaluation: training_pb2.Evaluation
    ) -> bool:
        """A candidate was played. True: the run is solved."""
        candidate = self._candidate
        if candidate is None or candidate.cut is None:
            return False
        if command.checkpoint != candidate.cut.place:
            return False  # one that was given up
        candidate.player = None
        if not evaluation.episode_returns:
            self.impossible(_NO_SIMULATOR)
            return False
        episodes = len(evaluation.episode_returns)
        played = self._goals.played(
            evaluation.episode_returns, from_messages(evaluation.agent_returns)
        )
        is_reached = self._goals.reached(played)
        if is_reached and episodes < command.episodes:
            self._progress.message(
                f"not confirmed: update {candidate.cut.update} has played {episodes} of "
                f"{command.episodes} episodes, as its simulators left; training goes on"
            )
            self.give_up()
            return False
        if not is_reached:
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
        """Stop confirming candidates, and note why it is impossible."""
        self._why_not = self._why_not or why
        if self._candidate is not None:
            self._let_go()

    def give_up(self) -> None:
        """Give up this candidate; the next one comes later."""
        if self._candidate is not None:
            self._metrics.candidates.put_off(self._candidate.episodes)
        if self.kept is None:
            self._let_go()

    def wait(self, drain: Drain, seconds: float, patience: float) -> None:
        """Wait for the verdict on the last candidate.

        Args:
            drain: gathers events for some seconds, or until something holds.
            patience: seconds for an evaluator to be there.
        """
        drain(_TELL_SECONDS, lambda: not self.under_way)
        if self.under_way:
            how = way_out("Ctrl-C leaves without it")
            self._progress.message(f"waiting for what confirms that the run is solved{how}")
        until = time.monotonic() + patience
        drain(seconds, lambda: not self.under_way or not (self._plays or time.monotonic() < until))

    def overdue(self) -> str:
        """Word what a candidate has waited for since the last call."""
        before, self._waited_for = self._waited_for, self._candidate
        if self._plays or not self.under_way or before is not self._candidate:
            return ""
        if why := self._evaluators.why_none_comes():
            self.give_up()
            return f"a candidate cannot be confirmed: {why}"
        kind = "a gateway with simulators" if self._evaluators.are_gateways else f"{EVALUATOR}-0"
        return f"a candidate waits for {kind}, which is to confirm it: is it stuck?"

    @property
    def _plays(self) -> bool:
        return self._candidate is not None and self._candidate.player is not None

    def _let_go(self) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None and candidate.player and candidate.cut:
            self._evaluators.stop(candidate.player, candidate.cut)
        self._snapshots.let_go(CANDIDATE)


#: In the checkpoint's directory, beside its own files: how it played.
_EVALUATION_FILE = "evaluation.json"
_RECORDED = ("return_mean", "return_deviation", "episodes", "update", "env_steps_trained")


class BestCheckpoint:
    """The checkpoint in `RUN/best`, kept by resumed runs.

    Attributes:
        summary: where it is and how it played, for the summary; None: there is none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / BEST
        self.summary: dict[str, Any] | None = _read(self._directory)

    def is_better(self, returns: Sequence[float]) -> bool:
        """Whether these returns have a higher mean than the best."""
        best = self.summary
        return best is None or Played.of(returns).mean > best["return_mean"]

    def keep(self, path: Path, returns: Sequence[float], trained: Mapping[str, int]) -> str:
        """Move a checkpoint here, or return what prevents it.

        Args:
            trained: its "update" and "env_steps_trained".
        """
        played = Played.of(returns)
        record = {
            "return_mean": played.mean,
            "return_deviation": played.deviation,
            "episodes": played.episodes,
            **trained,
        }
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Before it gets its place: the two are never apart.
            write_synced(path / _EVALUATION_FILE, json.dumps(record).encode() + b"\n")
            kept = adopt(path, self._directory, keep=1)
        except OSError as error:
            return f"cannot keep the best checkpoint in {self._directory}: {error}"
        except CheckpointError as error:
            return str(error)
        self.summary = {"checkpoint": str(kept), **record}
        return ""


def _read(directory: Path) -> dict[str, Any] | None:
    """Read the best checkpoint so far; None: there is none."""
    try:
        path = newest_first(directory)[0]
        record = read_json(path / _EVALUATION_FILE)
        found = {key: record[key] + 0 for key in _RECORDED}
    except (OSError, IndexError, ValueError, TypeError, KeyError):
        return None
    return {"checkpoint": str(path), **found}
