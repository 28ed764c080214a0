"""Who beats whom in a league, as its newest checkpoint has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import LeagueState
from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.ratings import elo
from juggler.driver.league_players import LEAGUE
from juggler.runtime.checkpoints.checkpoint import CheckpointError, read_record

_MOST_PLAYERS: Final = 40  # in the matrix: those that learn, and the newest others


def league_matrix(checkpoint: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """The players that can play, and the win rate of each against each.

    Args:
        checkpoint: of the run.
        table: `league` of its configuration.

    Returns:
        For JSON: `players`; `win_rates` and `games`, of the row against the column, null where two
        have not played; and from how many `min_games` on a win rate is sure. {} without a league.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    state = read_record(checkpoint).get("counters", {}).get(LEAGUE)
    if state is None:
        return {}
    try:
        league = msgspec.convert(state, LeagueState)
    except msgspec.ValidationError as error:
        raise CheckpointError(checkpoint, f"its league is damaged: {error}") from error
    players = [each for each in league.players if each.plays]
    others = [each for each in players if not each.learning]
    learning = [each for each in players if each.learning][:_MOST_PLAYERS]
    room = max(0, _MOST_PLAYERS - len(learning))
    shown = [*learning, *others[len(others) - min(room, len(others)) :]]
    payoffs = Payoffs(1.0, 1, league.pairs, league.kinds, league.means)
    ratings = elo(payoffs, [each.player_id for each in players])
    ids = [each.player_id for each in shown]
    return {
        "checkpoint": checkpoint.name,
        "min_games": table.get("min_games", LeagueConfig.min_games),
        "left_out": len(players) - len(shown),
        "players": [
            {
                "id": each.player_id,
                "role": each.role,
                "learning": each.learning,
                "parent": each.parent,
                "steps": each.steps if each.learning else each.born_at,
                "elo": round(ratings[each.player_id], 1),
            }
            for each in shown
        ],
        "win_rates": [[_rate(payoffs, row, column) for column in ids] for row in ids],
        "games": [[payoffs.games(row, column) for column in ids] for row in ids],
    }


def _rate(payoffs: Payoffs, player: str, other: str) -> float | None:
    wins, draws, losses = payoffs.counts(player, other) if player != other else (0.0, 0.0, 0.0)
    played = wins + draws + losses
    return round((wins + draws / 2) / played, 4) if played else None
