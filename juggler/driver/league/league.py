"""The league: matches and players, without clock, threads or I/O."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from random import Random
from typing import Any

import msgspec

from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league_builder import LeagueBuilder, Pairing
from juggler.driver.league.results import LeagueResults, Means, Pair, Payoffs
from juggler.driver.league.roster import (
    FIXED,
    HISTORICAL,
    INITIAL,
    AddPlayer,
    AssignLineUp,
    BuilderCommand,
    Command,
    FreezePlayer,
    Player,
    Report,
    ResetPlayer,
    RetirePlayer,
    Roster,
)
from juggler.policies.wilson import outcome
from juggler.runtime.user_tracebacks import place_of_readers

_TRIES = 10  # attempts to find a pairing that can be played
_EXAMINED_PAIRS = 8  # pairs from which the least known is chosen


def described(error: Exception) -> str:
    """Describe an exception of a builder, with the builder's own line."""
    return f"{type(error).__name__}: {error}"[:500] + place_of_readers(error)


_MOST_COMMANDS = 1000  # of a builder at a time
_MOST_REPORTS = 100  # messages that are remembered
_MOST_SHOWN = 3  # messages at a time
_LONGEST_TEXT = 200


@dataclass(slots=True)
class LeagueState:
    """State of a league between matches."""

    seed: int  # of the run. All random draws follow from it and the next two numbers.
    next_match_id: int  # of the next match
    times_built: int  # number of calls of the builder's `build`
    players: list[Player]  # in the order of creation; retired players keep their place
    pairs: list[Pair]  # the payoffs, with the next two
    kinds: list[Pair]
    means: list[Means]


