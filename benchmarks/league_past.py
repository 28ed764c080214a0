"""How often the main of a league beats each of the copies that the league has kept.

    python benchmarks/league_past.py connect-four-league --seed 0
    python benchmarks/league_past.py --run runs/mine --matches 400

The goal for connect four is that the newest main beats every older one in 60 % of the matches. Half
of the matches of a pair are on each side; a draw is half a win. Policies draw their actions as they
do in training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from commands import table, trained_run

from juggler.driver.agent_tables import LEAGUE
from juggler.driver.play_checkpoint import play_matches
from juggler.policies.wilson import wilson
from juggler.runtime.checkpoints.checkpoint import read

MAIN = "main-0"


def copies(run: Path) -> list[tuple[str, str, int]]:
    """(id, whose copy it is, steps that one had) of each copy that can play, the oldest first."""
    players = read(run).counters[LEAGUE]["players"]
    return [
        (each["player_id"], each["parent"], each["born_at"])
        for each in players
        if each["parent"] and each["ready"] and not each["retired"]
    ]


def points(run: Path, copy_id: str, matches: int, seed: int) -> float:
    """The main's score in N matches against a copy: 1 for a win and 0.5 for a draw."""
    agents, won = ("player_0", "player_1"), 0.0
    for side, (mine, other) in enumerate((agents, agents[::-1])):
        seated = {mine: MAIN, other: str(run / "frozen" / copy_id)}
        played = play_matches(run, seated, matches // 2, 1000 * (2 * seed + side), explore=True)
        for match in played.matches:
            ahead = match.returns[mine] - match.returns[other]
            won += 0.5 + 0.5 * ((ahead > 0) - (ahead < 0))
    return won


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", nargs="?", default="connect-four-league")
    parser.add_argument("--run", type=Path, help="measure this run, and train none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matches", type=int, default=200, help="against each copy; even")
    parser.add_argument("more", nargs="*", help="further options of juggler train, behind --")
    said = parser.parse_args()
    run = said.run or trained_run(said.config, said.seed, said.more)
    rows, rates = [], {}
    for number, (copy_id, parent, born_at) in enumerate(copies(run)):
        won = points(run, copy_id, said.matches, number)
        low, high = wilson(won, said.matches)
        rates[copy_id] = won / said.matches
        rows.append(
            [copy_id, f"{parent} at {born_at}", f"{rates[copy_id]:.1%}", f"{low:.0%} to {high:.0%}"]
        )
    print(table(f"{MAIN} against copies", ["copy", "of", "won", "95 %"], rows))
    print(json.dumps({"steps": read(run).counters["trained"], "won": rates}))


if __name__ == "__main__":
    main()
