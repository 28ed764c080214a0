"""`juggler league`: shows the league of a run, or has all of its players play each other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import tyro

from juggler.cli.arguments import parse, report_errors
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.league.league import League
from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.ratings import elo, nash_averaging
from juggler.driver.league.roster import Player
from juggler.driver.league_players import league_of, module_of
from juggler.envrunner.setup import RANDOM
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read_or_warn
from juggler.runtime.checkpoints.frozen import DIRECTORY, run_of

_WIDE = 12  # columns of the table of win rates


@dataclass(kw_only=True)
class Arguments:
    """Show the players of a league, who comes from whom, their ratings, and how often each beats
    each."""

    run: tyro.conf.Positional[str]
    """A checkpoint, or a run directory, whose newest good checkpoint is taken."""

    tournament: int = 0
    """Let each player play so many matches against each other one, half of them on each side,
    instead of showing what came of training."""

    picture: str | None = None
    """A file for a picture: win rates of all pairs, and ratings over time."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "league")
    return report_errors("league", lambda: _league(given))


def _league(given: Arguments) -> int:
    checkpoint = read_or_warn(given.run)
    where = checkpoint.path or Path(given.run)
    config = RunConfig.to_act(checkpoint.config, where=str(where))
    state = checkpoint.counters.get("league")
    if not config.agents.league or state is None:
        raise ConfigError(f"{where}: this run has no league: its configuration has no such table")
    try:
        league = league_of(config, state)
    except ValueError as error:
        raise CheckpointError(where, str(error)) from error
    payoffs = league.payoffs
    if given.tournament:
        payoffs = _tournament(league, checkpoint, config.agent_names, given.tournament)
    players = [player for player in league.roster.present() if player.plays]
    print(f"checkpoint: {where}")
    print("\n".join(roster_lines(players, payoffs)))
    print()
    print("\n".join(win_rate_lines(players, payoffs)))
    if given.picture:
        from juggler.cli.league_picture import draw

        print(f"picture: {draw(players, payoffs, run_of(where), Path(given.picture))}")
    return 0


def roster_lines(players: Sequence[Player], payoffs: Payoffs) -> list[str]:
    """A table of players: what they are, where they come from, and how good they are."""
    ids = [player.player_id for player in players]
    ratings = elo(payoffs, ids)
    shares, _ = nash_averaging(payoffs, ids)
    width = max(len("player"), *map(len, ids))
    lines = [
        f"{'player':<{width}}  {'role':<16}  {'steps':>9}  {'Elo':>6}  {'Nash':>5}  comes from"
    ]
    for player in players:
        steps = player.steps if player.learning else player.born_at
        source = f"{player.parent} at {player.born_at} steps" if player.parent else player.source
        if player.life:
            source += f", begun anew {player.life} times"
        lines.append(
            f"{player.player_id:<{width}}  {player.role:<16}  {steps:>9}  "
            f"{ratings[player.player_id]:>6.0f}  {shares[player.player_id]:>5.0%}  {source}"
        )
    return lines


def win_rate_lines(players: Sequence[Player], payoffs: Payoffs) -> list[str]:
    """How often, in percent, each player that learns beats the others: the newest ones of them."""
    learners = [player.player_id for player in players if player.learning]
    others = [player.player_id for player in players][-_WIDE:]
    rows = learners or others
    width = max(len("wins of"), *map(len, rows))
    lines = ["  ".join([f"{'wins of':<{width}}", *others])]
    for row in rows:
        cells = []
        for other in others:
            games = payoffs.games(row, other) if other != row else 0
            text = f"{payoffs.win_rate(row, other):.0%}" if games else "-"
            cells.append(f"{text:>{len(other)}}")
        lines.append("  ".join([f"{row:<{width}}", *cells]))
    return lines


def _tournament(
    league: League, checkpoint: Checkpoint, agents: Sequence[str], matches: int
) -> Payoffs:
    """The results of all against all.

    Raises:
        ConfigError: the environment has more or fewer than two agents.
    """
    from juggler.driver.line_ups import play_matches

    if len(agents) != 2:
        raise ConfigError(
            f"--tournament: matches are between two agents, and this environment has {len(agents)}"
        )
    assert checkpoint.path is not None
    kept = run_of(checkpoint.path) / DIRECTORY
    players = [player for player in league.roster.present() if player.plays]
    payoffs = Payoffs(1.0, 1, [], [], [])
    pairs = list(combinations(players, 2))
    half = max(1, matches // 2)
    for number, (one, other) in enumerate(pairs):
        print(
            f"match {number + 1} of {len(pairs)}: {one.player_id} and {other.player_id}",
            file=sys.stderr,
        )
        for half_number, sides in enumerate((agents, agents[::-1])):
            seated = {sides[0]: _named(one, kept), sides[1]: _named(other, kept)}
            # Two draws of their own: with equal ones, equal policies would win once each.
            seed = 1000 * (2 * number + half_number)
            played = play_matches(checkpoint.path, seated, half, seed, explore=True)
            for match in played.matches:
                ahead = match.returns[sides[0]] - match.returns[sides[1]]
                payoffs.book(one.player_id, other.player_id, (ahead > 0) - (ahead < 0))
    return payoffs


def _named(player: Player, kept: Path) -> str:
    """A player as `play_matches` calls it."""
    module_id = module_of(player)
    in_run = player.learning or module_id == RANDOM or not player.parent
    return module_id if in_run else str(kept / module_id)
