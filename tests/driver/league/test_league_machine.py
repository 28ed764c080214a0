"""The league among lost matches, changing players and all builders."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.league_world import Asking

from juggler.driver.league.builders import AlphaStar, Rllib
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.league_builder import LeagueBuilder
from juggler.driver.league.roster import (
    AddPlayer,
    AssignLineUp,
    CancelMatch,
    Command,
    FreezePlayer,
    Report,
    ResetPlayer,
    RetirePlayer,
)
from juggler.driver.league.self_play import SelfPlayWindow

AGENTS = ("a", "b", "c")
ANY = st.integers(0, 10_000)
BUILDERS: list[LeagueBuilder] = [
    AlphaStar(
        mains=1, main_exploiters=1, league_exploiters=1, min_phase_steps=2, max_phase_steps=4
    ),
    Rllib(main_exploiters=1, league_exploiters=1, min_matches=2, snapshot_at=0.5),
    SelfPlayWindow(mains=2, save_steps=3, window=2),
    LeagueBuilder(mains=3),
]


class LeagueMachine(RuleBasedStateMachine):
    """Obey the league with delays, and keep separate books."""

    @initialize(
        inner=st.sampled_from(BUILDERS),
        cap=st.integers(1, 4),
        recycled=st.sampled_from(["easiest", "oldest"]),
        teams=st.sampled_from([[], [["a", "b"]]]),
    )
    def begin(self, inner: LeagueBuilder, cap: int, recycled: Any, teams: Any) -> None:
        self.builder = Asking(inner=inner)
        self.config = LeagueConfig(
            max_historical=cap, recycled=recycled, teams=teams, min_games=1, max_learning=4
        )
        self.league = League(self.config, AGENTS, 0, self.builder)
        self.unready: list[str] = []
        self.open: dict[int, AssignLineUp] = {}
        self.old: list[AssignLineUp] = []
        self.lives: dict[int, dict[str, int]] = {}
        self.games: dict[frozenset[str], int] = {}
        self.carry_out(self.league.begin())
        self.first = [player.player_id for player in self.league.roster.learners()]
        self.becomes_ready(0)

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case AssignLineUp():
                    self.assigned(command)
                case CancelMatch():
                    self.old.append(self.open.pop(command.match_id))
                case AddPlayer():
                    self.unready.append(command.player_id)
                case FreezePlayer():
                    assert self.league.roster.players[command.player_id].learning
                    self.unready.append(command.copy_id)
                case ResetPlayer():
                    source = self.league.roster.players.get(command.source)
                    assert source is None or not source.learning
                    self.unready.append(command.player_id)
                    self.forget(command.player_id)
                case RetirePlayer():
                    self.forget(command.player_id)

    def assigned(self, line_up: AssignLineUp) -> None:
        assert set(line_up.players) == set(AGENTS)
        assert line_up.home in line_up.players.values()
        before = self.open.get(line_up.match_id)
        assert line_up.attempt == (before.attempt + 1 if before else 0)
        for player in set(line_up.players.values()):
            assert self.league.roster[player].plays
        assert self.league.roster[line_up.home].learning or line_up.branch == "evaluation"
        if before:
            self.old.append(before)
        self.open[line_up.match_id] = line_up
        roster = self.league.roster
        self.lives[line_up.match_id] = {
            player: roster[player].life for player in line_up.players.values()
        }

    def forget(self, player: str) -> None:
        self.games = {pair: count for pair, count in self.games.items() if player not in pair}

    def someone(self, pick: int) -> str:
        players = list(self.league.roster.players)
        return players[pick % len(players)]

    @rule(count=st.integers(1, 4))
    def request(self, count: int) -> None:
        for _ in range(count):
            self.carry_out(self.league.request_match())

    @rule(pick=ANY)
    def becomes_ready(self, pick: int) -> None:
        """One player, or now and then all of them."""
        for _ in range(1 if pick % 2 else len(self.unready)):
            if self.unready:
                self.league.ready(self.unready.pop(pick % len(self.unready)))

    @rule(pick=ANY, returns=st.tuples(*[st.integers(-1, 1)] * 3))
    def finish(self, pick: int, returns: tuple[int, ...]) -> None:
        if not self.open:
            return
        line_up = self.open.pop(list(self.open)[pick % len(self.open)])
        by_agent = dict(zip(AGENTS, map(float, returns), strict=True))
        self.league.finish_match(line_up.match_id, line_up.attempt, by_agent, 1)
        sides = self.config.sides(AGENTS)
        players = [line_up.players[agents[0]] for agents in sides]
        for one, other in combinations(players, 2):
            if one != other and self.still(line_up, one) and self.still(line_up, other):
                pair = frozenset((one, other))
                self.games[pair] = self.games.get(pair, 0) + 1
        self.old.append(line_up)

    @rule(pick=st.integers(1, 4))
    def finish_again(self, pick: int) -> None:
        if self.old:
            line_up = self.old[-min(pick, len(self.old))]
            self.league.finish_match(line_up.match_id, line_up.attempt, {"a": 1.0}, 1)

    @rule(pick=ANY)
    def lose_match(self, pick: int) -> None:
        if self.open:
            self.carry_out(self.league.lose_match(list(self.open)[pick % len(self.open)]))

    @rule(pick=ANY)
    def lose_player(self, pick: int) -> None:
        player = self.someone(pick)
        self.carry_out(self.league.unready(player))
        self.unready.append(player)

    @rule(pick=ANY)
    def remove_player(self, pick: int) -> None:
        player = self.someone(pick)
        self.forget(player)
        self.carry_out(self.league.remove(player))

    @rule(pick=ANY, steps=st.integers(0, 4))
    def train(self, pick: int, steps: int) -> None:
        learners = self.league.roster.learners()
        if learners:
            self.league.trained(learners[pick % len(learners)].player_id, steps)

    @rule(picks=st.lists(st.tuples(ANY, st.integers(0, 3)), max_size=4))
    def change(self, picks: list[tuple[int, int]]) -> None:
        """Every command of a builder, sensible or not."""
        for pick, kind in picks:
            player = self.someone(pick)
            kinds = [
                FreezePlayer(player),
                ResetPlayer(player, self.someone(pick // 3) if pick % 3 else "initial"),
                RetirePlayer(player),
                AddPlayer(f"new-{pick}", "own", source=player if pick % 3 else "initial"),
            ]
            self.builder.wanted.append(kinds[kind])
        self.carry_out(self.league.build())

    @rule()
    def build(self) -> None:
        self.builder.wanted = list(self.builder.inner.build(self.league.results()))
        commands = self.league.build()
        learners = len(self.league.roster.learners())
        assert learners == 4 or not [each for each in commands if isinstance(each, Report)]
        self.carry_out(commands)

    @rule()
    def save_and_load(self) -> None:
        data = json.loads(json.dumps(self.league.to_state()))
        self.league = League.from_state(data, self.config, AGENTS, self.builder)
        assert json.loads(json.dumps(self.league.to_state())) == data
        self.old += self.open.values()
        self.open = {}

    def still(self, line_up: AssignLineUp, player: str) -> bool:
        """Whether the player is what it was when the line-up was drawn."""
        now = self.league.roster.players[player]
        return not now.retired and now.life == self.lives[line_up.match_id][player]

    @invariant()
    def games_are_counted_once(self) -> None:
        if hasattr(self, "league"):
            booked = {
                frozenset(names): pair.games for names, pair in self.league.payoffs.pairs.items()
            }
            assert booked == self.games

    @invariant()
    def numbers_of_players_are_bounded(self) -> None:
        if hasattr(self, "league"):
            present = self.league.roster.present()
            copies = [player for player in present if player.role == "historical"]
            assert len(copies) <= self.config.max_historical
            learners = [player.player_id for player in self.league.roster.learners()]
            assert len(learners) <= self.config.max_learning
            for player in learners:
                model = self.league.roster.modelled_on(player, self.first)
                assert model in self.first
                assert player not in self.first or model == player
            assert not any(player.steps for player in present if not player.learning)


TestLeagueMachine = LeagueMachine.TestCase
TestLeagueMachine.settings = settings(max_examples=60, stateful_step_count=40)
