"""The league of a run: what happens is told to it, and what it wants is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.league import events
from juggler.driver.league.ratings import elo
from juggler.driver.league_players import league_of, module_of
from juggler.driver.record.progress import Progress
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.connector_state import ConnectorState
from juggler.driver.workers.frozen_parts import FrozenParts
from juggler.driver.workers.league_copies import LeagueCopies
from juggler.driver.workers.league_matches import LeagueMatches
from juggler.driver.workers.registry import WorkerRegistry
from juggler.envrunner.setup import RANDOM
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.seeds import worker_seed
from juggler.runtime.checkpoints.frozen import WEIGHTS
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

#: What a checkpoint's counters call the league.
LEAGUE: Final = "league"
_MOST_TOLD = 32  # players in a line of metrics


class LeagueRun:
    """Tells the league what happens in a run, and carries out its commands.

    Args:
        config: of the run, with a table `league`.
        run_dir: its directory.
        core: knows which modules have learners.
        registry: who is here.
        commands: reaches them.
        connectors: by module id, what its connectors have learned.
        frozen_parts: sends workers what players play with that do not learn.
        progress: shows people what happens.
        state: of the league, from a checkpoint; None: a new one.
        began_with: by module id, the weights of another run with which it began.

    Attributes:
        league: the players, and their results.
        matches: on their way.
        copies: on their way.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        core: DriverCore,
        registry: WorkerRegistry,
        commands: CommandSender,
        connectors: Mapping[str, ConnectorState],
        frozen_parts: FrozenParts,
        progress: Progress,
        state: Mapping[str, Any] | None,
        began_with: Mapping[str, Tree],
    ) -> None:
        self._seed, self._began_with = config.driver.seed, began_with
        self._core, self._registry, self._progress = core, registry, progress
        self.league = league_of(config, state)
        self.matches = LeagueMatches(
            self.league.book,
            config.agent_names,
            config.env_runner.envs_per_runner,
            lambda player_id: module_of(self.league.roster.players[player_id]),
        )
        self.copies = LeagueCopies(
            config,
            run_dir,
            registry,
            commands,
            connectors,
            frozen_parts,
            self._copy_is_ready,
            self._no_copy,
        )
        if state is None:
            self._carry_out(self.league.begin())
        else:
            self._go_on()

    # What happens.

    def look(self) -> None:
        """Learners came or went: players that learn can play while they have one."""
        for player in self.league.roster.learners():
            has_learner = bool(self._core.modules[player.player_id].members)
            if has_learner and not player.ready:
                self._book(events.PlayerReady(player.player_id))
            elif player.ready and not has_learner:
                self._book(events.PlayerLost(player.player_id))
        self.copies.look()

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
        self._carry_out(self.league.build())

    def left(self, worker: Worker) -> None:
        """A worker is gone."""
        self._carry_out(self.matches.left(worker))
        self.copies.left(worker)

    # What people, checkpoints and others are told.

    @property
    def retired(self) -> set[str]:
        """Players that are gone, and may have played until a moment ago."""
        players = self.league.roster.players.values()
        return {player.player_id for player in players if player.retired}

    def to_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self.league.to_state()

    def line(self) -> dict[str, Any]:
        """For a line of metrics: how many players there are, and how those that learn do."""
        roster, results = self.league.roster, self.league.results()
        playing = results.players()
        ratings = elo(self.league.payoffs, playing) if playing else {}
        learners = [each for each in roster.learners() if each.player_id in ratings]
        return {
            "players": len(playing),
            "historical": sum(not roster.players[each].learning for each in playing),
            "learning": {
                each.player_id: {
                    "elo": ratings[each.player_id],
                    "win_rate": results.overall_win_rate(each.player_id, 1),
                    "steps": each.steps,
                    "copies": each.copies,
                    "resets": each.life,
                }
                for each in learners[:_MOST_TOLD]
            },
        }

    # What the league wants.

    def _book(self, event: events.Event) -> None:
        self._carry_out(self.league.book(event))

    def _carry_out(self, commands: Iterable[events.Command]) -> None:
        for command in commands:
            match command:
                case events.AssignLineUp() | events.CancelMatch():
                    self.matches.redraw(command)
                case events.Freeze():
                    self.copies.copy(command.player_id, command.copy_id)
                case events.Reset():
                    self._reset(command)
                case events.Retire():
                    self.copies.retire(command.player_id)
                case events.Report():
                    self._progress.message(f"league: {command.message}", "warning")
                case events.Add():
                    self._added(command)

    def _added(self, command: events.Add) -> None:
        """Those that learn are modules of the run, and ready when they have learners."""
        known = {*self._core.modules, *self._registry.frozen}
        if command.learning and command.player_id not in known:
            self._progress.message(
                f"league: {command.player_id} cannot learn: players that learn are there from the "
                "beginning of a run, so a builder names them in `initial`",
                "warning",
            )
            self._book(events.PlayerRemoved(command.player_id))
        elif not command.learning:
            self._book(events.PlayerReady(command.player_id))

    def _reset(self, command: events.Reset) -> None:
        """In its learners, commands are carried out in their order: no update is half-way."""
        player_id, source = command.player_id, command.source
        life = self.league.roster.players[player_id].life
        if source == events.INITIAL and player_id in self._began_with:
            self.copies.reset(player_id, self._began_with[player_id], source)
        elif source == events.INITIAL:
            self.copies.begin_anew(player_id, worker_seed(self._seed, player_id, index=life))
        elif source in self._registry.frozen:
            self.copies.reset(player_id, self._registry.frozen[source].tree[WEIGHTS], source)
        else:
            text = f"league: {player_id} goes on as it is: {source!r} is no copy to begin from"
            self._progress.message(text, "warning")
        self._book(events.PlayerReady(player_id))

    def _go_on(self) -> None:
        """What was saved may name copies that are lost."""
        for player in self.league.roster.present():
            if not player.learning and module_of(player) not in {RANDOM, *self._registry.frozen}:
                self._no_copy(player.player_id, "its weights are not in the directory of the run")

    def _copy_is_ready(self, copy_id: str) -> None:
        self._book(events.PlayerReady(copy_id))

    def _no_copy(self, copy_id: str, why: str) -> None:
        self._progress.message(f"league: there is no copy {copy_id}: {why}", "warning")
        self._book(events.PlayerRemoved(copy_id))
