"""Faults in a league and its builders, and what its checkpoint keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.league_world import (
    AGENTS,
    Asking,
    asking,
    begun,
    finished,
    line_up,
    ready,
)

from juggler.driver.league.builders import AlphaStar, Rllib, find_builder, register_builder
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.league_builder import LeagueBuilder, Pairing
from juggler.driver.league.pfsp import pfsp
from juggler.driver.league.roster import (
    AddPlayer,
    AssignLineUp,
    Command,
    FreezePlayer,
    Report,
    ResetPlayer,
    RetirePlayer,
)
from juggler.driver.league.self_play import SelfPlayWindow


@dataclass(kw_only=True)
class Broken(LeagueBuilder):
    wrong: Any = None

    def build(self, results: Any) -> Iterable[Any]:
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong

    def match(self, results: Any) -> Pairing:
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (RuntimeError("no idea"), "Broken.build failed: RuntimeError: no idea"),
        (None, "Broken.build failed: TypeError"),
        (["main-0"], "'main-0' is not a builder's command"),
        ([ResetPlayer(["x"])], "ResetPlayer: player_id must be a"),
        ([AddPlayer(None, None)], "AddPlayer: player_id must be a"),
        ([ResetPlayer("main-0", 3)], "ResetPlayer: source must be a name, not 3"),
        ([FreezePlayer("mian-0")], "no player is called 'mian-0': did"),
        ([RetirePlayer("main-0")], "main-0 is the last learning player"),
        ([ResetPlayer("main-0")], "main-0 has not been trained since"),
        ([ResetPlayer("main-0", "main-0")], "main-0 cannot be reset to main-0"),
        ([ResetPlayer("main-0", "random")], "'random' has no weights to begin with"),
        ([ResetPlayer("main-0", "missing-0")], "no player is called 'missing-0'"),
        ([AddPlayer("main-0", "main")], "has had a player 'main-0': use a new id"),
        ([AddPlayer("main 1", "main")], "'main 1' is not a player id"),
        ([AddPlayer("x", "historical")], "role = 'historical'"),
        ([AddPlayer("x", "main", source="random")], "'random' has no weights to begin with"),
        (
            [AddPlayer("x", "fixed", learning=False, source="main-0")],
            "x does not learn, so it cannot",
        ),
        ([AddPlayer(f"x{n}", "main") for n in range(4)], "at most max_learning = 2 players learn"),
    ],
)
def test_a_builder_that_is_wrong_is_told_of_and_the_league_goes_on(wrong, told) -> None:
    league = begun(LeagueConfig(max_learning=2), Broken(wrong=wrong))
    reports = [command for command in league.build() if isinstance(command, Report)]
    assert len(reports) == 1
    assert told in reports[0].message
    for _ in range(3):
        assigned = league.request_match()[-1]
        assert isinstance(assigned, AssignLineUp)
        assert assigned.branch == "self-play"


@pytest.mark.parametrize(
    ("pairing", "told"),
    [
        ("main-0", "is not a Pairing"),
        (Pairing("main-0", {}), "names no opponents"),
        (Pairing("main-0", {"main-0": float("nan")}), "the weight of 'main-0' is nan"),
        (Pairing("main-0", {"main-0": -1}), "the weight of 'main-0' is -1"),
        (Pairing("main-0", {"missing-0": 1}), "named players that cannot play"),
        (Pairing("missing-0", {"main-0": 1}), "named players that cannot play"),
    ],
)
def test_a_pairing_that_is_wrong_becomes_self_play_with_a_word(pairing, told) -> None:
    league = begun(LeagueConfig(), Broken(wrong=pairing))
    report, assigned = league.request_match()
    assert isinstance(report, Report)
    assert report.message.startswith("Broken.match failed: ValueError: ")
    assert told in report.message
    assert isinstance(assigned, AssignLineUp)
    assert set(assigned.players.values()) == {"main-0"}
    assert league.request_match()[0] != report  # told once


def test_players_that_cannot_play_are_left_out_of_a_pairing() -> None:
    league = begun(LeagueConfig(), Broken(wrong=Pairing("main-0", {"gone": 1e9, "main-0": 1})))
    assert set(line_up(league).players.values()) == {"main-0"}


@pytest.mark.parametrize(
    "again", [[ResetPlayer("main-0")], [FreezePlayer("main-0"), ResetPlayer("main-0")]]
)
def test_resets_cannot_go_in_a_circle(again) -> None:
    league, builder = asking()
    league.trained("main-0", 1)
    done = [builder.change(league, *again) for _ in range(5)]
    assert sum(ResetPlayer("main-0") in commands for commands in done) == 1


@pytest.mark.parametrize("source", ["main-1", "main-0-v0", "main-0-v1"])
def test_a_player_is_reset_to_a_frozen_player_that_can_play_and_to_no_other(source: str) -> None:
    league, builder = asking()
    league.trained("main-0", 1)
    builder.change(league, FreezePlayer("main-0"))
    league.trained("main-0", 1)
    builder.wanted = [FreezePlayer("main-0")]
    league.build()  # no worker has this copy yet
    before = league.to_state()
    builder.wanted = [reset := ResetPlayer("main-0", source)]
    commands = league.build()
    why = {
        "main-1": "main-0 cannot be reset to main-1, which learns: copy that player with",
        "main-0-v1": "main-0 cannot be reset to main-0-v1, which cannot play yet: ask again once",
    }
    if source in why:
        (report,) = commands
        assert isinstance(report, Report)
        assert why[source] in report.message
        assert league.to_state() == before | {"times_built": before["times_built"] + 1}
    else:
        assert commands == [reset]
        assert league.roster["main-0"].life == 1


def test_a_player_begins_as_a_copy_once_that_can_play_and_can_have_its_id_until_then() -> None:
    league, builder = asking()
    heir = AddPlayer("heir", "main", source="main-0-v0")
    builder.wanted = [FreezePlayer("main-0"), heir]
    frozen, report = league.build()
    assert frozen == FreezePlayer("main-0", "main-0-v0")
    assert isinstance(report, Report)
    why = (
        "heir cannot begin as main-0-v0, which cannot play yet: ask again once `results.players()`"
    )
    assert why in report.message
    assert "heir" not in league.roster.players
    league.ready("main-0-v0")
    assert builder.change(league, heir) == [heir]


def test_a_player_without_a_learner_is_reset_once_it_has_one() -> None:
    league, builder = asking()
    league.trained("main-0", 1)
    league.unready("main-0")
    builder.wanted = [ResetPlayer("main-0")]
    (report,) = league.build()
    assert isinstance(report, Report)
    assert "main-0 cannot be reset while it cannot play: ask again once" in report.message
    assert league.roster["main-0"].life == 0
    league.ready("main-0")
    assert builder.change(league, ResetPlayer("main-0")) == [ResetPlayer("main-0")]


def test_a_league_that_nobody_learns_in_is_refused() -> None:
    class Nobody(LeagueBuilder):
        def initial(self) -> list[Any]:
            return []

    with pytest.raises(ValueError, match="initial"):
        League(LeagueConfig(), AGENTS, 0, Nobody()).begin()


@pytest.mark.parametrize("source", ["stone", "main-0", "main-0-v0"])
def test_who_learns_from_the_beginning_begins_as_nobody_else(source: str) -> None:
    """Its weights would be new ones all the same."""

    class Heirs(LeagueBuilder):
        def initial(self) -> list[Any]:
            stone = AddPlayer("stone", "fixed", learning=False, source="rock")
            heir = AddPlayer("heir", "main", source=source)
            return [stone, AddPlayer("main-0", "main"), FreezePlayer("main-0"), heir]

    said = f"heir learns from the start, and cannot begin as '{source}': leave out source"
    with pytest.raises(ValueError, match=said):
        League(LeagueConfig(), AGENTS, 0, Heirs()).begin()


# What is kept.


def play(league: League, count: int) -> list[AssignLineUp]:
    """Matches whose outcome follows from their id, with changes in between."""
    line_ups = []
    for number in range(count):
        assigned = line_up(league)
        line_ups.append(assigned)
        league.finish_match(*finished(assigned, assigned.match_id % 3, 1))
        for player in set(assigned.players.values()):
            if league.roster[player].learning:
                league.trained(player, 1)
        if number % 10 == 9:
            ready(league, league.build())
    return line_ups


@pytest.mark.parametrize(
    "builder",
    [
        AlphaStar(mains=2, min_phase_steps=5, max_phase_steps=10),
        Rllib(min_matches=5, snapshot_at=0.5, keep_training_probability=0.2),
    ],
)
def test_the_next_100_line_ups_are_the_same_after_it_is_saved(builder) -> None:
    config = LeagueConfig(max_historical=20, fixed=["random"])
    league = begun(config, builder, seed=7)
    play(league, 250)
    open_match = line_up(league)  # is not part of the state

    data = json.loads(json.dumps(league.to_state()))
    other = League.from_state(data, config, AGENTS, builder)

    assert other.to_state() == league.to_state()
    assert play(league, 100) == play(other, 100)
    assert other.to_state() == league.to_state()
    before = other.to_state()
    other.finish_match(*finished(open_match, 1, -1))
    assert other.to_state() == before
    assert len(league.roster.players) > len(league.roster.present()) > 10


def test_a_league_goes_on_whose_games_since_a_copy_were_not_counted_when_it_was_saved() -> None:
    data = begun().to_state()
    for player in data["players"]:
        del player["phase_games"]
    assert League.from_state(data, LeagueConfig(), AGENTS).roster["main-0"].phase_games == 0


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="next_match_id"):
        League.from_state({"seed": 0}, LeagueConfig(), AGENTS)


# What people are told when a builder of their own fails.


@dataclass(kw_only=True)
class Fails(LeagueBuilder):
    at: str = "build"

    def initial(self):
        if self.at == "initial":
            raise KeyError("mains")
        return super().initial()

    def build(self, results):
        return results.player("ghost") if self.at == "build" else []

    def match(self, results):
        raise ZeroDivisionError("no games")


def test_the_line_that_failed_is_told_and_what_happens_now() -> None:
    league = begun(LeagueConfig(), Fails())
    (report,) = league.build()
    assert isinstance(report, Report)
    assert report.message.startswith("Fails.build failed: ValueError: no player is called 'ghost'")
    assert "(test_league_faults.py, line " in report.message
    assert ", in build). Nothing changes until it works" in report.message
    report, _ = league.request_match()
    assert isinstance(report, Report)
    assert ", in match). A learner plays against itself instead" in report.message


# Builders of one's own, by name or given in Python.


MINE = """
from dataclasses import dataclass
from juggler import FreezePlayer, LeagueBuilder, LeagueResults, Pairing