class League:
    """Keeps the roster and the payoffs, and draws the line-ups.

    Commands are carried out in their order: a player is copied before it is reset. Added, copied
    and reset players are in line-ups once they are `ready`. An open match ends without a result if
    one of its players is reset or cannot play any more. It is not part of a saved state: a resumed
    run plays another one.

    Raises:
        ValueError: the configuration is wrong or does not fit the agents, or the builder does not
            begin with a learning player.
    """

    def __init__(
        self,
        config: LeagueConfig,
        agents: tuple[str, ...],
        seed: int,
        builder: LeagueBuilder | None = None,
        state: LeagueState | None = None,
    ) -> None:
        config.validate()
        self._config, self._builder = config, builder or config.make_builder()
        known = state or LeagueState(seed, 0, 0, [], [], [], [])
        self._seed, self._times_built = known.seed, known.times_built
        self._next_match_id = known.next_match_id
        self.roster = Roster(config.max_learning, known.players)
        self.payoffs = Payoffs(
            config.decay, config.min_games, known.pairs, known.kinds, known.means
        )
        self._sides = config.sides(agents)
        self._side_of = {agent: side for side, own in enumerate(self._sides) for agent in own}
        self._open: dict[int, AssignLineUp] = {}
        # Raises a ValueError if a player cannot have the weights of a source
        self.must_fit: Callable[[str, str], None] = lambda player_id, source: None
        self._reported: deque[str] = deque(maxlen=_MOST_REPORTS)

    def begin(self) -> list[Command]:
        """Return the commands that add the first players.

        Raises:
            ValueError: the builder gave an impossible command.
        """
        name, names = type(self._builder).__name__, self._config.fixed
        fixed = [AddPlayer(each, FIXED, learning=False, source=each) for each in names]
        try:
            asked = list(itertools.islice(self._builder.initial(), _MOST_COMMANDS))
        except Exception as error:  # users' builders may raise anything
            raise ValueError(f"{name}.initial failed: {described(error)}") from error
        for command in asked:
            # No learning player begins with another player's weights.
            if isinstance(command, AddPlayer) and command.learning and command.source != INITIAL:
                raise ValueError(
                    f"{command.player_id} learns from the start, and cannot begin as "
                    f"{command.source!r}: leave out source, and name the checkpoint of those "
                    f"weights with from, in the table modules.{command.player_id}; or add the "
                    "player in build"
                )
        commands = [made for command in [*fixed, *asked] for made in self._apply(command)]
        if not self.roster.learners():
            raise ValueError(f"{name}.initial adds no learning player: add one")
        return commands

    def to_state(self) -> dict[str, Any]:
        """Return the league as plain data, for JSON."""
        state = LeagueState(
            self._seed,
            self._next_match_id,
            self._times_built,
            list(self.roster.players.values()),
            list(self.payoffs.pairs.values()),
            list(self.payoffs.kinds.values()),
            list(self.payoffs.means.values()),
        )
        return dict(msgspec.to_builtins(state))

    @classmethod
    def from_state(
        cls,
        data: Mapping[str, Any],
        config: LeagueConfig,
        agents: tuple[str, ...],
        builder: LeagueBuilder | None = None,
    ) -> League:
        """Restore a league, including the players that were ready.

        Raises:
            ValueError: the data is not a league's state, or the configuration is wrong.
        """
        try:
            state = msgspec.convert(dict(data), LeagueState)
        except msgspec.ValidationError as error:
            raise ValueError(f"this is not the state of a league: {error}") from None
        return cls(config, agents, state.seed, builder, state)

    def request_match(self) -> list[Command]:
        """Draw the line-up of another match, unless no learning player can play.

        The line-up follows from the seed, the match's id and the current league. The home player
        gets a random side, and each other side its own opponent. After an error of the builder, a
        learning player plays against itself.
        """
        if not any(player.plays for player in self.roster.learners()):
            return []
        match_id, self._next_match_id = self._next_match_id, self._next_match_id + 1
        # Runs of before had a third number, mostly 0, and draw the same line-ups now.
        random = Random(f"match {self._seed} {match_id} 0")
        results = LeagueResults(self.roster, self.payoffs, random)
        wrong = ""
        try:
            pairing = self._evaluation(results) or self._pairing(results)
        except Exception as error:  # users' builders may raise anything
            wrong = (
                f"{type(self._builder).__name__}.match failed: {described(error)}. A learner "
                "plays against itself instead"
            )
            home = random.choice(results.players(learning=True))
            pairing = Pairing(home, {home: 1.0}, "self-play")
        # The sides of a game may differ, so the home player's is drawn.
        players = random.choices(
            list(pairing.opponents), list(pairing.opponents.values()), k=len(self._sides)
        )
        players[random.randrange(len(players))] = pairing.home
        seated = {agent: players[side] for agent, side in self._side_of.items()}
        line_up = AssignLineUp(match_id, seated, pairing.home, pairing.branch)
        self._open[match_id] = line_up
        return [*self._report(wrong), line_up]

    def is_open(self, match_id: int) -> bool:
        """Return whether a match has no result yet, and can have one."""
        return match_id in self._open

    def cancel_match(self, match_id: int) -> None:
        """Close a match without a result."""
        self._open.pop(match_id, None)

    def finish_match(self, match_id: int, returns: Mapping[str, float], length: int) -> None:
        """Book the outcome for each pair of sides, and close the match.

        Nothing is booked of matches that are not open.
        """
        match = self._open.pop(match_id, None)
        if match is None:
            return
        # A team has the returns of all its agents.
        sums = [0.0] * len(self._sides)
        for agent, value in returns.items():
            sums[self._side_of[agent]] += value
        players = [self.roster.players[match.players[agents[0]]] for agents in self._sides]
        for side, player in enumerate(players):
            self.payoffs.book_match(player.player_id, sums[side], length)
            for other, rival in enumerate(players[:side]):
                if rival is player:
                    continue
                result = outcome(sums[side], sums[other], self._config.draw_margin)
                self.payoffs.book(player.player_id, rival.player_id, result)
                player.phase_games += 1
                rival.phase_games += 1
                self.payoffs.book_kinds(player.role, rival.role, result)

    def _cancel_matches(self, player_id: str) -> None:
        """Close a player's matches."""
        players = {match_id: match.players.values() for match_id, match in self._open.items()}
        for match_id in [each for each, seated in players.items() if player_id in seated]:
            del self._open[match_id]

    def _pairing(self, results: LeagueResults) -> Pairing:
        """Ask for a pairing, without opponents that cannot play."""
        for _ in range(_TRIES):
            pairing = self._builder.match(results)
            if not isinstance(pairing, Pairing):
                raise ValueError(f"it returned {str(pairing)[:100]!r}, which is not a Pairing")
            if not isinstance(pairing.opponents, Mapping) or not pairing.opponents:
                raise ValueError(f"the pairing of {pairing.home!r} names no opponents")
            for opponent, weight in pairing.opponents.items():
                if not (isinstance(weight, int | float) and 0 <= weight < math.inf):
                    raise ValueError(f"the weight of {opponent!r} is {weight!r}: at least 0")
            # Players may have left since the builder chose them.
            able = {
                opponent: float(weight)
                for opponent, weight in pairing.opponents.items()
                if self._plays(opponent)
            }
            total = sum(able.values())
            if self._plays(pairing.home) and 0 < total < math.inf:
                return Pairing(pairing.home, able, str(pairing.branch)[:100])
        unable = [each for each in (pairing.home, *pairing.opponents) if not self._plays(each)]
        raise ValueError(
            f"{_TRIES} times, it named players that cannot play now or do not exist: the last was "
            f"for {pairing.home!r}, and {', '.join(map(repr, unable[:5]))} cannot"
        )

    def _evaluation(self, results: LeagueResults) -> Pairing | None:
        """Return, with a small probability, a pair with too few games."""
        random = results.random
        if random.random() >= self._config.evaluation_probability:
            return None
        players = results.players()
        if len(players) < 2:
            return None
        pairs = [random.sample(players, 2) for _ in range(_EXAMINED_PAIRS)]
        home, other = min(pairs, key=lambda pair: self.payoffs.games(*pair))
        if self.payoffs.games(home, other) >= self.payoffs.min_games:
            return None
        return Pairing(home, {other: 1.0}, "evaluation")

    def _plays(self, player_id: str) -> bool:
        player = self.roster.players.get(player_id)
        return player is not None and player.plays

    def trained(self, player_id: str, steps: int) -> None:
        """Count more training steps of a player."""
        self.roster.players[player_id].steps += steps

    def ready(self, player_id: str) -> None:
        """Let a player be in line-ups: its weights can be fetched."""
        player = self.roster.players[player_id]
        player.ready = not player.retired

    def unready(self, player_id: str) -> None:
        """Keep a player without a learner out of line-ups until `ready`."""
        self.roster.players[player_id].ready = False
        self._cancel_matches(player_id)

    def remove(self, player_id: str) -> None:
        """Remove a player that has left permanently, or could not be copied."""
        self.roster.remove(self.roster.players[player_id])
        self._forget(player_id)

    def _forget(self, player_id: str) -> None:
        """Forget a player that has left, or has new weights."""
        self.payoffs.forget(player_id)
        self._cancel_matches(player_id)

    def build(self) -> list[Command]:
        """Ask the builder for changes.

        If the builder fails or gives an impossible command, a report names it, and all other
        commands are carried out. A player is not reset or copied again before further training, so
        resets cannot loop.
        """
        random = Random(f"build {self._seed} {self._times_built}")
        self._times_built += 1
        results = LeagueResults(self.roster, self.payoffs, random)
        name = f"{type(self._builder).__name__}.build"
        asked: list[BuilderCommand] = []
        wrong: list[str] = []
        try:
            asked = list(itertools.islice(self._builder.build(results), _MOST_COMMANDS))
        except Exception as error:  # users' builders may raise anything
            wrong.append(f"{name} failed: {described(error)}. Nothing changes until it works")
        # One impossible command does not cost the others.
        commands: list[Command] = []
        for command in asked:
            try:
                commands += self._apply(command)
            except ValueError as error:
                wrong.append(f"{name} gave an impossible command: {error}")
        reports = [report for each in wrong[:_MOST_SHOWN] for report in self._report(each)]
        return [*commands, *reports]

    def results(self) -> LeagueResults:
        """Return a read-only view of the league."""
        return LeagueResults(self.roster, self.payoffs, Random(f"results {self._seed}"))

    def _apply(self, command: BuilderCommand) -> list[Command]:
        """Apply a command, or raise a ValueError and change nothing."""
        _must_have_names(command)
        match command:
            case AddPlayer():
                self.roster.add(command)
                return [command]
            case FreezePlayer():
                return [self.roster.freeze(command), *self._recycle()]
            # Results of earlier weights say nothing about new ones.
            case ResetPlayer():
                self.roster.reset(command, self.must_fit)
                self._forget(command.player_id)
                return [command]
            case RetirePlayer():
                self.roster.retire(command)
                self._forget(command.player_id)
                return [command]
            case _:
                raise ValueError(f"{str(command)[:100]!r} is not a builder's command")

    def _recycle(self) -> list[Command]:
        """Retire copies until there are no more than `max_historical`."""
        commands: list[Command] = []
        while len(copies := self._copies()) > self._config.max_historical:
            newest = {copy.parent: copy.player_id for copy in copies}
            older = [copy for copy in copies if copy.player_id != newest[copy.parent]]
            commands += self._apply(RetirePlayer(self._least_useful(older or copies[:-1])))
        return commands

    def _copies(self) -> list[Player]:
        return [player for player in self.roster.present() if player.role == HISTORICAL]

    def _least_useful(self, copies: list[Player]) -> str:
        """Return the oldest copy, or, by "easiest", the most beaten copy."""
        names = [copy.player_id for copy in copies]
        if self._config.recycled == "oldest":
            return names[0]
        results = self.results()
        mains = results.mains()
        rates = [min((results.win_rate(main, name) for main in mains), default=0) for name in names]
        return names[rates.index(max(rates))]

    def _report(self, message: str) -> list[Command]:
        """Report each message once, not at each build or match."""
        if not message or message in self._reported:
            return []
        self._reported.append(message)
        return [Report(message)]


def _must_have_names(command: object) -> None:
    """Check that a builder's command has names for players, roles and sources."""
    for field in fields(command) if is_dataclass(command) else ():
        value = getattr(command, field.name)
        if field.type == "str" and not isinstance(value, str):
            text = f"{type(command).__name__}: {field.name} must be a name, not {value!r}"
            raise ValueError(text[:_LONGEST_TEXT])
