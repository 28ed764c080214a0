"""How near two players of a game of two choices come to its equilibrium, seed by seed.

    python benchmarks/two_by_two.py --seeds 5

Each seed trains `two-by-two`, whose payoffs for the first player are [[3, -2], [-2, 1]]. In the
equilibrium, both players make the first choice with a probability of 3/8.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from commands import table, trained_run

import juggler


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("more", nargs="*", help="further options of juggler train, behind --")
    said = parser.parse_args()
    rows = []
    for seed in range(said.seeds):
        run = trained_run("two-by-two", seed, said.more)
        first = [
            float(juggler.load_policy(run, module_id=player).probabilities(np.ones(1, "f"))[0])
            for player in ("row", "column")
        ]
        rows.append([str(seed), *(f"{chance:.3f}" for chance in first)])
        print(json.dumps({"seed": seed, "first": first}), flush=True)
    print(table("the first of two choices: 0.375", ["seed", "row", "column"], rows))


if __name__ == "__main__":
    main()