@dataclass(kw_only=True)
class Mine(LeagueBuilder):
    every: int = 100

    def build(self, results: LeagueResults):
        for player in results.players("main"):
            if results.player(player).phase_steps >= self.every:
                yield FreezePlayer(player)

class NoKeys(LeagueBuilder):
    def match(self, results):
        return Pairing("main-0", {"main-0": 1.0})

class NoDataclass(LeagueBuilder):
    every: int = 100

class Other: pass

def hard(rate): return 1.0 if rate < 0.3 else 0.0
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_league.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_league", raising=False)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"builder": "my_league:Mien"}, "has no 'Mien': did you mean 'Mine'?"),
        ({"builder": "my_leage:Mine"}, "there is no Python module 'my_leage' here"),
        ({"builder": "my_league.py:Mine"}, "names a file instead of a Python module"),
        ({"builder": "my_league:Other"}, "must be a class derived from"),
        ({"builder": "my_league:hard"}, "must be a class derived from"),
        ({"builder": "my_league:NoDataclass"}, r"write @dataclass\(kw_only=True\)"),
        ({"builder": "my_league:Mine", "options": {"evry": 7}}, "did you mean 'every'?"),
        ({"builder": "__main__:Gone"}, r"pass league=\{'builder': Gone"),
    ],
)
def test_what_is_wrong_with_it_is_told(table, told) -> None:
    with pytest.raises(ValueError, match=told):
        LeagueConfig.from_table(table)


