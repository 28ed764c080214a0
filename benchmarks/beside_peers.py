"""Trained steps a second of CartPole, beside Sample Factory's APPO and RLlib's IMPALA in turns.

    python benchmarks/beside_peers.py --sample-factory sf/bin/python --rllib rllib/bin/python

Each has the same network, number of environments and steps in an update, one process that samples
and one that learns. `peers/sample_factory_agents.py` and `peers/rllib_cartpole.py` say how they
are set up, and run in Pythons of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

from commands import HERE, environment, machine, pairs, table
from run import trained_rate

#: For each peer its script, and how many times as fast Juggler is to be with 64 and 256.
PEERS = {
    "Sample Factory": (HERE / "peers/sample_factory_agents.py", {64: 6, 256: 5}),
    "RLlib": (HERE / "peers/rllib_cartpole.py", {64: 20, 256: 20}),
}


def peer_rate(python: str, path: Path, envs: int, seconds: float, *options: str) -> float:
    """Steps that a peer trains on per second.

    Raises:
        RuntimeError: its script failed.
        TimeoutExpired: its script did not end.
    """
    command = [python, str(path), "--envs", str(envs), "--seconds", str(seconds), *options]
    # Sample Factory waits for ever for a worker that has failed.
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=300 + seconds
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["steps_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample-factory", help="a Python with sample-factory")
    parser.add_argument("--rllib", help="a Python with ray[rllib]")
    parser.add_argument("--envs", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    said = parser.parse_args()
    pythons = {"Sample Factory": said.sample_factory, "RLlib": said.rllib}
    rows = []
    for name, (path, goals) in PEERS.items():
        if not (python := pythons[name]):
            continue
        for envs in said.envs:
            ours, theirs, ratios = pairs(
                lambda envs=envs: trained_rate(envs),  # type: ignore[misc]
                lambda python=python, path=path, envs=envs: peer_rate(  # type: ignore[misc]
                    python, path, envs, said.seconds
                ),
                said.pairs,
            )
            spread = f"({min(ratios):.1f}–{max(ratios):.1f})"
            ratio = f"**{statistics.median(ratios):.1f}** {spread}"
            goal = f"≥ {goals[envs]}" if envs in goals else ""
            rates = (f"{ours / 1e3:.0f}k", f"{theirs / 1e3:.1f}k")
            rows.append([f"{name}, 1 × {envs}", *rates, ratio, goal])
    head = ["beside", "Juggler, steps/s", "the peer, steps/s", "ratio", "goal"]
    print(f"On {machine()}.\n\n{table('CartPole beside peers', head, rows)}")


if __name__ == "__main__":
    main()
