"""Draws line-ups, and knows the matches that are being played."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from juggler.driver.league.builder import LeagueBuilder, Pairing
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.events import AssignLineUp, MatchFinished
from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import Player, Roster
from juggler.policies.wilson import outcome
from juggler.runtime.own_frames import place_of_readers

_TRIES = 10  # for a pairing that somebody can play
_LOOKED_AT = 8  # pairs, for one of which little is known


@dataclass(slots=True)
class OpenMatch:
    """A match that is being played.

    Attributes:
        line_up: as it was assigned.
        players: by side.
        lives: of these players when the line-up was drawn.
    """

    line_up: AssignLineUp
    players: tuple[str, ...]
    lives: tuple[int, ...]


class Matches:
    """
    Args:
        sides: the agents of each side.
        builder: chooses the pairings.
        roster: the players.
        payoffs: where outcomes are booked.
        seed: of the run.
        config: decides who has won, and how often two are matched of whom little is known.
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
        """Draw who plays. At least one player that learns can.

        The line-up follows from the seed, the match's id, the attempt and the league as it is now.
        Home plays a side that is drawn, and each other side draws an opponent of its own.

        Returns:
            The line-up, and what was wrong with the builder, if anything: then a player that learns
            plays against itself.
        """
        random = Random(f"match {self._seed} {match_id} {attempt}")
        results = LeagueResults(self._roster, self._payoffs, random)
        wrong = ""
        try:
            pairing = self._evaluation(results) or self._pairing(results)
        except Exception as error:  # whatever a builder of one's own raises
            wrong = (
                f"{type(self._builder).__name__}.match failed: {told(error)}. A player that learns "
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
        """The matches in which it plays."""
        return [match for match in self.open.values() if player_id in match.players]

    def finish(self, event: MatchFinished) -> bool:
        """Book the outcome, for each two sides, and close the match.

        Nothing is booked for players that were reset since the line-up was drawn. None of them is
        gone: then the line-up would have been drawn anew.

        Returns:
            Whether it was awaited. What comes of a match that is not open, or of an earlier
            attempt, is not booked.

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
        """One that can be played: opponents that cannot play are left out.

        Raises:
            ValueError: the builder returned no such pairing.
        """
        for _ in range(_TRIES):
            pairing = self._builder.match(results)
            if not isinstance(pairing, Pairing):
                raise ValueError(f"it returned {str(pairing)[:100]!r}, which is no Pairing")
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
            f"{_TRIES} times, it named players who cannot play now or do not exist: the last was "
            f"for {pairing.home!r}, and {', '.join(map(repr, unable[:5]))} cannot"
        )

    def _evaluation(self, results: LeagueResults) -> Pairing | None:
        """Now and then two who have played too few games, whether they learn or not."""
        random = results.random
        if random.random() >= self._config.evaluation_probability:
            return None
        players = results.players()
        if len(players) < 2:
            return None
        pairs = [random.sample(players, 2) for _ in range(_LOOKED_AT)]
        home, other = min(pairs, key=lambda pair: self._payoffs.games(*pair))
        if self._payoffs.games(home, other) >= self._payoffs.min_games:
            return None
        return Pairing(home, {other: 1.0}, "evaluation")

    def _plays(self, player_id: str) -> bool:
        player = self._roster.players.get(player_id)
        return player is not None and player.plays


def told(error: Exception) -> str:
    """An exception of a builder in one sentence, with the builder's own line."""
    return f"{type(error).__name__}: {error}"[:500] + place_of_readers(error)
