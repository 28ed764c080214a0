"""The league: events in, commands out, without clock, threads or I/O."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from random import Random
from typing import Any

import msgspec

from juggler.driver.league import events
from juggler.driver.league.builder import LeagueBuilder, Pairing
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.events import AssignLineUp, MatchFinished
from juggler.driver.league.payoffs import KindCount, Means, Pair, Payoffs
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import FIXED, HISTORICAL, Player, Roster
from juggler.policies.wilson import outcome
from juggler.runtime.own_frames import place_of_readers

_TRIES = 10  # attempts to find a pairing that can be played
_EXAMINED_PAIRS = 8  # pairs from which the least known is chosen


@dataclass(slots=True)
class OpenMatch:
    """A match in progress."""

    line_up: AssignLineUp  # as it was assigned
    players: tuple[str, ...]  # by side
    lives: tuple[int, ...]  # of these players when the line-up was drawn


class Matches:
    """Draws line-ups, and books outcomes.

    Args:
        sides: the agents of each side.
        builder: chooses the pairings.
        roster: the players.
        payoffs: where outcomes are booked.
        config: decides outcomes, and how often rare pairs are matched.
    """

    def __init__(
        self,
        sides: tuple[tuple[str, ...], ...],
        builder: LeagueBuilder,
        roster: Roster,
        payoffs: Payoffs,
        seed: int,
        config: LeagueConfig,
    ) -> None:
        self._sides, self._builder, self._roster = sides, builder, roster
        self._payoffs, self._seed, self._config = payoffs, seed, config
        self._side_of = {agent: side for side, agents in enumerate(sides) for agent in agents}
        self.open: dict[int, OpenMatch] = {}

    def draw(self, match_id: int, attempt: int = 0) -> tuple[AssignLineUp, str]:
        """Draw a line-up; at least one learning player can play.

        The line-up follows from the seed, the match's id, the attempt and the current league. The
        home player gets a random side, and each other side its own opponent.

        Returns:
            The line-up, and the builder's error or "". After an error, a learning player plays
            against itself.
        """
        random = Random(f"match {self._seed} {match_id} {attempt}")
        results = LeagueResults(self._roster, self._payoffs, random)
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
        players = random.choices(
            list(pairing.opponents), list(pairing.opponents.values()), k=len(self._sides)
        )
        players[random.randrange(len(players))] = pairing.home
        seated = {agent: players[side] for agent, side in self._side_of.items()}
        line_up = AssignLineUp(match_id, attempt, seated, pairing.home, pairing.branch)
        lives = tuple(self._roster.players[player].life for player in players)
        self.open[match_id] = OpenMatch(line_up, tuple(players), lives)
        return line_up, wrong

    def with_player(self, player_id: str) -> list[OpenMatch]:
        """Return the open matches of a player."""
        return [match for match in self.open.values() if player_id in match.players]

    def finish(self, event: MatchFinished) -> bool:
        """Book the outcome for each pair of sides, and close the match.

        Nothing is booked for players that were reset since the line-up was drawn. All players are
        still there: otherwise the line-up would have been redrawn.

        Returns:
            Whether it was expected. Results of matches that are not open, or of earlier attempts,
            are not booked.

        Raises:
            ValueError: it names agents that the environment does not have.
        """
        match = self.open.get(event.match_id)
        if match is None or match.line_up.attempt != event.attempt:
            return False
        returns = self._by_side(event.returns)
        del self.open[event.match_id]
        counts = [
            player.life == life for player, life in zip(self._of(match), match.lives, strict=True)
        ]
        for side, player in enumerate(self._of(match)):
            if counts[side]:
                self._payoffs.book_match(player.player_id, returns[side], event.length)
            for other in range(side):
                rival = self._of(match)[other]
                if rival is player or not (counts[side] and counts[other]):
                    continue
                result = outcome(returns[side], returns[other], self._config.draw_margin)
                self._payoffs.book(player.player_id, rival.player_id, result)
                player.phase_games += 1
                rival.phase_games += 1
                self._payoffs.book_kinds(player.role, rival.role, result)
        return True

    def _of(self, match: OpenMatch) -> list[Player]:
        return [self._roster.players[player_id] for player_id in match.players]

    def _by_side(self, values: Mapping[str, float]) -> list[float]:
        sums = [0.0] * len(self._sides)
        for agent, value in values.items():
            if agent not in self._side_of:
                raise ValueError(f"no agent of the environment is called {agent[:100]!r}")
            sums[self._side_of[agent]] += value
        return sums

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
        home, other = min(pairs, key=lambda pair: self._payoffs.games(*pair))
        if self._payoffs.games(home, other) >= self._payoffs.min_games:
            return None
        return Pairing(home, {other: 1.0}, "evaluation")

    def _plays(self, player_id: str) -> bool:
        player = self._roster.players.get(player_id)
        return player is not None and player.plays


def described(error: Exception) -> str:
    """Describe an exception of a builder, with the builder's own line."""
    return f"{type(error).__name__}: {error}"[:500] + place_of_readers(error)