@pytest.mark.usefixtures("mine")
def test_a_class_of_a_script_is_found_by_the_name_that_stands_for_it() -> None:
    @dataclass(kw_only=True)
    class OfScript(LeagueBuilder):
        def match(self, results):
            return Pairing("main-0", {"main-0": 1.0})

    assert find_builder(register_builder(OfScript)) is OfScript
    with pytest.raises(ValueError, match="LeagueBuilder"):
        register_builder(OfScript())


@pytest.mark.usefixtures("mine")
def test_a_weighting_may_be_a_function_by_name() -> None:
    assert pfsp({"a": 0.2, "b": 0.9}, "my_league:hard") == {"a": 1.0, "b": 0.0}


# The keys of a league, and those of its builders.


def test_a_team_has_agents_of_the_environment() -> None:
    config = LeagueConfig(teams=[["red_0", "red_1"]])
    assert config.sides(("red_0", "blue", "red_1")) == (("red_0", "red_1"), ("blue",))
    with pytest.raises(ValueError, match="called 'red_1'"):
        config.sides(("red_0", "blue"))


def test_somebody_has_to_be_left_to_play_against() -> None:
    config = LeagueConfig(teams=[["a", "b"]])
    with pytest.raises(ValueError, match=r"^teams: "):
        config.sides(("a", "b"))


