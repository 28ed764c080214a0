"""A picture of a league: who beats whom, and how ratings grew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.roster import Player
from juggler.driver.record.metrics_file import metrics_table, number
from juggler.driver.record.run_directory import METRICS_FILE

_BEFORE, _BEHIND = "league/learning/", "/elo"  # before and after a player's name in a key


def draw(players: Sequence[Player], payoffs: Payoffs, run_dir: Path, output: Path) -> Path:
    """Draw a league.

    Args:
        players: those that can play.
        payoffs: their results.
        run_dir: its metrics have the ratings over time.
        output: file of the picture. Its suffix decides the format, PNG without one.

    Returns:
        The path of the picture.
    """
    from matplotlib.figure import Figure

    ids = [player.player_id for player in players]
    rates = np.full((len(ids), len(ids)), np.nan)  # [P, P]
    for row, one in enumerate(ids):
        for column, other in enumerate(ids):
            if one != other and payoffs.games(one, other):
                rates[row, column] = payoffs.win_rate(one, other)
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(rates, cmap="RdBu", vmin=0, vmax=1)
    left.set_xticks(range(len(ids)), ids, rotation=90, fontsize=7)
    left.set_yticks(range(len(ids)), ids, fontsize=7)
    left.set_title("win rate of the row against the column")
    figure.colorbar(image, ax=left)
    for place, (name, curve) in enumerate(_ratings(run_dir).items()):
        steps, ratings = zip(*curve, strict=True)
        right.plot(steps, ratings, ("-", "--", ":", "-.")[place // 10 % 4], label=name)
    right.set_xlabel("steps trained, all players")
    right.set_ylabel("Elo rating")
    right.set_title("ratings of players that learn")
    if right.lines:
        right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    path = output if output.suffix else output.with_suffix(".png")
    figure.savefig(path, dpi=120)
    return path


def _ratings(run_dir: Path) -> dict[str, list[tuple[float, float]]]:
    """By player, its rating by the steps that the run had trained on then."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in metrics_table(run_dir) if (run_dir / METRICS_FILE).is_file() else []:
        for key in line:
            if key.startswith(_BEFORE) and key.endswith(_BEHIND):
                name = key.removeprefix(_BEFORE).removesuffix(_BEHIND)
                at = number(line.get("env_steps_trained")), number(line[key])
                curves.setdefault(name, []).append(at)
    return curves
