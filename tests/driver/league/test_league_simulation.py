"""Whole leagues of rock, paper, scissors, with scripted players."""

from __future__ import annotations

import numpy as np
import pytest
from support.league_world import AGENTS, ROCK_PAPER_SCISSORS, RockPaperScissors

from juggler.driver.league.builders import AlphaStar
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.ratings import nash_averaging
from juggler.driver.league.roster import AddPlayer, FreezePlayer, ResetPlayer


class FlawedMain(AlphaStar):
    """A league whose main is scripted, and learns nothing."""

    def initial(self) -> list[AddPlayer | FreezePlayer]:
        scripted = AddPlayer("main-0", "main", learning=False, source="mostly_rock")
        return [scripted, AddPlayer("main_exploiter-0", "main_exploiter")]


def test_an_exploiter_finds_the_flaw_is_copied_and_begins_anew() -> None:
    exploiter = "main_exploiter-0"
    builder = FlawedMain(min_phase_steps=640, max_phase_steps=1_000_000)
    league = League(LeagueConfig(decay=0.98), AGENTS, 0, builder)
    mostly_rock = np.array([0.8, 0.1, 0.1])  # [A]
    world = RockPaperScissors(league, 0, {"mostly_rock": mostly_rock}, lr=1.0)
    rates = []
    while league.roster[exploiter].life < 2:
        assert len(rates) < 400
        rates.append(league.results().win_rate(exploiter, "main-0"))
        world.train(1)

    changes = [command for command in world.commands if not isinstance(command, AddPlayer)]
    assert changes == [
        FreezePlayer(exploiter, f"{exploiter}-v0"),
        ResetPlayer(exploiter),
        FreezePlayer(exploiter, f"{exploiter}-v1"),
        ResetPlayer(exploiter),
    ]
    for version in (0, 1):
        copy = world.policy(f"{exploiter}-v{version}")
        won = copy @ ROCK_PAPER_SCISSORS @ mostly_rock
        assert 0.5 + 0.5 * won > 0.7
        assert copy.argmax() == 1  # paper
    assert abs(world.policy(exploiter) - 1 / 3).max() < 0.4  # the initial policy again
    assert max(rates) > 0.6
    assert league.payoffs.means["main-0"].return_mean < 0
    assert league.payoffs.kinds["main", "main_exploiter"].losses > 100


def test_a_whole_alphastar_league_of_rock_paper_scissors_goes_on() -> None:
    builder = AlphaStar(
        mains=1, main_exploiters=1, league_exploiters=1, min_phase_steps=300, max_phase_steps=900
    )
    league = League(LeagueConfig(max_historical=8, decay=0.95), AGENTS, 3, builder)
    world = RockPaperScissors(league, 3, lr=1.0)
    world.train(200)

    assert all(player.copies >= 3 for player in league.roster.learners())
    for role in ("main_exploiter", "league_exploiter"):
        assert league.roster[f"{role}-0"].life > 0, f"{role} was never reset"
    players = league.results().players()
    assert len(players) == 3 + 8 == len(world.logits)
    weights = nash_averaging(league.payoffs, players)
    assert sum(weights.values()) == pytest.approx(1)
    for player in players:
        rates = [league.payoffs.win_rate(player, other) * weights[other] for other in players]
        assert sum(rates) <= 0.5 + 1e-9, f"{player} beats the equilibrium"
