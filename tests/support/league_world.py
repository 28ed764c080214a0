"""Leagues without workers, playing rock, paper, scissors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.league_builder import LeagueBuilder, Pairing
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import (
    INITIAL,
    AddPlayer,
    AssignLineUp,
    BuilderCommand,
    Command,
    FreezePlayer,
    Report,
    ResetPlayer,
    RetirePlayer,
)

AGENTS = ("row", "column")
ROCK_PAPER_SCISSORS = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], np.float64)  # [A, A]


def begun(
    config: LeagueConfig | None = None,
    builder: LeagueBuilder | None = None,
    agents: tuple[str, ...] = AGENTS,
    seed: int = 0,
) -> League:
    """A league whose first players are ready."""
    league = League(config or LeagueConfig(), agents, seed, builder)
    ready(league, league.begin())
    return league


def ready(league: League, commands: Iterable[Command]) -> list[Command]:
    """Report added, copied and reset players as ready; return the commands."""
    commands = list(commands)
    for command in commands:
        match command:
            case AddPlayer() | ResetPlayer():
                league.ready(command.player_id)
            case FreezePlayer():
                league.ready(command.copy_id)
    return commands


@dataclass(kw_only=True)
class Asking(LeagueBuilder):
    """Pairs players as another builder does, with extra commands.

    Attributes:
        inner: the other one.
        wanted: what it asks for next.
    """

    inner: LeagueBuilder = field(default_factory=LeagueBuilder)
    wanted: list[Any] = field(default_factory=list)

    def initial(self) -> Iterable[BuilderCommand]:
        return self.inner.initial()

    def build(self, results: LeagueResults) -> Iterable[BuilderCommand]:
        asked, self.wanted = self.wanted, []
        return asked

    def match(self, results: LeagueResults) -> Pairing:
        return self.inner.match(results)

    def change(self, league: League, *wanted: Any) -> list[Command]:
        """Have the league do this; report new players as ready."""
        self.wanted = list(wanted)
        return ready(league, league.build())


def line_up(league: League) -> AssignLineUp:
    """The next one."""
    (command,) = league.request_match()
    assert isinstance(command, AssignLineUp)
    return command


def finished(
    assigned: AssignLineUp, *returns: float, length: int = 1
) -> tuple[int, int, dict[str, float], int]:
    """What `League.finish_match` takes."""
    by_agent = dict(zip(assigned.players, returns, strict=True))
    return assigned.match_id, assigned.attempt, by_agent, length


def asking(inner: LeagueBuilder | None = None, **keys: Any) -> tuple[League, Asking]:
    builder = Asking(inner=inner or LeagueBuilder(mains=2))
    return begun(
        LeagueConfig(**{"min_games": 1, "decay": 1.0, "evaluation_probability": 0.0, **keys}),
        builder,
    ), builder


def book_games(league: League, player: str, other: str, wins: int, losses: int) -> None:
    """Book games for a wanted win rate of a pair."""
    for result in [1] * wins + [-1] * losses:
        league.payoffs.book(player, other, result)
        for each in (player, other):
            league.roster[each].phase_games += 1


class RockPaperScissors:
    """Players of rock, paper, scissors: softmax policies, trained by REINFORCE.

    Args:
        league: pairs the players.
        seed: of the initial policies and of the actions.
        scripted: by source, the policy of players that do not learn.
        batch: matches for one update.
        rounds: of one match, which the sum of their rewards decides.
        lr: of each update.
        spread: the standard deviation of initial logits.
    """

    def __init__(
        self,
        league: League,
        seed: int,
        scripted: dict[str, np.ndarray] | None = None,
        batch: int = 16,
        rounds: int = 4,
        lr: float = 0.2,
        spread: float = 0.5,
    ) -> None:
        self.league, self.batch, self.rounds, self.lr = league, batch, rounds, lr
        self.spread = spread
        self.random = np.random.default_rng(seed)
        self.scripted = scripted or {}
        self.logits: dict[str, np.ndarray] = {}
        self.commands: list[Command] = []
        self.carry_out(league.begin())

    def carry_out(self, commands: list[Command]) -> None:
        """Do what the league asks for."""
        for command in commands:
            match command:
                case AddPlayer() | ResetPlayer():
                    self.logits[command.player_id] = self._source(command.source)
                case FreezePlayer():
                    self.logits[command.copy_id] = self.logits[command.player_id].copy()
                case RetirePlayer():
                    del self.logits[command.player_id]
                case Report():
                    raise AssertionError(command.message)
        self.commands += ready(self.league, commands)

    def _source(self, source: str) -> np.ndarray:
        if source in self.scripted:
            return np.log(self.scripted[source])  # [A]
        if source == INITIAL:
            return self.random.normal(size=3) * self.spread  # [A]
        return self.logits[source].copy()

    def policy(self, player: str) -> np.ndarray:
        """[A]"""
        return softmax(self.logits[player])

    def update(self) -> None:
        """Play `batch` matches, and train each learning player by its own matches."""
        gradients: dict[str, np.ndarray] = {}
        steps: dict[str, int] = {}
        policies = {player: softmax(logits) for player, logits in self.logits.items()}
        for draws in self.random.random((self.batch, len(AGENTS), self.rounds)):  # [2, R]
            assigned = line_up(self.league)
            players = [assigned.players[agent] for agent in AGENTS]
            actions = [
                np.searchsorted(np.cumsum(policies[player])[:2], draw)  # [R]
                for player, draw in zip(players, draws, strict=True)
            ]
            won = ROCK_PAPER_SCISSORS[actions[0], actions[1]]  # [R]
            got = dict(zip(AGENTS, (won, -won), strict=True))
            returns = {agent: float(each.sum()) for agent, each in got.items()}
            self.league.finish_match(assigned.match_id, assigned.attempt, returns, self.rounds)
            for player, action, reward in zip(players, actions, got.values(), strict=True):
                if self.league.roster[player].learning:
                    # [R, A], gradients of the log-probabilities
                    towards = np.eye(3)[action] - policies[player]
                    gradients[player] = gradients.get(player, 0) + reward @ towards
                    steps[player] = steps.get(player, 0) + self.rounds
        for player, gradient in gradients.items():
            self.logits[player] = self.logits[player] + self.lr * gradient / steps[player]
            self.league.trained(player, steps[player])

    def train(self, updates: int, watch: Callable[[], None] = lambda: None) -> None:
        """Update, and have the league built after each one."""
        for _ in range(updates):
            self.update()
            self.carry_out(self.league.build())
            watch()


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max())  # [A]
    return odds / odds.sum()
