"""Carries out a league: line-ups, results, copies, learners."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from juggler.driver.agent_tables import COPIES, LEAGUE, RESETS, league_of, module_of
from juggler.driver.checkpoint.first_weights import FirstWeights, FrozenModule
from juggler.driver.checkpoint.snapshots import state_reader
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.ratings import elo, nash_averaging
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import (
    INITIAL,
    AddPlayer,
    AssignLineUp,
    Command,
    FreezePlayer,
    Player,
    Report,
    ResetPlayer,
    RetirePlayer,
)
from juggler.driver.workers.module_setups import spaces_of_environment
from juggler.runtime.actors.hub import Worker
from juggler.runtime.actors.worker import worker_seed
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError
from juggler.runtime.checkpoints.weights import WEIGHTS, weights_of
from juggler.runtime.connectors.mergeable_state import State, connector_state
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.trees import Path as TreePath
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.driver.run_parts import RunParts


class LeagueLearners:
    """Adds, resets and retires learning players.

    A player begins with new weights, with the weights of a frozen player, or with the current
    weights of another learning player. It has the settings of the player that it descends from, or
    of the first player with its role.
    """

    def __init__(
        self,
        parts: RunParts,
        league: LeagueRun,
        resume: Checkpoint | None,
        beginning: Mapping[str, FirstWeights],
    ) -> None:
        self._first, self._seed = parts.config.module_ids, parts.config.driver.seed
        self._core, self._registry, self._trained = parts.core, parts.registry, parts.trained
        self._progress, self._beginning, self._league = parts.progress, beginning, league
        self._roster, self._weights = league.league.roster, league.weights
        if resume is not None:
            resets = resume.counters.get(RESETS, {})
            for player in self._roster.learners():
                player_id = player.player_id
                if player_id not in resume.module_ids:
                    self._restart_player(player, resume)
                elif resume.version_of(player_id)[0] < resets.get(player_id, 0):
                    self._repeat_reset(player)

    def add(self, player_id: str) -> None:
        """Train a player, unless it was there from the start."""
        source = self._roster.players[player_id].source
        if player_id in self._core.modules:
            return
        if self._is_here(source):
            self._train(player_id, self._first_weights(player_id, source))
        elif source in self._core.modules:
            then = partial(self._train_with, player_id, source)
            self._weights.ask(source, player_id, then, partial(self._cannot, player_id))
        else:
            self._cannot(player_id, f"{source!r} has no weights here to start from")

    def must_fit(self, player_id: str, source: str) -> None:
        """Check that a player can be `reset` to these weights."""
        first = self._first_weights(player_id, source)
        if source != INITIAL and first and (other := self._other_network(player_id, first)):
            raise ValueError(f"{player_id} cannot be reset to {source}: {other}")

    def reset(self, player_id: str, source: str) -> None:
        """Give a player other weights, a new optimizer and new schedules."""
        self._weights.was_reset(player_id)
        self._trained.reset(player_id, *self._new_life(player_id, source))

    def resets(self) -> dict[str, int]:
        """Return generations of players' first weights after their last resets."""
        last = {
            each.player_id: self._trained.learners[each.player_id].last_reset
            for each in self._roster.learners()
            if each.player_id in self._trained.learners
        }
        return {player_id: reset.generation for player_id, reset in last.items() if reset}

    def retire(self, player_id: str) -> None:
        """Stop training a player."""
        if player_id in self._core.modules:
            self._trained.remove(player_id)
            self._progress.message(f"league: {player_id} has left, and no longer learns", "info")

    def forget_settled(self) -> None:
        """Forget players that have left, unless a worker waits for their weights."""
        needed = self.needed()
        for player_id in self._trained.settled():
            if player_id not in needed and not self._weights.wanted_of(player_id):
                self._trained.forget(player_id)

    def needed(self) -> set[str]:
        """Return sources of players that have had no learner yet.

        A checkpoint is missing these players, so a resumed run needs their sources.
        """
        begun = {module.module_id for module in self._core.in_checkpoints()}
        return {each.source for each in self._roster.learners() if each.player_id not in begun}

    def _train_with(
        self, player_id: str, source: str, weights: Mapping[str, Tree], _: Version
    ) -> None:
        learned = self._trained.connectors[source].merged
        self._train(player_id, _copied(player_id, weights, learned, source))

    def _train(self, player_id: str, first: FirstWeights | None) -> None:
        model = self._roster.modelled_on(player_id, self._first)
        if first and (other := self._other_network(player_id, first)):
            return self._cannot(player_id, other)
        try:
            self._trained.add(player_id, model, first)
        except ValueError as error:
            return self._cannot(player_id, str(error))
        begins_with = first.text if first else "new weights"
        self._progress.message(f"league: {player_id} is new, and learns from {begins_with}", "info")

    def _cannot(self, player_id: str, why: str) -> None:
        self._progress.message(f"league: {player_id} cannot learn: {why}", "warning")
        self._league.removed(player_id)

    def _other_network(self, player_id: str, first: FirstWeights) -> str:
        """Describe how weights do not fit a player's network, or ""."""
        if not first.whole:
            return ""
        model, known = self._roster.modelled_on(player_id, self._first), self._registry.frozen
        copies = (
            known[each.player_id]
            for each in self._roster.present()
            if each.player_id in known
            and each.parent
            and self._roster.modelled_on(each.parent, self._first) == model
        )
        # Without a copy, the shapes are unknown here.
        if (copy := next(copies, None)) is None:
            return ""
        own, given = _shapes(copy.tree[WEIGHTS]), _shapes(first.weights)
        for path in {**own, **given}:
            has, gets = own.get(path, "nothing"), given.get(path, "nothing")
            if has != gets:
                return (
                    f"{first.text} are of another network: at {'.'.join(path)!r}, {player_id} "
                    f"has {has}, and these weights have {gets}"
                )
        return ""

    def _new_life(self, player_id: str, source: str) -> tuple[int, FirstWeights | None]:
        """Return seed and first weights of a player that is reset."""
        life = self._roster.players[player_id].life
        seed = worker_seed(self._seed, player_id, index=life)
        first = self._first_weights(player_id, source)
        if first is not None:
            words = f"league: {player_id}, reset to {first.text}"
            first = replace(first, source=words, selectable=False)
        return seed, first

    def _is_here(self, source: str) -> bool:
        """Return whether no learner has to be asked for these weights."""
        return source == INITIAL or self._module(source) in self._registry.frozen

    def _first_weights(self, player_id: str, source: str) -> FirstWeights | None:
        """Return weights that are here for a player; None: new weights."""
        if source == INITIAL:
            return self._beginning.get(self._roster.modelled_on(player_id, self._first))
        frozen = self._registry.frozen[self._module(source)]
        learned = connector_state(frozen.checkpoint, frozen.source)
        return _copied(player_id, frozen.tree[WEIGHTS], learned, source)

    def _module(self, source: str) -> str:
        """Return the module of a player that another one copies."""
        player = self._roster.players.get(source)
        return source if player is None else module_of(player)

    def _restart_player(self, player: Player, resume: Checkpoint) -> None:
        """Start a player that is missing from the checkpoint."""
        player_id, source = player.player_id, player.source
        first = None
        if self._is_here(source):
            first = self._first_weights(player_id, source)
        elif source in resume.module_ids:
            weights, learned = weights_of(resume)[source], connector_state(resume, source)
            first = _copied(player_id, weights, learned, source)
        else:
            self._progress.message(
                f"league: {player_id} starts again with new weights, since the weights of {source} "
                "are not in the checkpoint",
                "warning",
            )
        if first is not None:
            self._trained.begin_with(player_id, first)

    def _repeat_reset(self, player: Player) -> None:
        """Repeat a reset that happened after the checkpoint's state."""
        player_id, source = player.player_id, player.reset_to
        if not self._is_here(source):
            has_left = self._roster.players[source].retired
            why = f"{source} has been retired" if has_left else f"the weights of {source} are lost"
            text = f"is reset to its first weights, since {why}"
            self._progress.message(f"league: {player_id} {text}", "warning")
            source = INITIAL
        self._trained.reset_first(player_id, *self._new_life(player_id, source))


