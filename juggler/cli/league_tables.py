"""The players of a league as tables in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.ratings import elo, nash_averaging
from juggler.driver.league.roster import Player

_MOST_FROZEN = 12  # columns of the table of win rates


def roster_lines(players: Sequence[Player], payoffs: Payoffs) -> list[str]:
    """A table of players: what they are, where they come from, and how good they are. Each has a
    number, which the table of win rates goes by."""
    ids = [player.player_id for player in players]
    ratings = elo(payoffs, ids)
    shares, _ = nash_averaging(payoffs, ids)
    width = max(map(len, ["player", *ids]))
    role_width = max(map(len, ["role", *(player.role for player in players)]))
    names = f"{'player':<{width}}  {'role':<{role_width}}"
    lines = [f"{'#':>3}  {names}  {'steps':>9}  {'games':>7}  {'Elo':>6}  {'Nash':>5}  comes from"]
    for number, player in enumerate(players, 1):
        name = player.player_id
        steps = player.steps if player.learning else player.born_at
        games = sum(payoffs.games(name, other) for other in ids if other != name)
        source = f"{player.parent} at {player.born_at} steps" if player.parent else player.source
        if player.life:
            source += f", begun anew {player.life} times"
        lines.append(
            f"{number:>3}  {name:<{width}}  {player.role:<{role_width}}  {steps:>9}  {games:>7}  "
            f"{round(ratings[name]):>6}  {shares[name]:>5.0%}  {source}"
        )
    return lines


def win_rate_lines(
    players: Sequence[Player],
    payoffs: Payoffs,
    rows: Sequence[Player] | None = None,
    columns: float = math.inf,
) -> list[str]:
    """How often, in percent, players beat others; a draw is half a win.

    Args:
        players: all of them, as in the roster, whose numbers name the columns. These are those that
            learn, and the newest others.
        payoffs: their results.
        rows: those of the table; None: the players that learn, or else the columns.
        columns: of the terminal; a wider table goes on below itself.
    """
    frozen = [player for player in players if not player.learning]
    left_out = frozen[:-_MOST_FROZEN]
    numbers = {player.player_id: number for number, player in enumerate(players, 1)}
    shown = [player.player_id for player in players if player not in left_out]
    learners = [player.player_id for player in players if player.learning]
    names = [row.player_id for row in rows] if rows is not None else learners or shown
    table = [["wins of", *(f"#{numbers[other]}" for other in shown)]]
    few = False
    for row in names:
        cells = []
        for other in shown:
            points, played = payoffs.points(row, [other] if other != row else [])
            text = "-"
            if played:
                unsure = payoffs.games(row, other) < payoffs.min_games
                few = few or unsure
                low, high = payoffs.interval(row, other)
                text = f"{'~' if unsure else ''}{points / played:.0%}±{50 * (high - low):.0f}"
            cells.append(text)
        table.append([f"{numbers[row]:>3}  {row}", *cells])
    lines = _in_parts(table, columns)
    lines.append("#: the player of that number; ±: half the width of the 95 % interval")
    if few:
        lines.append(f"~: of fewer than {payoffs.min_games} games")
    if left_out:
        lines.append(
            f"{len(left_out)} older frozen players have a column only in the picture (--picture)"
        )
    return lines


def _in_parts(table: Sequence[Sequence[str]], columns: float) -> list[str]:
    """The lines of a table. Columns for which the terminal has no room go on below, in parts that
    all begin with the first column."""
    first, *others = (max(map(len, cells)) for cells in zip(*table, strict=True))
    parts: list[list[int]] = [[]]
    width = first
    for number, cell in enumerate(others, 1):
        width += 2 + cell
        if width > columns and parts[-1]:
            parts.append([])
            width = first + 2 + cell
        parts[-1].append(number)
    lines = [
        [
            "  ".join([f"{row[0]:<{first}}", *(f"{row[n]:>{others[n - 1]}}" for n in part)])
            for row in table
        ]
        for part in parts
    ]
    return [line for part in lines for line in (*part, "")][:-1]


def kind_lines(payoffs: Payoffs) -> list[str]:
    """How often players of one role beat those of another, over the whole run."""
    lines = ["of all games between roles:"]
    for each in payoffs.kinds.values():
        games = each.wins + each.draws + each.losses
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
