"""A run's league: receives events and carries out its commands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from juggler.driver.checkpoint.first_weights import FirstWeights
from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.league.commands import (
    AddPlayer,
    AssignLineUp,
    CancelMatch,
    Command,
    FreezePlayer,
    Report,
    ResetPlayer,
    RetirePlayer,
)
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.ratings import elo, nash_averaging
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import Player
from juggler.driver.league_players import COPIES, LEAGUE, RESETS, league_of, module_of
from juggler.driver.workers.league_learners import LeagueLearners, LeagueWeights
from juggler.driver.workers.module_setups import spaces_of_environment
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.driver.run_parts import RunParts

_SLOW_SECONDS: Final = 1.0  # limit of a builder's call


class LeagueRun:
    """Passes events to the league, and carries out its commands."""

    def __init__(
        self,
        parts: RunParts,
        resume: Checkpoint | None,
        beginning: Mapping[str, FirstWeights],
    ) -> None:
        config, state = parts.config, None if resume is None else resume.counters.get(LEAGUE)
        self._parts, self._registry, self._progress = parts, parts.registry, parts.progress
        self.league, self._others = league_of(config, state), config.others
        roster = self.league.roster
        self._builder = type(LeagueConfig.from_table(config.agents.league).make_builder()).__name__
        self._slow: set[str] = set()  # calls of the builder that were reported
        self.standings = LeagueStandings(self.league)
        self.matches = LeagueMatches(
            self.league,
            self._request_match,
            config.agent_names,
            config.env_runner.envs_per_runner,
            lambda player_id: module_of(roster.players[player_id]),
        )
        self.weights = LeagueWeights(parts)
        begun = self.league.begin() if state is None else []
        self.learners = LeagueLearners(parts, self, resume, beginning)
        self.league.must_fit = self.learners.must_fit
        if state is None:
            self._carry_out(begun)
        else:
            self._restore()

    # Events.

    def check(self) -> None:
        """Let players play while they have learners and workers have them."""
        on_their_way = self._parts.frozen_parts
        for player in self.league.roster.present():
            player_id, module_id = player.player_id, module_of(player)
            if player.learning:
                can_play = self._parts.trained.can_play(player_id)
            else:
                can_play = self._is_here(module_id) and not on_their_way.awaited(module_id)
            if can_play and not player.ready:
                self.league.ready(player_id)
            elif player.ready and not can_play:
                unready = partial(self.league.unready, player_id)
                self._carry_out(self._timed("match", unready))
        self.weights.check()

    def received(self, worker: Worker, module_id: str) -> None:
        """Note that a worker has received a player."""
        self._parts.frozen_parts.received(worker, module_id)
        self._parts.trained.received(worker, module_id)
        self.check()

    def trained(self, module_id: str, steps: int) -> None:
        """Count steps of a player, and ask the builder for changes."""
        if not steps:
            return
        self.league.trained(module_id, steps)
        self._carry_out(self._timed("build", self.league.build))

    def left(self, worker: Worker) -> None:
        """Handle a lost worker."""
        for match_id in self.matches.left(worker):
            self._carry_out(self._timed("match", partial(self.league.lose_match, match_id)))
        self.check()

    # State for checkpoints and people.

    def counters(self) -> dict[str, Any]:
        """Return the league's part of a checkpoint's counters."""
        copies = [each.player_id for each in self.league.roster.present() if each.parent]
        digests = {each.module_id: each.digest for each in self._registry.frozen.values()}
        return {
            LEAGUE: self.league.to_state(),
            COPIES: {copy_id: digests[copy_id] for copy_id in copies if copy_id in digests},
            RESETS: self.learners.resets(),
        }

    # Commands of the league.

    def _request_match(self) -> None:
        self._carry_out(self._timed("match", self.league.request_match))

    def _timed(self, call: str, work: Callable[[], list[Command]]) -> list[Command]:
        """Return the builder's commands, and warn if it is slow."""
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

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case AssignLineUp() | CancelMatch():
                    self.matches.redraw(command)
                case FreezePlayer():
                    self._copy(command.player_id, command.copy_id)
                case ResetPlayer():
                    self.learners.reset(command.player_id, command.source)
                case RetirePlayer():
                    self.weights.cancel(command.player_id)
                    if self._registry.frozen.pop(command.player_id, None) is not None:
                        self._parts.frozen_parts.remove_player(command.player_id)
                    self.learners.retire(command.player_id)
                case Report():
                    self._progress.message(f"league: {command.message}", "warning")
                case AddPlayer():
                    self._added(command)

    def _added(self, command: AddPlayer) -> None:
        player_id, source = command.player_id, command.source
        if command.learning:
            self.learners.add(player_id)
        elif self._is_here(source):
            self.check()
        else:  # workers have slots for `random` if the run started with it
            text = (
                f"{player_id} cannot play: {source!r} is neither a module with train = false nor "
                "'random' in league.fixed"
            )
            self._progress.message(f"league: {text}", "warning")
            self.removed(player_id)

    def _is_here(self, module_id: str) -> bool:
        """Return whether workers have or will receive a frozen module."""
        return module_id in self._registry.frozen or module_id in self._others

    def _restore(self) -> None:
        """Restore which players are ready, and remove lost ones."""
        for player in self.league.roster.present():
            if not player.learning and not self._is_here(module_of(player)):
                self.removed(player.player_id)
        self.check()  # no learning player can play yet

    def _copy(self, player_id: str, copy_id: str) -> None:
        """Copy a player once it has a learner, which sends its weights.

        They are written into the run's directory once, and sent to every worker that plays. When
        all of them have the copy, it can play.
        """
        keep = partial(self._keep, player_id, copy_id)
        self.weights.ask(player_id, copy_id, keep, partial(self._no_copy, copy_id))

    def _keep(
        self, player_id: str, copy_id: str, weights: Mapping[str, Tree], version: Version
    ) -> None:
        spaces = spaces_of_environment(self._registry.spaces[player_id])
        learned = self._parts.connectors[player_id].merged
        settings_of = self._registry.trained[player_id]
        frozen = FrozenModule.copied(
            copy_id, player_id, self._parts.config, spaces, weights, learned, version, settings_of
        )
        try:
            frozen.keep(self._parts.run_dir)
        except CheckpointError as error:
            return self._no_copy(copy_id, str(error))
        self._registry.frozen[copy_id] = frozen
        self._parts.frozen_parts.add_player(copy_id, frozen.acting_setup(), frozen.tree)
        self.check()

    def _no_copy(self, copy_id: str, why: str) -> None:
        """Report that a copy failed, and remove it."""
        self._progress.message(f"league: there is no copy {copy_id}: {why}", "warning")
        self.removed(copy_id)

    def removed(self, player_id: str) -> None:
        """Remove a player that can no longer play or learn."""
        self._carry_out(self._timed("match", partial(self.league.remove, player_id)))


