"""`juggler league`: shows the league of a run, or has all of its players play each other."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

import tyro

from juggler.cli.arguments import Flag, parse, report_errors
from juggler.cli.league_tables import kind_lines, roster_lines, win_rate_lines
from juggler.cli.playing import Progress
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.roster import Player
from juggler.driver.league_players import LEAGUE, league_of, module_of
from juggler.driver.record.run_directory import CONFIG_FILE
from juggler.envrunner.multi_agent.openspiel import SCHEME
from juggler.envrunner.setup import RANDOM
from juggler.policies.wilson import outcome
from juggler.runtime.checkpoints.checkpoint import DIRECTORY as CHECKPOINTS
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read, read_or_warn
from juggler.runtime.checkpoints.frozen import DIRECTORY, run_of

_LEAST_MATCHES = 2  # of a pair, one on each side


@dataclass(kw_only=True)
class Arguments:
    """Show the players of a league, who comes from whom, their ratings, and how often each beats
    each."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A checkpoint, or a run directory, whose newest good checkpoint is taken."""

    tournament: int | None = None
    """Let every pair of players play this many matches, half of them on each side, instead of
    showing what came of training. At least 2."""

    exploitability: Flag = False
    """Show what the best response to each player would win on average, in a small game of
    OpenSpiel."""

    picture: str | None = None
    """A file for a picture: win rates of all pairs, and ratings over time. Its suffix decides the
    format, PNG without one."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "league")
    return report_errors("league", lambda: _league(given))


def _league(given: Arguments) -> int:
    if given.tournament is not None and given.tournament < _LEAST_MATCHES:
        raise ConfigError(
            f"--tournament {given.tournament}: every pair of players plays at least "
            f"{_LEAST_MATCHES} matches"
        )
    _must_have_a_checkpoint(Path(given.run))
    checkpoint = read_or_warn(given.run)
    where = checkpoint.path or Path(given.run)
    config = RunConfig.to_act(checkpoint.config, where=str(where))
    state = checkpoint.counters.get(LEAGUE)
    if not config.agents.league or state is None:
        raise ConfigError(f"{where}: this run has no league: its configuration has no such table")
    try:
        league = league_of(config, state)
    except ValueError as error:
        raise CheckpointError(where, str(error)) from error
    if given.exploitability:
        must_be_openspiel(config.env_runner.env)
    payoffs, rows = league.payoffs, None
    players = [player for player in league.roster.present() if player.plays]
    if given.tournament is not None:
        players = _that_are_here(players, checkpoint)
        rows = players
        payoffs = _tournament(players, checkpoint, config, given.tournament)
    print(f"checkpoint: {where}")
    print("\n".join(roster_lines(players, payoffs)))
    print()
    columns = shutil.get_terminal_size().columns
    print("\n".join(win_rate_lines(players, payoffs, rows, columns)))
    if payoffs.kinds:
        print()
        print("\n".join(kind_lines(payoffs)))
    if given.exploitability:
        here = _that_are_here(players, checkpoint)
        print()
        print("\n".join(_exploitability_lines(here, checkpoint, config)))
    if given.picture:
        from juggler.cli.league_picture import draw

        try:
            print(f"picture: {draw(players, payoffs, run_of(where), Path(given.picture))}")
        except (OSError, ValueError) as error:  # matplotlib knows no such format
            why = (isinstance(error, OSError) and error.strerror) or error
            raise ConfigError(f"--picture {given.picture}: {why}") from error
    return 0


def _must_have_a_checkpoint(run: Path) -> None:
    """
    Raises:
        ConfigError: it is a run that has made none yet.
    """
    if (run / CONFIG_FILE).is_file() and not any((run / CHECKPOINTS).glob("*")):
        raise ConfigError(
            f"{run}: this run has made no checkpoint yet, which would have its league: try again "
            "after the first one"
        )


def _that_are_here(players: Sequence[Player], checkpoint: Checkpoint) -> list[Player]:
    """Without those whose weights are lost or not there yet, as people are told."""
    assert checkpoint.path is not None
    kept, found = run_of(checkpoint.path) / DIRECTORY, []
    for player in players:
        try:
            if player.learning:  # one may have been added a moment before
                checkpoint.module_id(player.player_id)
            if player.parent:
                read(kept / player.player_id)
        except CheckpointError as error:
            print(f"{player.player_id} is left out: {error}", file=sys.stderr)
        else:
            found.append(player)
    return found


def must_be_openspiel(env: str) -> None:
    """
    Raises:
        ConfigError: exploitability is of another game.
    """
    if not env.startswith(SCHEME):
        raise ConfigError(f"--exploitability: {env} is no game of OpenSpiel")


def _exploitability_lines(
    players: Sequence[Player], checkpoint: Checkpoint, config: RunConfig
) -> list[str]:
    """
    Raises:
        ConfigError: OpenSpiel cannot work it out for this game.
    """
    from juggler.policies.exploitability import exploitability
    from juggler.policies.loading import load_policy

    assert checkpoint.path is not None
    kept = run_of(checkpoint.path) / DIRECTORY
    lines = []
    for player in players:
        if (module_id := module_of(player)) == RANDOM:
            continue
        try:
            if player.parent:
                policy = load_policy(kept / module_id)
            else:
                policy = load_policy(checkpoint.path, module_id=module_id)
            runner = config.env_runner
            told = exploitability(policy, runner.env, runner.env_kwargs)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        lines.append(f"exploitability of {player.player_id}: {told:.4f}")
    return lines


def _tournament(
    players: Sequence[Player], checkpoint: Checkpoint, config: RunConfig, matches: int
) -> Payoffs:
    """The results of all against all.

    Raises:
        ConfigError: a match has more than two sides.
    """
    from juggler.driver.line_ups import play_matches

    settings = LeagueConfig.from_table(config.agents.league)
    sides = settings.sides(config.agent_names)
    if len(sides) != 2:
        raise ConfigError(
            f"--tournament: matches are between two agents or teams, and here they have "
            f"{len(sides)} sides"
        )
    assert checkpoint.path is not None
    kept = run_of(checkpoint.path) / DIRECTORY
    payoffs = Payoffs(1.0, 1, [], [], [])
    pairs = list(combinations(players, 2))
    half = -(-matches // 2)
    progress, over = Progress(len(pairs) * 2 * half, "matches"), 0

    def watch(ended: int, _: int) -> None:
        progress(over + ended)

    for number, (one, other) in enumerate(pairs):
        for half_number, (own, others) in enumerate((sides, sides[::-1])):
            seated = {agent: _named(one, kept) for agent in own}
            seated |= {agent: _named(other, kept) for agent in others}
            # Two draws of their own: with equal ones, equal policies would win once each.
            seed = 2 * number + half_number
            played = play_matches(checkpoint.path, seated, half, seed, explore=True, watch=watch)
            over += half
            for match in played.matches:
                score, against = (
                    sum(match.returns.get(agent, 0.0) for agent in side) for side in (own, others)
                )
                result = outcome(score, against, settings.draw_margin)
                payoffs.book(one.player_id, other.player_id, result)
    return payoffs


def _named(player: Player, kept: Path) -> str:
    """A player as `play_matches` calls it."""
    module_id = module_of(player)
    in_run = player.learning or module_id == RANDOM or not player.parent
    return module_id if in_run else str(kept / module_id)