@pytest.mark.parametrize("given", ["none", None])
def test_none_is_the_word_for_none_in_a_key_of_a_builder_too(given) -> None:
    options = {"last_copy_steps": given, "mains": 2}
    builder = LeagueConfig.from_table({"builder": "alphastar", "options": options}).make_builder()
    assert builder.last_copy_steps is None  # type: ignore[attr-defined]


# The league among lost matches and all builders.


SEATS = ("a", "b", "c")
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
        self.league = League(self.config, SEATS, 0, self.builder)
        self.unready: list[str] = []
        self.open: dict[int, AssignLineUp] = {}
        self.old: list[AssignLineUp] = []
        self.games: dict[frozenset[str], int] = {}
        self.carry_out(self.league.begin())
        self.first = [player.player_id for player in self.league.roster.learners()]
        self.becomes_ready(0)

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case AssignLineUp():
                    self.assigned(command)
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
        assert set(line_up.players) == set(SEATS)
        assert line_up.home in line_up.players.values()
        assert line_up.match_id not in {each.match_id for each in self.old}, "ids are used once"
        for player in set(line_up.players.values()):
            assert self.league.roster[player].plays
        assert self.league.roster[line_up.home].learning or line_up.branch == "evaluation"
        self.open[line_up.match_id] = line_up

    def forget(self, player: str) -> None:
        self.games = {pair: count for pair, count in self.games.items() if player not in pair}
        self.close(player)

    def close(self, player: str) -> None:
        """The matches of a player have no result any more."""
        for each in [*self.open.values()]:
            if player in each.players.values():
                self.old.append(self.open.pop(each.match_id))

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
        by_agent = dict(zip(SEATS, map(float, returns), strict=True))
        self.league.finish_match(line_up.match_id, by_agent, 1)
        sides = self.config.sides(SEATS)
        players = [line_up.players[agents[0]] for agents in sides]
        for one, other in combinations(players, 2):
            if one != other:
                pair = frozenset((one, other))
                self.games[pair] = self.games.get(pair, 0) + 1
        self.old.append(line_up)

    @rule(pick=st.integers(1, 4))
    def finish_again(self, pick: int) -> None:
        if self.old:
            line_up = self.old[-min(pick, len(self.old))]
            self.league.finish_match(line_up.match_id, {"a": 1.0}, 1)

    @rule(pick=ANY)
    def lose_match(self, pick: int) -> None:
        if self.open:
            line_up = self.open.pop(list(self.open)[pick % len(self.open)])
            self.league.cancel_match(line_up.match_id)
            self.old.append(line_up)

    @rule(pick=ANY)
    def lose_player(self, pick: int) -> None:
        player = self.someone(pick)
        self.league.unready(player)
        self.unready.append(player)
        self.close(player)

    @rule(pick=ANY)
    def remove_player(self, pick: int) -> None:
        player = self.someone(pick)
        self.forget(player)
        self.league.remove(player)

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
        self.league = League.from_state(data, self.config, SEATS, self.builder)
        assert json.loads(json.dumps(self.league.to_state())) == data
        self.old += self.open.values()
        self.open = {}

    @invariant()
    def matches_are_open_while_their_players_can_play(self) -> None:
        if hasattr(self, "league"):
            assert all(map(self.league.is_open, self.open))
            assert not any(self.league.is_open(each.match_id) for each in self.old)

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
