"""Carries out a league: line-ups, results, copies, learners."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from juggler.driver.reporting.wording import Level
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


@dataclass(slots=True, eq=False)
class _Wanted:
    """A request for a learning player's weights."""

    player_id: str  # the player with the weights
    for_id: str  # the copy, or the learning player, that will get them
    command_id: int | None = None  # of the learner that sends them; None: it waits for a learner
    reader: FrameReader[training_pb2.StateHeader] = field(default_factory=state_reader)
    # The player was reset since: only the same learner can send them
    has_others: bool = False


@dataclass(slots=True)
class _Matches:
    """The matches of one EnvRunner."""

    given: set[int] = field(default_factory=set)  # ids of matches without a result
    finished: int = 0  # in the last round
    round: int = 0  # number of the last requested round


_SLOW_SECONDS: Final = 1.0  # limit of a builder's call
_FEWEST_AHEAD = 8
_MOST_AHEAD = 64


class LeagueRun:
    """Passes events to the league, and carries out its commands.

    A learning player begins with new weights, with the weights of a frozen player, or with the
    current weights of another learning player. It has the settings of the player that it descends
    from, or of the first player with its role. Weights of learning players, also for copies, come
    from their learners.
    """

    def __init__(
        self,
        parts: RunParts,
        resume: Checkpoint | None,
        beginning: Mapping[str, FirstWeights],
    ) -> None:
        config, state = parts.config, None if resume is None else resume.counters.get(LEAGUE)
        self._parts, self._registry, self._trained = parts, parts.registry, parts.trained
        self.league, self._beginning = league_of(config, state), beginning
        self._roster = self.league.roster
        self._builder = type(LeagueConfig.from_table(config.agents.league).make_builder()).__name__
        self._slow: set[str] = set()  # calls of the builder that were reported
        self._wanted: list[_Wanted] = []
        self.standings = LeagueStandings(self.league)
        self._matches: dict[Worker, _Matches] = defaultdict(_Matches)
        # Learners are made from the roster, which must be complete.
        begun = self.league.begin() if state is None else []
        if resume is not None:
            self._resume(resume)
        self.league.must_fit = self._must_fit
        self._carry_out(begun)
        if state is not None:
            # Copies may be lost.
            for player in self._roster.present():
                if not player.learning and not self._can_be_sent(module_of(player)):
                    self.league.remove(player.player_id)
            self.check()  # no learning player can play yet

    def _resume(self, resume: Checkpoint) -> None:
        """Repeat additions and resets after the checkpoint's states."""
        resets = resume.counters.get(RESETS, {})
        for player in self._roster.learners():
            player_id = player.player_id
            if player_id not in resume.module_ids:
                self._restart_player(player, resume)
            elif resume.version_of(player_id)[0] < resets.get(player_id, 0):
                self._repeat_reset(player)

    def check(self) -> None:
        """Let players play while they have learners and workers have them."""
        on_their_way = self._parts.frozen_parts
        for player in self._roster.present():
            player_id, module_id = player.player_id, module_of(player)
            if player.learning:
                can_play = self._trained.can_play(player_id)
            else:
                can_play = self._can_be_sent(module_id) and not on_their_way.awaited(module_id)
            if can_play and not player.ready:
                self.league.ready(player_id)
            elif player.ready and not can_play:
                self.league.unready(player_id)
        self._ask_learners()

    def received(self, worker: Worker, module_id: str) -> None:
        """Note that a worker has received a player."""
        self._parts.frozen_parts.received(worker, module_id)
        self._trained.received(worker, module_id)
        self.check()

    def trained(self, module_id: str, steps: int) -> None:
        """Count steps of a player, and ask the builder for changes."""
        if not steps:
            return
        self.league.trained(module_id, steps)
        self._do("build", self.league.build)

    def left(self, worker: Worker) -> None:
        """Handle a lost worker, whose matches are cancelled."""
        for match_id in self._matches.pop(worker, _Matches()).given:
            self.league.cancel_match(match_id)
        self.check()

    def counters(self) -> dict[str, Any]:
        """Return the league's part of a checkpoint's counters."""
        copies = [each.player_id for each in self._roster.present() if each.parent]
        digests = {each.module_id: each.digest for each in self._registry.frozen.values()}
        learning, modules = self._roster.learners(), self._trained.modules
        ids = [each.player_id for each in learning if each.player_id in modules]
        resets = {each: modules[each].last_reset for each in ids}
        return {
            LEAGUE: self.league.to_state(),
            COPIES: {copy_id: digests[copy_id] for copy_id in copies if copy_id in digests},
            RESETS: {player_id: reset.generation for player_id, reset in resets.items() if reset},
        }

    def forget_settled(self) -> None:
        """Forget players that have left, unless a worker waits for their weights."""
        needed = self.needed() | {wanted.player_id for wanted in self._wanted}
        for player_id in self._trained.settled():
            if player_id not in needed:
                self._trained.forget(player_id)

    def needed(self) -> set[str]:
        """Return sources of players that have had no learner yet.

        A checkpoint is missing these players, so a resumed run needs their sources.
        """
        begun = {module.module_id for module in self._parts.core.in_checkpoints()}
        return {each.source for each in self._roster.learners() if each.player_id not in begun}

    # -- matches --------------------------------------------------------------------------------

    def line_ups(self, worker: Worker, round: int) -> list[training_pb2.LineUp]:
        """Return an EnvRunner's line-ups for the first request of a round.

        It has a line-up for each of its environments, plus twice as many as it finished matches in
        its last round, within bounds: episodes begin between two requests.
        """
        matches = self._matches[worker]
        if round and matches.round == round:
            return []
        matches.round = round
        # Matches whose players have left count no more, and others are played instead.
        matches.given = set(filter(self.league.is_open, matches.given))
        ahead = min(_MOST_AHEAD, max(_FEWEST_AHEAD, 2 * matches.finished))
        line_ups: list[training_pb2.LineUp] = []
        while len(matches.given) < self._parts.config.env_runner.envs_per_runner + ahead:
            commands = self._do("match", self.league.request_match)
            drawn = [each for each in commands if isinstance(each, AssignLineUp)]
            if not drawn:
                break
            for line_up in drawn:
                matches.given.add(line_up.match_id)
                seated = [line_up.players[agent] for agent in self._parts.config.agent_names]
                players = [module_of(self._roster.players[each]) for each in seated]
                line_ups.append(training_pb2.LineUp(match_id=line_up.match_id, players=players))
        return line_ups

    def finished(self, worker: Worker, results: Sequence[training_pb2.MatchResult]) -> None:
        """Book results of matches; outdated ones do not count."""
        if not results:
            return
        matches = self._matches[worker]
        matches.finished = len(results)
        for result in results:
            if result.match_id in matches.given:
                matches.given.remove(result.match_id)
                rows = zip(self._parts.config.agent_names, result.returns, strict=True)
                returns = {agent: value for agent, value in rows if not math.isnan(value)}
                self.league.finish_match(result.match_id, returns, result.length)

    # -- commands of the builder ----------------------------------------------------------------

    def _do(self, call: str, work: Callable[[], list[Command]]) -> list[Command]:
        """Carry out and return the builder's commands; warn if it is slow."""
        before = time.monotonic()
        commands = work()
        seconds = time.monotonic() - before
        if seconds > _SLOW_SECONDS and call not in self._slow:
            self._slow.add(call)
            self._message(
                f"{self._builder}.{call} took {seconds:.1f} s, in which the driver could do "
                "nothing else: make it faster"
            )
        self._carry_out(commands)
        return commands

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case AddPlayer():
                    self._add(command.player_id, command.source, learning=command.learning)
                case FreezePlayer():
                    self._want(command.player_id, command.copy_id)
                # Learners have the new weights then.
                case ResetPlayer():
                    for wanted in self._wanted:
                        asked = wanted.command_id is not None
                        wanted.has_others |= asked and wanted.player_id == command.player_id
                    life = self._new_life(command.player_id, command.source)
                    self._trained.reset(command.player_id, *life)
                case RetirePlayer():
                    self._retire(command.player_id)
                case Report():
                    self._message(command.message)

    def _message(self, text: str, level: Level = "warning") -> None:
        self._parts.progress.message(f"league: {text}", level)

    def _remove(self, player_id: str, why: str) -> None:
        """Remove a player that can no longer play or learn."""
        self._message(why)
        self.league.remove(player_id)

    def _add(self, player_id: str, source: str, *, learning: bool) -> None:
        """Let a player learn or play."""
        if not learning:
            if self._can_be_sent(source):
                return self.check()
            # Workers have slots for `random` if the run started with it.
            return self._remove(
                player_id,
                f"{player_id} cannot play: {source!r} is neither a module with train = false nor "
                "'random' in league.fixed",
            )
        if player_id in self._parts.core.modules:
            return None  # it was there from the start
        if self._is_here(source):
            return self._train(player_id, self._first_weights(player_id, source))
        if source in self._parts.core.modules:
            return self._want(source, player_id)
        why = f"{source!r} has no weights here to start from"
        return self._remove(player_id, f"{player_id} cannot learn: {why}")

    def _retire(self, player_id: str) -> None:
        """Let workers forget a copy, or stop training a player."""
        # A retired copy may still wait for its weights.
        self._wanted = [each for each in self._wanted if each.for_id != player_id]
        if self._registry.frozen.pop(player_id, None) is not None:
            self._parts.frozen_parts.remove_player(player_id)
        if player_id in self._parts.core.modules:
            self._trained.remove(player_id)
            self._message(f"{player_id} has left, and no longer learns", "info")

    def _train(self, player_id: str, first: FirstWeights | None) -> None:
        model = self._roster.modelled_on(player_id, self._parts.config.module_ids)
        why = self._other_network(player_id, first) if first else ""
        try:
            if not why:
                self._trained.add(player_id, model, first)
        except ValueError as error:
            why = str(error)
        if why:
            return self._remove(player_id, f"{player_id} cannot learn: {why}")
        begins_with = first.text if first else "new weights"
        return self._message(f"{player_id} is new, and learns from {begins_with}", "info")

    def _keep(self, player_id: str, copy_id: str, weights: Mapping[str, Tree], at: Version) -> None:
        """Keep a copy of a player, and send it to workers."""
        spaces = spaces_of_environment(self._registry.spaces[player_id])
        learned = self._parts.modules[player_id].connectors.merged
        settings_of = self._registry.trained[player_id]
        frozen = FrozenModule.copied(
            copy_id, player_id, self._parts.config, spaces, weights, learned, at, settings_of
        )
        try:
            frozen.keep(self._parts.run_dir)
        except CheckpointError as error:
            return self._remove(copy_id, f"there is no copy {copy_id}: {error}")
        self._registry.frozen[copy_id] = frozen
        self._parts.frozen_parts.add_player(copy_id, frozen.acting_setup(), frozen.tree)
        return self.check()

    # -- weights of learning players ------------------------------------------------------------

    def _want(self, player_id: str, for_id: str) -> None:
        """Ask for a player's weights once it has a learner."""
        self._wanted.append(_Wanted(player_id, for_id))
        self._ask_learners()

    def _ask_learners(self) -> None:
        for wanted in self._wanted:
            learners = self._registry.learners_of(wanted.player_id)
            if wanted.command_id is None and learners:
                wanted.reader = state_reader()
                snapshot = training_pb2.Snapshot(module_id=wanted.player_id, whole=True)
                wanted.command_id = self._parts.commands.pool.submit(learners[0], snapshot)

    def _asked(self, command_id: int) -> _Wanted | None:
        """Return the request of a command; None: it is no longer needed."""
        return next((each for each in self._wanted if each.command_id == command_id), None)

    def receive(self, command_id: int, chunk: bytes, last: bool) -> None:
        """Handle a learner's answer with weights."""
        if (wanted := self._asked(command_id)) is None:
            return
        if last:
            self._wanted.remove(wanted)
        if (frame := wanted.reader.feed(chunk)) is None:
            return
        # A copy plays with them, and a new player begins with them.
        tree: Any = frame.tree
        if DEFAULT_MODULE not in tree:
            self._failed(wanted, "its learner has no weights by name")
        elif self._roster.players[wanted.for_id].learning:
            learned = self._parts.modules[wanted.player_id].connectors.merged
            first = _copied(wanted.for_id, tree[DEFAULT_MODULE], learned, wanted.player_id)
            self._train(wanted.for_id, first)
        else:
            at = Version.of(frame.header.version)
            self._keep(wanted.player_id, wanted.for_id, tree[DEFAULT_MODULE], at)

    def abandoned(self, command_id: int) -> None:
        """Ask again for weights that a learner did not send."""
        if (wanted := self._asked(command_id)) is None:
            return
        if wanted.has_others:
            self._wanted.remove(wanted)
            self._failed(wanted, "its learner sent no weights, and other learners have restarted")
        else:
            wanted.command_id = None
            self._ask_learners()

    def _failed(self, wanted: _Wanted, why: str) -> None:
        learns = self._roster.players[wanted.for_id].learning
        what = f"{wanted.for_id} cannot learn" if learns else f"there is no copy {wanted.for_id}"
        self._remove(wanted.for_id, f"{what}: {why}")

    # -- first weights --------------------------------------------------------------------------

    def _can_be_sent(self, module_id: str) -> bool:
        """Return whether workers have or will receive a frozen module."""
        return module_id in self._registry.frozen or module_id in self._parts.config.others

    def _is_here(self, source: str) -> bool:
        """Return whether no learner has to be asked for these weights."""
        return source == INITIAL or self._module(source) in self._registry.frozen

    def _module(self, source: str) -> str:
        """Return the module of a player that another one copies."""
        player = self._roster.players.get(source)
        return source if player is None else module_of(player)

    def _first_weights(self, player_id: str, source: str) -> FirstWeights | None:
        """Return weights that are here for a player; None: new weights."""
        if source == INITIAL:
            model = self._roster.modelled_on(player_id, self._parts.config.module_ids)
            return self._beginning.get(model)
        frozen = self._registry.frozen[self._module(source)]
        learned = connector_state(frozen.checkpoint, frozen.source)
        return _copied(player_id, frozen.tree[WEIGHTS], learned, source)

    def _must_fit(self, player_id: str, source: str) -> None:
        """Check that a player can be reset to these weights."""
        first = self._first_weights(player_id, source)
        if source != INITIAL and first and (other := self._other_network(player_id, first)):
            raise ValueError(f"{player_id} cannot be reset to {source}: {other}")

    def _other_network(self, player_id: str, first: FirstWeights) -> str:
        """Describe how weights do not fit a player's network, or ""."""
        if not first.whole:
            return ""
        configured, known = self._parts.config.module_ids, self._registry.frozen
        model = self._roster.modelled_on(player_id, configured)
        copies = (
            known[each.player_id]
            for each in self._roster.present()
            if each.player_id in known
            and each.parent
            and self._roster.modelled_on(each.parent, configured) == model
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
        seed = worker_seed(self._parts.config.driver.seed, player_id, index=life)
        first = self._first_weights(player_id, source)
        if first is not None:
            words = f"league: {player_id}, reset to {first.text}"
            first = replace(first, source=words, selectable=False)
        return seed, first

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
            self._message(
                f"{player_id} starts again with new weights, since the weights of {source} are not "
                "in the checkpoint"
            )
        if first is not None:
            self._trained.modules[player_id].begin_with(first)

    def _repeat_reset(self, player: Player) -> None:
        """Repeat a reset that happened after the checkpoint's state."""
        player_id, source = player.player_id, player.reset_to
        if not self._is_here(source):
            has_left = self._roster.players[source].retired
            why = f"{source} has been retired" if has_left else f"the weights of {source} are lost"
            self._message(f"{player_id} is reset to its first weights, since {why}")
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
