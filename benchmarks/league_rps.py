"""Whether a league of rock, paper, scissors is hard to exploit where self-play is not.

    python benchmarks/league_rps.py --seeds 12
    python benchmarks/league_rps.py --seeds 1 -- --lr 1e-2

Each seed trains `rock-paper-scissors-league` as it ships, and once more with plain self-play in
place of the league. Both keep copies of the latest policy. Two means over those of the second half:

- exploitability: what the best response wins against a copy. It is 0 for the equilibrium, and 1 for
  a policy that always makes the same choice.
- least win rate: of a copy, against the one of its past that it does worst against.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from commands import table, trained_run
from numpy.typing import NDArray

import juggler
from juggler.driver.config_files import read_shipped
from juggler.envrunner.multi_agent.matrix_game import ROCK_PAPER_SCISSORS

CONFIG = "rock-paper-scissors-league"
PAYOFFS = np.array(ROCK_PAPER_SCISSORS, np.float64)  # [A, A]


def self_play() -> dict[str, Any]:
    """The league of the configuration, whose main plays against itself alone; it is copied as often
    as before."""
    league: dict[str, Any] = read_shipped(CONFIG).config.agents.league
    steps = league["options"]["max_phase_steps"]
    options = {"save_steps": steps, "latest_probability": 1.0}
    return {**league, "builder": "self_play_window", "options": options}


def trained(seed: int, league: dict[str, Any] | None, more: list[str]) -> Path:
    """Train one seed; returns its directory."""
    instead = [] if league is None else ["--league", json.dumps(league)]
    return trained_run(CONFIG, seed, [*more, *instead])


def policies(run: Path) -> list[NDArray[np.float64]]:
    """The copies of the main, the oldest first: the probability of each choice."""
    copies = sorted((run / "frozen").iterdir(), key=lambda path: int(path.name.rpartition("-v")[2]))
    seen = np.ones(1, np.float32)
    return [
        juggler.load_policy(copy).probabilities(seen).astype(np.float64).reshape(-1)
        for copy in copies
    ]


def measured(run: Path) -> tuple[float, float]:
    """(exploitability, least win rate against its past), of the second half."""
    past = policies(run)
    half = len(past) // 2
    exploitable = [float((-policy @ PAYOFFS).max()) for policy in past[half:]]
    least = [
        0.5 + 0.5 * min(float(past[now] @ PAYOFFS @ before) for before in past[:now])
        for now in range(half, len(past))
    ]
    return mean(exploitable), mean(least)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("more", nargs="*", help="further options of juggler train, behind --")
    said = parser.parse_args()
    rows, results = [], []
    for seed in range(said.first, said.first + said.seeds):
        league = measured(trained(seed, None, said.more))
        alone = measured(trained(seed, self_play(), said.more))
        results.append((*league, *alone))
        rows.append([str(seed), *(f"{value:.3f}" for value in results[-1])])
        print(json.dumps({"seed": seed, "league": league, "self_play": alone}), flush=True)
    columns = [f"{what}, {who}" for who in ("league", "self-play") for what in ("expl.", "least")]
    rows.append(["median", *(f"{median(column):.3f}" for column in zip(*results, strict=True))])
    print(table("rock, paper, scissors", ["seed", *columns], rows))


if __name__ == "__main__":
    main()