_MOST_COMMANDS = 1000  # of a builder at a time
_MOST_REPORTS = 100  # messages that are remembered
_MOST_SHOWN = 3  # messages at a time
_LONGEST_TEXT = 200


def _fits(player_id: str, source: str) -> None:
    """Accept the weights of any player for any other player."""


@dataclass(slots=True)
class LeagueState:
    """State of a league between matches.

    Attributes:
        pairs, kinds, means: the payoffs.
    """

    seed: int  # of the run. All random draws follow from it and the next two numbers.
    next_match_id: int  # of the next match
    times_built: int  # number of calls of the builder's `build`
    players: list[Player]  # in the order of creation; retired players keep their place
    pairs: list[Pair]
    kinds: list[KindCount]
    means: list[Means]


class League:
    """Keeps the roster and the payoffs, and draws the line-ups.

    Commands are carried out in their order: a player is copied before it is reset. Added, copied
    and reset players are in line-ups after `PlayerReady`. An open match is not part of a saved
    state: a resumed run plays another one.

    Args:
        config: its keys.
        builder: a builder; None: the one named in `config`.
        state: saved state to continue; None: a new league.

    Attributes:
        roster: the players.
        payoffs: their results.

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
        sides = config.sides(agents)
        self._matches = Matches(sides, self._builder, self.roster, self.payoffs, known.seed, config)
        self._reported: deque[str] = deque(maxlen=_MOST_REPORTS)

    # Start, and saved state.

    def begin(self) -> list[events.Command]:
        """Return the commands that add the first players.

        Raises:
            ValueError: the builder gave an impossible command.
        """
        name, names = type(self._builder).__name__, self._config.fixed
        fixed = [events.AddPlayer(each, FIXED, learning=False, source=each) for each in names]
        try:
            asked = list(itertools.islice(self._builder.initial(), _MOST_COMMANDS))
        except Exception as error:  # users' builders may raise anything
            raise ValueError(f"{name}.initial failed: {described(error)}") from error
        for command in asked:
            _must_not_inherit(command)
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

    # Events.

    def book(self, event: events.Event) -> list[events.Command]:
        """Book an event, and return the commands to carry out, in order.

        Raises:
            ValueError: the event names a player or an agent that does not exist.
        """
        match event:
            case events.MatchRequested():
                return self._match_requested()
            case events.MatchFinished():
                self._matches.finish(event)
                return []
            case events.MatchLost():
                lost = self._matches.open.get(event.match_id)
                return [] if lost is None else self._redraw(event.match_id)
            case events.StepsTrained():
                self._known(event.player_id).steps += event.steps
                return []
            case events.PlayerReady():
                player = self._known(event.player_id)
                player.ready = not player.retired
                return []
            case events.PlayerLost():
                self._known(event.player_id).ready = False
                return self._redraw_matches(event.player_id)
            case events.PlayerRemoved():
                self.roster.remove(self._known(event.player_id))
                self.payoffs.forget(event.player_id)
                return self._redraw_matches(event.player_id)

    def _match_requested(self) -> list[events.Command]:
        """Assign a match, unless no learning player can play."""
        if not self._has_learners:
            return []
        self._next_match_id += 1
        return self._drawn(self._next_match_id - 1, 0)

    def _redraw_matches(self, player_id: str) -> list[events.Command]:
        """Redraw a player's matches."""
        ids = [match.line_up.match_id for match in self._matches.with_player(player_id)]
        return [command for match_id in ids for command in self._redraw(match_id)]

    def _redraw(self, match_id: int) -> list[events.Command]:
        before = self._matches.open.pop(match_id)
        if not self._has_learners:
            return [events.CancelMatch(match_id)]
        return self._drawn(match_id, before.line_up.attempt + 1)

    def _drawn(self, match_id: int, attempt: int) -> list[events.Command]:
        line_up, wrong = self._matches.draw(match_id, attempt)
        return [*self._report(wrong), line_up]

    @property
    def _has_learners(self) -> bool:
        return any(player.plays for player in self.roster.learners())

    def _known(self, player_id: str) -> Player:
        player = self.roster.players.get(player_id)
        return self.roster[player_id] if player is None else player

    # Changes.

    def build(self, must_fit: Callable[[str, str], None] = _fits) -> list[events.Command]:
        """Ask the builder for changes.

        If the builder fails or gives an impossible command, a report names it, and all other
        commands are carried out. A player is not reset or copied again before further training, so
        resets cannot loop.
        """
        random = Random(f"build {self._seed} {self._times_built}")
        self._times_built += 1
        results = LeagueResults(self.roster, self.payoffs, random)
        name = f"{type(self._builder).__name__}.build"
        asked: list[events.BuilderCommand] = []
        wrong: list[str] = []
        try:
            asked = list(itertools.islice(self._builder.build(results), _MOST_COMMANDS))
        except Exception as error:  # users' builders may raise anything
            wrong.append(f"{name} failed: {described(error)}. Nothing changes until it works")
        commands: list[events.Command] = []
        for command in asked:
            try:
                commands += self._apply(command, must_fit)
            except ValueError as error:
                wrong.append(f"{name} gave an impossible command: {error}")
        # At the end, so that redrawn line-ups have no player that is also retired or reset.
        gone = [each for each in commands if isinstance(each, events.RetirePlayer)]
        line_ups = [command for each in gone for command in self._redraw_matches(each.player_id)]
        reports = [report for each in wrong[:_MOST_SHOWN] for report in self._report(each)]
        return [*commands, *line_ups, *reports]

    def results(self) -> LeagueResults:
        """Return a read-only view of the league."""
        return LeagueResults(self.roster, self.payoffs, Random(f"results {self._seed}"))

    def _apply(
        self, command: events.BuilderCommand, must_fit: Callable[[str, str], None] = _fits
    ) -> list[events.Command]:
        """Apply a command, or raise a ValueError and change nothing."""
        _must_have_names(command)
        match command:
            case events.AddPlayer():
                self.roster.add(command)
                return [command]
            case events.FreezePlayer():
                return [self.roster.freeze(command), *self._recycle()]
            case events.ResetPlayer():
                self.roster.reset(command, must_fit)
                self.payoffs.forget(command.player_id)
                return [command]
            case events.RetirePlayer():
                self.roster.retire(command)
                self.payoffs.forget(command.player_id)
                return [command]
            case _:
                raise ValueError(f"{str(command)[:100]!r} is not a builder's command")

    def _recycle(self) -> list[events.Command]:
        """Retire copies until there are no more than `max_historical`."""
        commands: list[events.Command] = []
        while len(copies := self._copies()) > self._config.max_historical:
            newest = {copy.parent: copy.player_id for copy in copies}
            older = [copy for copy in copies if copy.player_id != newest[copy.parent]]
            commands += self._apply(events.RetirePlayer(self._least_useful(older or copies[:-1])))
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

    def _report(self, message: str) -> list[events.Command]:
        """Report each message once, not at each build or match."""
        if not message or message in self._reported:
            return []
        self._reported.append(message)
        return [events.Report(message)]


def _must_have_names(command: object) -> None:
    """Check that a builder's command has names for players, roles and sources."""
    for field in fields(command) if is_dataclass(command) else ():
        value = getattr(command, field.name)
        if field.type == "str" and not isinstance(value, str):
            text = f"{type(command).__name__}: {field.name} must be a name, not {value!r}"
            raise ValueError(text[:_LONGEST_TEXT])


def _must_not_inherit(command: events.BuilderCommand) -> None:
    """Check that no learning player begins with another player's weights."""
    if (
        isinstance(command, events.AddPlayer)
        and command.learning
        and command.source != events.INITIAL
    ):
        raise ValueError(
            f"{command.player_id} learns from the start, and cannot begin as "
            f"{command.source!r}: leave out source, and name the checkpoint of those weights with "
            f"from, in the table modules.{command.player_id}; or add the player in build"
        )
