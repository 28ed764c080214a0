"""The matches of a league on their way: line-ups to EnvRunners, and outcomes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from juggler.driver.league.events import (
    AssignLineUp,
    CancelMatch,
    Command,
    Event,
    MatchFinished,
    MatchLost,
    MatchRequested,
)
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.wire.v1 import training_pb2

_FEWEST_AHEAD = 8
_MOST_AHEAD = 64


class LeagueMatches:
    """Gives each EnvRunner line-ups for the episodes that it is going to begin.

    An EnvRunner has a line-up for each of its environments, and twice as many more as it finished
    matches in its last round, within bounds: episodes begin while nobody can be asked.

    Args:
        book: tells the league what happened, and returns what it wants.
        agents: of an environment, in the order of its table.
        environments: of an EnvRunner.
        module_of: the module with which a player plays.
    """

    def __init__(
        self,
        book: Callable[[Event], list[Command]],
        agents: Sequence[str],
        environments: int,
        module_of: Callable[[str], str],
    ) -> None:
        self._book, self._agents = book, tuple(agents)
        self._environments, self._module_of = environments, module_of
        self._waiting: dict[int, AssignLineUp] = {}  # by match id; drawn anew, for who asks next
        self._open: dict[Worker, dict[int, AssignLineUp]] = {}  # by match id
        self._finished: dict[Worker, int] = {}  # in the last round
        self._rounds: dict[Worker, int] = {}  # the last one that was asked for

    def line_ups(self, worker: Worker, round: int) -> list[training_pb2.LineUp]:
        """What the next request of this round tells the EnvRunner; only the first one has any."""
        if round and self._rounds.get(worker) == round:
            return []
        self._rounds[worker] = round
        has = self._open.setdefault(worker, {})
        ahead = min(_MOST_AHEAD, max(_FEWEST_AHEAD, 2 * self._finished.get(worker, 0)))
        given = []
        while len(has) < self._environments + ahead:
            line_up = self._next()
            if line_up is None:
                break
            has[line_up.match_id] = line_up
            players = [self._module_of(line_up.players[agent]) for agent in self._agents]
            given.append(
                training_pb2.LineUp(
                    match_id=line_up.match_id, attempt=line_up.attempt, players=players
                )
            )
        return given

    def finished(
        self, worker: Worker, matches: Sequence[training_pb2.MatchResult]
    ) -> list[Command]:
        """An EnvRunner tells what came of matches. Those that it is not to play, or no longer, do
        not count.

        Raises:
            ValueError: it tells what cannot be.
        """
        has = self._open.get(worker, {})
        commands: list[Command] = []
        for match in matches:
            line_up = has.get(match.match_id)
            if len(match.returns) != len(self._agents):
                raise ValueError(
                    f"{len(match.returns)} returns of match {match.match_id}: the environment has "
                    f"{len(self._agents)} agents"
                )
            if line_up is None or line_up.attempt != match.attempt:
                continue
            told = dict(zip(self._agents, match.returns, strict=True))
            returns = {agent: value for agent, value in told.items() if not math.isnan(value)}
            del has[match.match_id]
            commands += self._book(
                MatchFinished(match.match_id, match.attempt, returns, match.length)
            )
        self._finished[worker] = len(matches)
        return commands

    def left(self, worker: Worker) -> list[Command]:
        """An EnvRunner is gone: others play its matches."""
        self._finished.pop(worker, None)
        self._rounds.pop(worker, None)
        lost = self._open.pop(worker, {})
        return [command for match_id in lost for command in self._book(MatchLost(match_id))]

    def redraw(self, command: AssignLineUp | CancelMatch) -> None:
        """The league wants a match to be played by others, or not at all."""
        for has in (self._waiting, *self._open.values()):
            has.pop(command.match_id, None)
        if isinstance(command, AssignLineUp):
            self._waiting[command.match_id] = command

    def _next(self) -> AssignLineUp | None:
        if self._waiting:
            return self._waiting.pop(next(iter(self._waiting)))
        for command in self._book(MatchRequested()):
            if isinstance(command, AssignLineUp):
                return command
        return None