_FEWEST_AHEAD = 8
_MOST_AHEAD = 64


class LeagueMatches:
    """Gives EnvRunners line-ups for their next episodes.

    An EnvRunner has a line-up for each of its environments, plus twice as many as it finished
    matches in its last round, within bounds: episodes begin between two requests.

    Args:
        request: has the league assign a match, if it can.
        agents: of an environment, in the order of its table.
        module_of: the module of a player.
    """

    def __init__(
        self,
        league: League,
        request: Callable[[], None],
        agents: Sequence[str],
        environments: int,
        module_of: Callable[[str], str],
    ) -> None:
        self._league, self._request, self._agents = league, request, tuple(agents)
        self._environments, self._module_of = environments, module_of
        self._waiting: dict[int, AssignLineUp] = {}  # by match id; for the next request
        self._open: dict[Worker, dict[int, AssignLineUp]] = {}  # by match id
        self._finished: dict[Worker, int] = {}  # number of matches in the last round
        self._rounds: dict[Worker, int] = {}  # number of the last requested round

    def line_ups(self, worker: Worker, round: int) -> list[training_pb2.LineUp]:
        """Return line-ups for the first request of a round."""
        if round and self._rounds.get(worker) == round:
            return []
        self._rounds[worker] = round
        has = self._open.setdefault(worker, {})
        ahead = min(_MOST_AHEAD, max(_FEWEST_AHEAD, 2 * self._finished.get(worker, 0)))
        given = []
        while len(has) < self._environments + ahead:
            if not self._waiting:
                self._request()
            if not self._waiting:
                break
            line_up = self._waiting.pop(next(iter(self._waiting)))
            has[line_up.match_id] = line_up
            players = [self._module_of(line_up.players[agent]) for agent in self._agents]
            given.append(
                training_pb2.LineUp(
                    match_id=line_up.match_id, attempt=line_up.attempt, players=players
                )
            )
        return given

    def finished(self, worker: Worker, matches: Sequence[training_pb2.MatchResult]) -> None:
        """Book results of matches; outdated ones do not count."""
        if not matches:
            return
        has = self._open.get(worker, {})
        for match in matches:
            line_up = has.get(match.match_id)
            if line_up is None or line_up.attempt != match.attempt:
                continue
            rows = zip(self._agents, match.returns, strict=True)
            returns = {agent: value for agent, value in rows if not math.isnan(value)}
            del has[match.match_id]
            self._league.finish_match(match.match_id, match.attempt, returns, match.length)
        self._finished[worker] = len(matches)

    def left(self, worker: Worker) -> list[int]:
        """Return the matches of a lost EnvRunner, to redraw."""
        self._finished.pop(worker, None)
        self._rounds.pop(worker, None)
        return list(self._open.pop(worker, {}))

    def redraw(self, command: AssignLineUp | CancelMatch) -> None:
        """Let others play a match, or cancel it."""
        if isinstance(command, CancelMatch) or command.attempt:
            for has in (self._waiting, *self._open.values()):
                has.pop(command.match_id, None)
        if isinstance(command, AssignLineUp):
            self._waiting[command.match_id] = command