def _shapes(weights: Tree) -> dict[TreePath, str]:
    """Return the shapes of arrays, for people, by path."""
    return {path: f"shape {list(array.shape)}" for path, array in flatten(weights)}


def _copied(player_id: str, weights: Any, learned: State, source: str) -> FirstWeights:
    """Make first weights from another player's weights and connectors."""
    text = f"the weights of {source}"
    words = f"league: {player_id}, new with {text}"
    return FirstWeights(weights, True, text, words, learned=learned)


@dataclass(slots=True, eq=False)
class _Wanted:
    """A request for a player's weights."""

    player_id: str  # the player with the weights
    for_id: str  # the player that will get them
    then: Callable[[Mapping[str, Tree], Version], None]  # called with the weights
    failed: Callable[[str], None]  # called with the reason if there are none
    reader: FrameReader[training_pb2.StateHeader]  # joins the learner's answers
    # The player was reset since: only the same learner can send them
    has_others: bool = False


class LeagueWeights:
    """Asks learners for weights of players until one answers."""

    def __init__(self, parts: RunParts) -> None:
        self._registry, self._commands = parts.registry, parts.commands
        self._waiting: list[_Wanted] = []  # for a learner of the player
        self._asked: dict[int, _Wanted] = {}  # by command id

    def ask(
        self,
        player_id: str,
        for_id: str,
        then: Callable[[Mapping[str, Tree], Version], None],
        failed: Callable[[str], None],
    ) -> None:
        """Ask for a player's weights once it has a learner."""
        self._waiting.append(_Wanted(player_id, for_id, then, failed, state_reader()))
        self.check()

    def check(self) -> None:
        """Ask new learners for the requested weights."""
        waiting, self._waiting = self._waiting, []
        for wanted in waiting:
            learners = self._registry.learners_of(wanted.player_id)
            if not learners:
                self._waiting.append(wanted)
                continue
            snapshot = training_pb2.Snapshot(module_id=wanted.player_id, whole=True)
            command_id = self._commands.pool.submit(learners[0], snapshot)
            self._asked[command_id] = wanted

    def receive(self, command_id: int, chunk: bytes, last: bool) -> None:
        """Handle a learner's answer."""
        if (wanted := self._asked.get(command_id)) is None:
            return  # the weights are no longer needed
        if last:
            del self._asked[command_id]
        if (frame := wanted.reader.feed(chunk)) is not None:
            tree: Any = frame.tree
            if DEFAULT_MODULE in tree:
                wanted.then(tree[DEFAULT_MODULE], Version.of(frame.header.version))
            else:
                wanted.failed("its learner has no weights by name")

    def abandoned(self, command_id: int) -> None:
        """Ask again for weights that a learner did not send."""
        if (wanted := self._asked.pop(command_id, None)) is None:
            return
        if wanted.has_others:
            wanted.failed("its learner sent no weights, and other learners have restarted")
        else:
            self.ask(wanted.player_id, wanted.for_id, wanted.then, wanted.failed)

    def was_reset(self, player_id: str) -> None:
        """Note that a player was reset after its weights were requested."""
        for wanted in self._asked.values():
            wanted.has_others = wanted.has_others or wanted.player_id == player_id

    def cancel(self, for_id: str) -> None:
        """Cancel the requests for a player."""
        self._waiting = [each for each in self._waiting if each.for_id != for_id]
        asked = self._asked.items()
        self._asked = {number: each for number, each in asked if each.for_id != for_id}

    def wanted_of(self, player_id: str) -> bool:
        """Return whether weights of this player are requested."""
        wanted = (*self._waiting, *self._asked.values())
        return any(each.player_id == player_id for each in wanted)


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
            partial(self._do, "match", self.league.request_match),
            config.agent_names,
            config.env_runner.envs_per_runner,
            lambda player_id: module_of(roster.players[player_id]),
        )
        self.weights = LeagueWeights(parts)
        # Learners are made from the roster, which must be complete.
        begun = self.league.begin() if state is None else []
        self.learners = LeagueLearners(parts, self, resume, beginning)
        self.league.must_fit = self.learners.must_fit
        if state is None:
            self._carry_out(begun)
        else:
            self._restore()

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
                self.league.unready(player_id)
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
        self._do("build", self.league.build)

    def left(self, worker: Worker) -> None:
        """Handle a lost worker."""
        self.matches.left(worker)
        self.check()

    def counters(self) -> dict[str, Any]:
        """Return the league's part of a checkpoint's counters."""
        copies = [each.player_id for each in self.league.roster.present() if each.parent]
        digests = {each.module_id: each.digest for each in self._registry.frozen.values()}
        return {
            LEAGUE: self.league.to_state(),
            COPIES: {copy_id: digests[copy_id] for copy_id in copies if copy_id in digests},
            RESETS: self.learners.resets(),
        }

    def _do(self, call: str, work: Callable[[], list[Command]]) -> list[Command]:
        """Carry out and return the builder's commands; warn if it is slow."""
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
        self._carry_out(commands)
        return commands

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case FreezePlayer():
                    self._copy(command.player_id, command.copy_id)
                case ResetPlayer():
                    self.learners.reset(command.player_id, command.source)
                # A retired copy may still wait for its weights.
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
        """Copy a player once it has a learner, which sends its weights."""
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
        self.league.remove(player_id)


