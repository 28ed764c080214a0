"""How often one policy that learned connect four by self-play beats random moves, on either side.

    python benchmarks/connect_four.py --seeds 3
    python benchmarks/connect_four.py --run runs/mine

Each seed trains `connect-four` and then plays 400 matches on either side. Its moves are drawn as in
training, or the most likely ones. The goal is that it wins 95 % of the matches.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from commands import table, trained_run

from juggler.driver.play_checkpoint import play_matches
from juggler.policies.wilson import wilson

SIDES = ("player_0", "player_1")


def wins(run: Path, side: str, matches: int, explore: bool) -> int:
    """How many matches a policy wins on one side, against random moves."""
    (other,) = set(SIDES) - {side}
    players = {side: "default", other: "random"}
    return play_matches(run, players, matches, 1, explore=explore).records[side].wins


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--run", type=Path, help="measure this run, and train none")
    parser.add_argument("--matches", type=int, default=400, help="on each side")
    parser.add_argument("more", nargs="*", help="further options of juggler train, behind --")
    said = parser.parse_args()
    rows = []
    for seed in range(said.first, said.first + (1 if said.run else said.seeds)):
        run = said.run or trained_run("connect-four", seed, said.more)
        cells = []
        for explore in (True, False):
            for side in SIDES:
                won = wins(run, side, said.matches, explore)
                low, high = wilson(won, said.matches)
                cells.append(f"{won / said.matches:.1%} ({low:.0%} to {high:.0%})")
        rows.append([str(seed), *cells])
        print(json.dumps({"seed": seed, "won": cells}), flush=True)
    head = [f"{moves} moves, {side}" for moves in ("drawn", "likeliest") for side in SIDES]
    print(table("connect four, won against random moves", ["seed", *head], rows))


if __name__ == "__main__":
    main()
