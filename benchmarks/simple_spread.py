"""What a central critic gains where three agents share a task, seed by seed.

    nice -n 15 python benchmarks/simple_spread.py --steps 300000 --seeds 3
    nice -n 15 python benchmarks/simple_spread.py --sees observation state --steps 1000000

Runs train one policy for the three agents of `pettingzoo:mpe2/simple_spread_v3` by PPO, with a
value function that sees the observation of its own agent (independent PPO with shared parameters),
or the environment's state beside it (MAPPO; Yu et al. 2021, "The Surprising Effectiveness of PPO in
Cooperative Multi-Agent Games"). Otherwise they are the same. A return is that of an episode, the
sum over its 25 steps and over the three agents, with the environment's default local_ratio of 0.5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from commands import environment, table

KEYS = (
    'env = "pettingzoo:mpe2/simple_spread_v3"\n'
    'algorithm = "ppo"\n'
    "num_env_runners = 1\n"
    "envs_per_runner = 32\n"
    "fragment_steps = 25\n"  # an episode
    "synchronous = true\n"
    "batch_size = 2400\n"  # agent steps: 32 episodes of three agents
    "epochs = 10\n"
    "minibatches = 1\n"
    "lr = 7e-4\n"
    "entropy_coefficient = 0.01\n"
    "checkpoint_updates = 1000000\n"
)


def trained(sees: str, steps: int, seed: int, more: list[str]) -> list[tuple[int, float]]:
    """Train one seed; returns (agent steps, mean return of the last 100 episodes) over the run."""
    run = Path(tempfile.mkdtemp(prefix="simple-spread-")) / "run"
    config = run.with_name("config.toml")
    own = f'critic_sees = "{sees}"\nstop_steps = {steps}\nseed = {seed}\n'
    config.write_text(KEYS + own)
    command = [sys.executable, "-m", "juggler", "train", str(config), *more]
    command += ["--run-dir", str(run), "--progress", "off"]
    subprocess.run(command, check=True, env=environment())
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        (line["env_steps_trained"], line["episode_return_mean"])
        for line in lines
        if line.get("episode_return_mean") is not None
    ]


def at(curve: list[tuple[int, float]], steps: float) -> float:
    """The return when so many steps had been trained on, or at the end."""
    return next((value for trained_on, value in curve if trained_on >= steps), curve[-1][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300_000, help="agent steps of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--sees", nargs="+", default=["observation", "state"])
    parser.add_argument("more", nargs="*", help="further options of juggler train, behind --")
    said = parser.parse_args()
    shares = (0.25, 0.5, 0.75, 1.0)
    found: dict[str, list[list[float]]] = {sees: [] for sees in said.sees}
    for seed in range(said.first_seed, said.first_seed + said.seeds):
        for sees in said.sees:  # in turn: a busy machine is busy for both
            curve = trained(sees, said.steps, seed, said.more)
            found[sees].append([at(curve, share * said.steps) for share in shares])
            print(json.dumps({"seed": seed, "critic_sees": sees, "curve": curve}), flush=True)
    rows = [
        [
            sees,
            *(
                f"{mean(each):.1f} ({min(each):.1f}–{max(each):.1f})"
                for each in zip(*runs, strict=True)
            ),
        ]
        for sees, runs in found.items()
    ]
    header = ["critic_sees", *(f"{share * said.steps / 1000:g}k steps" for share in shares)]
    print(table(f"simple_spread, {said.seeds} seeds", header, rows))


if __name__ == "__main__":
    main()