_FEWEST_AHEAD = 8
_MOST_AHEAD = 64


class LeagueMatches:
    """Gives EnvRunners line-ups for their next episodes.

    An EnvRunner has a line-up for each of its environments, plus twice as many as it finished
    matches in its last round, within bounds: episodes begin between two requests.
    """

    def __init__(
        self,
        league: League,
        request: Callable[[], list[Command]],
        agents: Sequence[str],
        environments: int,
        module_of: Callable[[str], str],
    ) -> None:
        self._league, self._request, self._agents = league, request, tuple(agents)
        self._environments, self._module_of = environments, module_of
        self._given: dict[Worker, set[int]] = {}  # ids of matches
        self._finished: dict[Worker, int] = {}  # number of matches in the last round
        self._rounds: dict[Worker, int] = {}  # number of the last requested round

    def line_ups(self, worker: Worker, round: int) -> list[training_pb2.LineUp]:
        """Return line-ups for the first request of a round."""
        if round and self._rounds.get(worker) == round:
            return []
        self._rounds[worker] = round
        # Matches whose players have left count no more, and others are played instead.
        has = self._given[worker] = set(filter(self._league.is_open, self._given.get(worker, ())))
        ahead = min(_MOST_AHEAD, max(_FEWEST_AHEAD, 2 * self._finished.get(worker, 0)))
        given = []
        while len(has) < self._environments + ahead:
            drawn = [each for each in self._request() if isinstance(each, AssignLineUp)]
            if not drawn:
                break
            for line_up in drawn:
                has.add(line_up.match_id)
                players = [self._module_of(line_up.players[agent]) for agent in self._agents]
                given.append(training_pb2.LineUp(match_id=line_up.match_id, players=players))
        return given

    def finished(self, worker: Worker, matches: Sequence[training_pb2.MatchResult]) -> None:
        """Book results of matches; outdated ones do not count."""
        if not matches:
            return
        has = self._given.get(worker, set())
        for match in matches:
            if match.match_id in has:
                has.remove(match.match_id)
                rows = zip(self._agents, match.returns, strict=True)
                returns = {agent: value for agent, value in rows if not math.isnan(value)}
                self._league.finish_match(match.match_id, returns, match.length)
        self._finished[worker] = len(matches)

    def left(self, worker: Worker) -> None:
        """Cancel the matches of a lost EnvRunner."""
        self._finished.pop(worker, None)
        self._rounds.pop(worker, None)
        for match_id in self._given.pop(worker, ()):
            self._league.cancel_match(match_id)


_MOST_SHOWN = 32  # maximum number of players in a line of metrics
_MOST_KINDS = 64
#: Maximum number of players in an equilibrium. With more it takes seconds, during which the driver
#: does nothing else.
_MOST_IN_EQUILIBRIA = 128
_SHARE = 0.02  # maximum share of the driver's time for ratings


class LeagueStandings:
    """Rates players, in at most 2 % of the time."""

    def __init__(self, league: League) -> None:
        self._league = league
        self._ratings: dict[str, float] = {}
        self._equilibrium: dict[str, float] = {}
        self._next = float("-inf")

    def line(self) -> dict[str, Any]:
        """Return the standings for a line of metrics; see docs/run-directory.md."""
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
            self._equilibrium = nash_averaging(payoffs, playing)
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