_MOST_SHOWN = 32  # maximum number of players in a line of metrics
_MOST_KINDS = 64
_MOST_IN_EQUILIBRIA = (
    128  # players: with more it takes seconds, during which the driver does nothing else
)
_SHARE = 0.02  # maximum share of the driver's time for ratings


class LeagueStandings:
    """Rates players, in at most 2 % of the time."""

    def __init__(self, league: League) -> None:
        self._league = league
        self._ratings: dict[str, float] = {}
        self._equilibrium: dict[str, float] = {}
        self._next = float("-inf")

    def line(self) -> dict[str, Any]:
        """Return the standings for a line of metrics.

        Ratings may be some seconds old. Of each of at most 32 learning players: its Elo rating,
        relative to the mean of all players that can play; its win rate against all opponents
        together, with the 95 % Wilson interval; and its probability in the Nash equilibrium. None:
        no games, or a player without a rating. Of pairs of roles, as in "main, historical": games,
        and the win rate of the first role.
        """
        roster, results = self._league.roster, self._league.results()
        playing = results.players()
        self._rate(playing)
        learning = [each for each in roster.learners() if each.plays][:_MOST_SHOWN]
        return {
            "players": len(playing),
            "historical": sum(not roster.players[each].learning for each in playing),
            "learning": {each.player_id: self._standing(each, results) for each in learning},
            "kinds": self._kinds(),
        }

    def _standing(self, player: Player, results: LeagueResults) -> dict[str, Any]:
        name = player.player_id
        rate = results.overall_win_rate(name, 1)
        low, high = (None, None) if rate is None else results.overall_interval(name)
        return {
            "elo": self._ratings.get(name, 0.0),
            "win_rate": rate,
            "win_rate_low": low,
            "win_rate_high": high,
            "nash": self._equilibrium.get(name),
            "steps": player.steps,
            "copies": player.copies,
            "resets": player.life,
        }

    def _rate(self, playing: list[str]) -> None:
        before = time.monotonic()
        if before < self._next:
            return
        payoffs = self._league.payoffs
        self._ratings, self._equilibrium = elo(payoffs, playing), {}
        if len(playing) <= _MOST_IN_EQUILIBRIA:
            self._equilibrium, _ = nash_averaging(payoffs, playing)
        after = time.monotonic()
        self._next = after + (after - before) / _SHARE

    def _kinds(self) -> dict[str, dict[str, float]]:
        found = {}
        for each in list(self._league.payoffs.kinds.values())[:_MOST_KINDS]:
            games = int(each.weight)
            # The learning role comes first, because people ask about it.
            turned = each.first == "historical" or each.first == "fixed"
            names = (each.second, each.first) if turned else (each.first, each.second)
            points = (each.losses if turned else each.wins) + each.draws / 2
            found[", ".join(names)] = {"games": games, "win_rate": points / games}
        return found
