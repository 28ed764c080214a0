"""`juggler league`: shows a league, or has all players play each other."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro
from rich.table import Table
from rich.text import Text

from juggler.cli.arguments import PIPE_COLUMNS, Flag, command, make_console, make_table
from juggler.cli.evaluate import EvaluationProgress
from juggler.cli.plot import STYLES, read_run, save_figure
from juggler.driver.agent_tables import LEAGUE, league_of, module_of
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.ratings import elo, nash_averaging
from juggler.driver.league.results import Payoffs
from juggler.driver.league.roster import Player
from juggler.driver.reporting.run_directory import METRICS_FILE
from juggler.envrunner.multi_agent.openspiel import SCHEME
from juggler.envrunner.setup import RANDOM
from juggler.policies.wilson import outcome
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read, read_or_warn
from juggler.runtime.checkpoints.weights import DIRECTORY, run_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_FROZEN = 12  # columns of the table of win rates


def roster(players: Sequence[Player], payoffs: Payoffs) -> Table:
    """Tabulate numbered players: origins, games and ratings."""
    ids = [player.player_id for player in players]
    ratings = elo(payoffs, ids)
    shares = nash_averaging(payoffs, ids)
    table = make_table(("#", "player", "role"), ("steps", "games", "Elo", "Nash"), "comes from")
    # A copy learns nothing more: its steps are those at which it was frozen.
    for number, player in enumerate(players, 1):
        name = player.player_id
        steps = player.steps if player.learning else player.born_at
        games = sum(payoffs.games(name, other) for other in ids if other != name)
        source = f"{player.parent} at {player.born_at} steps" if player.parent else player.source
        if player.life:
            source += f", reset {player.life} times"
        counts = f"{steps}", f"{games}", f"{round(ratings[name])}", f"{shares[name]:.0%}"
        table.add_row(f"{number}", Text(name), Text(player.role), *counts, Text(source))
    return table


def win_rate_lines(
    players: Sequence[Player],
    payoffs: Payoffs,
    rows: Sequence[Player] | None = None,
    columns: int = PIPE_COLUMNS,
) -> list[str]:
    """Tabulate win rates of some or all learning players, in percent."""
    frozen = [player for player in players if not player.learning]
    left_out = frozen[:-_MOST_FROZEN]
    numbers = {player.player_id: number for number, player in enumerate(players, 1)}
    shown = [player.player_id for player in players if player not in left_out]
    learners = [player.player_id for player in players if player.learning]
    names = [row.player_id for row in rows] if rows is not None else learners or shown
    # Columns are numbers, since names of frozen players are long.
    table = [["wins of", *(f"#{numbers[other]}" for other in shown)]]
    for row in names:
        cells = [_win_rate(payoffs, row, other) for other in shown]
        table.append([f"{numbers[row]:>3}  {row}", *cells])
    lines = _in_parts(table, columns)
    lines.append("#: the player of that number; ±: half the width of the 95 % interval")
    if any(cell.startswith("~") for cells in table for cell in cells):
        lines.append(f"~: of fewer than {payoffs.min_games} games")
    if left_out:
        lines.append(
            f"{len(left_out)} older frozen players have a column only in the picture (--picture)"
        )
    return lines


def _win_rate(payoffs: Payoffs, player: str, other: str) -> str:
    """Describe how often a player beats another one: "~53%±8"; "-" without games."""
    points, played = payoffs.points(player, [other])
    if not played:
        return "-"
    unsure = "~" if payoffs.games(player, other) < payoffs.min_games else ""
    low, high = payoffs.interval(player, other)
    return f"{unsure}{points / played:.0%}±{50 * (high - low):.0f}"


def _in_parts(table: Sequence[Sequence[str]], columns: int) -> list[str]:
    """Break a table into parts that fit, each with the first column."""
    first, *others = (max(map(len, cells)) for cells in zip(*table, strict=True))
    width = max(others)
    most = max(1, (columns - first) // (2 + width))  # columns of a part
    lines = []
    for begin in range(1, len(others) + 1, most):
        # The first column says whose rows these are, so each part repeats it.
        for row in table:
            cells = (f"{cell:>{width}}" for cell in row[begin : begin + most])
            lines.append("  ".join([f"{row[0]:<{first}}", *cells]))
        lines.append("")
    return lines[:-1]


def kind_lines(payoffs: Payoffs) -> list[str]:
    """Describe how often roles beat each other over the run."""
    lines = ["of all games between roles:"]
    for each in payoffs.kinds.values():
        games = int(each.weight)
        if each.first == each.second:
            lines.append(
                f"  {each.first} among themselves: {each.draws / games:.0%} drawn, {games:,} games"
            )
            continue
        lines.append(
            f"  {each.first} against {each.second}: {each.wins / games:.0%} won, "
            f"{each.draws / games:.0%} drawn, {each.losses / games:.0%} lost, {games:,} games"
        )
    return lines


_LEAST_MATCHES = 2  # of a pair, one on each side


@dataclass(kw_only=True)
class Arguments:
    """Show the players of a league.

    Shows their origins, their ratings, and the win rates between them.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A checkpoint, or a run directory, whose newest good checkpoint is used."""

    tournament: int | None = None
    """Number of matches for every pair of players, half on each side, instead of results from
    training. At least 2."""

    exploitability: Flag = False
    """Show what the best response to each player would win on average, in a small OpenSpiel
    game."""

    picture: str | None = None
    """File for a picture: win rates of all pairs, and ratings over time. Its suffix is the format;
    without one, PNG."""


def _league(given: Arguments) -> int:
    if given.tournament is not None and given.tournament < _LEAST_MATCHES:
        raise ConfigError(
            f"--tournament {given.tournament}: each pair of players needs at least "
            f"{_LEAST_MATCHES} matches"
        )
    checkpoint, config, league = _read(given.run)
    where = _place_of(checkpoint)
    if given.exploitability and not (env := config.env_runner.env).startswith(SCHEME):
        raise ConfigError(f"--exploitability: {env} is not a game of OpenSpiel")
    # A tournament replaces the results of training, and has rows for frozen players too.
    payoffs, rows = league.payoffs, None
    players = [player for player in league.roster.present() if player.plays]
    if given.tournament is not None:
        players = _available(players, checkpoint)
        rows = players
        payoffs = _tournament(players, checkpoint, config, given.tournament)
    print(f"checkpoint: {where}")
    make_console().print(roster(players, payoffs), end="\n\n")
    columns = shutil.get_terminal_size().columns
    print("\n".join(win_rate_lines(players, payoffs, rows, columns)))
    if payoffs.kinds:
        print("", *kind_lines(payoffs), sep="\n")
    # Players whose weights were deleted have results, and cannot play.
    if given.exploitability:
        lines = _exploitability_lines(_available(players, checkpoint), checkpoint, config)
        print("", *lines, sep="\n")
    if given.picture:
        figure = _draw(players, payoffs, run_of(where))
        print(f"picture: {save_figure(figure, Path(given.picture))}")
    return 0


def _read(run: str) -> tuple[Checkpoint, RunConfig, League]:
    """Read a checkpoint, its configuration and its league."""
    checkpoint = read_or_warn(run)
    where = _place_of(checkpoint)
    config = RunConfig.to_act(checkpoint.config, where=str(where))
    state = checkpoint.counters.get(LEAGUE)
    if not config.agents.league or state is None:
        raise ConfigError(f"{where}: this run has no league: its configuration has no such table")
    try:
        return checkpoint, config, league_of(config, state)
    except ValueError as error:
        raise CheckpointError(where, str(error)) from error


def _place_of(checkpoint: Checkpoint) -> Path:
    assert checkpoint.path is not None, "it was read from a directory"
    return checkpoint.path


def _available(players: Sequence[Player], checkpoint: Checkpoint) -> list[Player]:
    """Return players whose weights are available."""
    kept, found = run_of(_place_of(checkpoint)) / DIRECTORY, []
    for player in players:
        try:
            if player.learning:  # it may just have been added
                checkpoint.module_id(player.player_id)
            if player.parent:
                read(kept / player.player_id)
        except CheckpointError as error:
            print(f"{player.player_id} is left out: {error}", file=sys.stderr)
        else:
            found.append(player)
    return found


def _exploitability_lines(
    players: Sequence[Player], checkpoint: Checkpoint, config: RunConfig
) -> list[str]:
    """List the exploitability of each player."""
    from juggler.policies.matches import exploitability
    from juggler.policies.policy import load_policy

    where, runner = _place_of(checkpoint), config.env_runner
    lines = []
    for player in players:
        if (module_id := module_of(player)) == RANDOM:
            continue
        # A copy has its own directory of weights; a checkpoint has the learning modules.
        try:
            if player.parent:
                policy = load_policy(run_of(where) / DIRECTORY / module_id)
            else:
                policy = load_policy(where, module_id=module_id)
            found = exploitability(policy, runner.env, runner.env_kwargs)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        lines.append(f"exploitability of {player.player_id}: {found:.4f}")
    return lines


def _tournament(
    players: Sequence[Player], checkpoint: Checkpoint, config: RunConfig, matches: int
) -> Payoffs:
    """Play all against all, and return the results."""
    from juggler.driver.play_checkpoint import play_matches

    settings = LeagueConfig.from_table(config.agents.league)
    sides = settings.sides(config.agent_names)
    if len(sides) != 2:
        raise ConfigError(
            f"--tournament: matches are between two agents or teams, but here they have "
            f"{len(sides)} sides"
        )
    where = _place_of(checkpoint)
    # All results count alike: these players do not change any more.
    payoffs = Payoffs(1.0, 1, [], [], [])
    pairs = list(combinations(players, 2))
    half = -(-matches // 2)
    progress, over = EvaluationProgress(len(pairs) * 2 * half, "matches"), 0

    def watch(ended: int, _: int) -> None:
        progress(over + ended)

    for number, (one, other) in enumerate(pairs):
        for half_number, (own, others) in enumerate((sides, sides[::-1])):
            seated = dict.fromkeys(own, module_of(one))
            seated |= dict.fromkeys(others, module_of(other))
            # Different draws: with equal ones, equal policies would win once each.
            seed = 2 * number + half_number
            played = play_matches(where, seated, half, seed, explore=True, watch=watch)
            over += half
            # A side may be a team, whose returns add up.
            for match in played.matches:
                score, against = (
                    sum(match.returns.get(agent, 0.0) for agent in side) for side in (own, others)
                )
                result = outcome(score, against, settings.draw_margin)
                payoffs.book(one.player_id, other.player_id, result)
    return payoffs


_BEFORE, _BEHIND = "league/learning/", "/elo"  # before and after a player's name in a key


def _draw(players: Sequence[Player], payoffs: Payoffs, run_dir: Path) -> Figure:
    """Draw a league."""
    from matplotlib.figure import Figure

    ids = [player.player_id for player in players]
    rates = np.full((len(ids), len(ids)), np.nan)  # [P, P]
    for row, one in enumerate(ids):
        for column, other in enumerate(ids):
            if payoffs.games(one, other):
                rates[row, column] = payoffs.win_rate(one, other)
    # Without pyplot it needs no window system.
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(rates, cmap="RdBu", vmin=0, vmax=1)
    left.set_xticks(range(len(ids)), ids, rotation=90, fontsize=7)
    left.set_yticks(range(len(ids)), ids, fontsize=7)
    left.set_title("win rate of the row against the column")
    figure.colorbar(image, ax=left)
    # A checkpoint that was moved elsewhere has no metrics beside it.
    runs = [read_run(run_dir, run_dir.name)] if (run_dir / METRICS_FILE).is_file() else []
    for run in runs:
        for place, key in enumerate(run.keys_of("elo")):
            name, style = key.removeprefix(_BEFORE).removesuffix(_BEHIND), STYLES[place // 10 % 4]
            right.plot(run.column("env_steps_trained"), run.column(key), style, label=name)
    right.set_xlabel("steps trained, all players")
    right.set_ylabel("Elo rating")
    right.set_title("ratings of learning players")
    if right.lines:
        right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


run = command("league", Arguments, _league)
