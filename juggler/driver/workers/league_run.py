"""The league of a run: what happens is told to it, and what it wants is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.league import events
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league_players import COPIES, LEAGUE, RESETS, league_of, module_of
from juggler.driver.record.progress import Progress
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.frozen_parts import FrozenParts
from juggler.driver.workers.league_copies import LeagueCopies
from juggler.driver.workers.league_learners import LeagueLearners
from juggler.driver.workers.league_matches import LeagueMatches
from juggler.driver.workers.league_standings import LeagueStandings
from juggler.driver.workers.league_weights import LeagueWeights
from juggler.driver.workers.registry import WorkerRegistry
from juggler.driver.workers.trained_modules import TrainedModules
from juggler.envrunner.setup import RANDOM
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.wire.v1 import training_pb2

_SLOW_SECONDS: Final = 1.0  # of a builder's call


class LeagueRun:
    """Tells the league what happens in a run, and carries out its commands.

    Args:
        config: of the run, with a table `league`.
        run_dir: its directory.
        core: knows which modules have learners.
        registry: who is here.
        commands: reaches them.
        trained: the players that learn.
        frozen_parts: sends workers what players play with that do not learn.
        progress: shows people what happens.
        resume: what the run goes on from; None: it is new.
        beginning: what the run began with that another one has learned.

    Attributes:
        league: the players, and their results.
        matches: on their way.
        weights: of players that learn, on their way.
        copies: on their way.
        learners: players that learn, and come and go.
        retired: players that are gone, and may have played until a moment ago.
        standings: how they do.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        core: DriverCore,
        registry: WorkerRegistry,
        commands: CommandSender,
        trained: TrainedModules,
        frozen_parts: FrozenParts,
        progress: Progress,
        resume: Checkpoint | None,
        beginning: Beginning | None,
    ) -> None:
        state = None if resume is None else resume.counters.get(LEAGUE)
        self._registry, self._trained, self._progress = registry, trained, progress
        self.league = league_of(config, state)
        roster = self.league.roster
        self._builder = type(LeagueConfig.from_table(config.agents.league).make_builder()).__name__
        self._slow: set[str] = set()  # calls of the builder that people have been told of
        self.standings = LeagueStandings(self.league)
        self.retired = {each.player_id for each in roster.players.values() if each.retired}
        self.matches = LeagueMatches(
            self._asked_for,
            config.agent_names,
            config.env_runner.envs_per_runner,
            lambda player_id: module_of(roster.players[player_id]),
        )
        self.weights = LeagueWeights(registry, commands)
        self.copies = LeagueCopies(
            config,
            run_dir,
            registry,
            commands,
            trained.connectors,
            frozen_parts,
            self.weights,
            self._copy_is_ready,
            self._no_copy,
        )
        if state is None:
            begun = self.league.begin()
        self.learners = LeagueLearners(
            config,
            core,
            registry,
            roster,
            trained,
            self.weights,
            progress,
            resume,
            beginning,
            self._removed,
        )
        if state is None:
            self._carry_out(begun)
        else:
            self._go_on()

    # What happens.

    def look(self) -> None:
        """Learners came or went: players that learn can play while they have one, once every worker
        has them."""
        for player in self.league.roster.learners():
            can_play = self._trained.can_play(player.player_id)
            if can_play and not player.ready:
                self._book(events.PlayerReady(player.player_id))
            elif player.ready and not can_play:
                self._book(events.PlayerLost(player.player_id))
        self.weights.look()

    def received(self, worker: Worker, module_id: str) -> None:
        """A worker that plays has a player that it was sent."""
        self.copies.received(worker, module_id)
        self._trained.received(worker, module_id)
        self.look()

    def line_ups(self, worker: Worker, round: int) -> Sequence[training_pb2.LineUp]:
        """What a request tells an EnvRunner of the matches that it is to play."""
        return self.matches.line_ups(worker, round)

    def finished(self, worker: Worker, matches: Sequence[training_pb2.MatchResult]) -> None:
        """Matches are over.

        Raises:
            ValueError: the EnvRunner tells what cannot be.
        """
        if matches:
            self._carry_out(self.matches.finished(worker, matches))

    def trained(self, module_id: str, steps: int) -> None:
        """A player was trained on so many steps. Now and then, the builder is asked for changes."""
        if not steps:
            return
        self._book(events.StepsTrained(module_id, steps))
        must_fit = self.learners.must_fit
        self._carry_out(self._timed("build", lambda: self.league.build(must_fit)))

    def left(self, worker: Worker) -> None:
        """A worker is gone."""
        self._trained.left(worker)
        self._carry_out(self.matches.left(worker))
        self.copies.left(worker)
        self.look()

    # What people, checkpoints and others are told.

    def counters(self) -> dict[str, Any]:
        """What a checkpoint's counters have of it."""
        copies = [each.player_id for each in self.league.roster.present() if each.parent]
        digests = {each.module_id: each.digest for each in self._registry.frozen.values()}
        return {
            LEAGUE: self.league.to_state(),
            COPIES: {copy_id: digests[copy_id] for copy_id in copies if copy_id in digests},
            RESETS: self.learners.resets(),
        }

    # What the league wants.

    def _asked_for(self, event: events.Event) -> list[events.Command]:
        """What the league wants because of an event, without what people are told."""
        commands = self._timed("match", lambda: self.league.book(event))
        reports = [each for each in commands if isinstance(each, events.Report)]
        self._carry_out(reports)
        return [each for each in commands if each not in reports]

    def _book(self, event: events.Event) -> None:
        self._carry_out(self._timed("match", lambda: self.league.book(event)))

    def _timed(self, call: str, work: Callable[[], list[events.Command]]) -> list[events.Command]:
        """What the league wants. The run waits meanwhile, so people are told of a slow builder."""
        before = time.monotonic()
        commands = work()
        seconds = time.monotonic() - before
        if seconds > _SLOW_SECONDS and call not in self._slow:
            self._slow.add(call)
            self._progress.message(
                f"league: {self._builder}.{call} took {seconds:.1f} s, in which the driver could "
                "do nothing else: make it faster",
                "warning",
            )
        return commands

    def _carry_out(self, commands: Iterable[events.Command]) -> None:
        for command in commands:
            match command:
                case events.AssignLineUp() | events.CancelMatch():
                    self.matches.redraw(command)
                case events.FreezePlayer():
                    self.copies.copy(command.player_id, command.copy_id)
                case events.ResetPlayer():
                    self.learners.reset(command.player_id, command.source)
                case events.RetirePlayer():
                    self.retired.add(command.player_id)
                    self.copies.retire(command.player_id)
                    self.learners.retire(command.player_id)
                case events.Report():
                    self._progress.message(f"league: {command.message}", "warning")
                case events.AddPlayer():
                    self._added(command)

    def _added(self, command: events.AddPlayer) -> None:
        player_id, source = command.player_id, command.source
        if command.learning:
            self.learners.add(player_id)
        elif source in {RANDOM, *self._registry.frozen}:
            self._book(events.PlayerReady(player_id))
        else:
            text = f"{player_id} cannot play: {source!r} is no module with train = false"
            self._progress.message(f"league: {text}", "warning")
            self._removed(player_id)

    def _go_on(self) -> None:
        """What was saved may name copies that are lost, as people have been told, and copies that
        not every EnvRunner had: those that come now get all of them before anything else."""
        for player in self.league.roster.present():
            if player.learning:
                continue
            if module_of(player) in {RANDOM, *self._registry.frozen}:
                self._book(events.PlayerReady(player.player_id))
            else:
                self._removed(player.player_id)
        self.look()  # nobody that learns can play yet

    def _copy_is_ready(self, copy_id: str) -> None:
        self._book(events.PlayerReady(copy_id))

    def _no_copy(self, copy_id: str, why: str) -> None:
        self._progress.message(f"league: there is no copy {copy_id}: {why}", "warning")
        self._removed(copy_id)

    def _removed(self, player_id: str) -> None:
        self.retired.add(player_id)
        self._book(events.PlayerRemoved(player_id))
