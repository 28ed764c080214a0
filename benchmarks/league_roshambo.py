"""How policies of rock, paper, scissors do against players that they have never seen.

These are the 43 bots of the roshambo programming competition, which come with OpenSpiel
(juggler[openspiel]).

    python benchmarks/league_roshambo.py --stop-steps 150000
    python benchmarks/league_roshambo.py --run runs/mine

Trains `rock-paper-scissors-league` and, beside it, plain self-play. The newest policy of each then
plays 1,000 throws against each of the bots. It remembers nothing, so it cannot find a pattern in
what a bot throws. What it loses says how far it is from the equilibrium, and how well bots find
that out.

M. Lanctot et al., Population-based Evaluation in Repeated Rock-Paper-Scissors as a Benchmark for
Multiagent Reinforcement Learning, 2023 (arXiv:2303.03196).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

import numpy as np
import pyspiel
from commands import table
from league_rps import self_play, trained
from numpy.typing import NDArray

import juggler

THROWS = 1000  # as many as the bots are made for
GAME = f"repeated_game(stage_game=matrix_rps(),num_repetitions={THROWS})"


def newest(run: Path) -> NDArray[np.float64]:
    """The policy of the main at the end of a run: the probability of each choice, [A]."""
    policy = juggler.load_policy(run, module_id="main-0")
    chances = policy.probabilities(np.ones(1, np.float32)).astype(np.float64).reshape(-1)  # [A]
    return chances / chances.sum()


def against(bot: str, policy: NDArray[np.float64], seed: int) -> float:
    """What the policy gets from a bot by throw: from -1, it always loses, to 1."""
    throws = np.random.default_rng(seed).choice(len(policy), THROWS, p=policy)  # [N]
    state = pyspiel.load_game(GAME).new_initial_state()
    opponent = pyspiel.make_roshambo_bot(1, bot, THROWS)
    for throw in throws:
        state.apply_actions([int(throw), opponent.step(state)])
    return float(state.returns()[0]) / THROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, help="measure this run, and train none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-steps", type=int, default=400_000)
    said = parser.parse_args()
    more = ["--stop-steps", str(said.stop_steps)]
    if said.run:
        runs = {"run": said.run}
    else:
        leagues = {"league": None, "self-play": self_play()}
        runs = {name: trained(said.seed, each, more) for name, each in leagues.items()}
    policies = {name: newest(run) for name, run in runs.items()}
    policies["uniform"] = np.full(3, 1 / 3)  # [A]
    rows = []
    for name, policy in policies.items():
        got = {
            bot: against(bot, policy, number)
            for number, bot in enumerate(pyspiel.roshambo_bot_names())
        }
        worst = min(got, key=lambda bot: got[bot])
        chances = ", ".join(f"{chance:.2f}" for chance in policy)
        rows.append([name, chances, f"{mean(got.values()):.3f}", f"{got[worst]:.3f} ({worst})"])
        print(json.dumps({"player": name, "by_bot": got}), flush=True)
    head = ["player", "rock, paper, scissors", "mean over the bots", "against the worst"]
    print(table("return by throw", head, rows))


if __name__ == "__main__":
    main()
