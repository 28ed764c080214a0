"""What three agents learn that share a policy and a task, with and without a central critic.

    python benchmarks/simple_spread.py --seeds 5
    python benchmarks/simple_spread.py --seeds 5 --peer PYTHON
    python benchmarks/simple_spread.py --references

Runs train one policy for the three agents of `pettingzoo:mpe2/simple_spread_v3` by PPO, with a
value function that sees the observation of its own agent (independent PPO with shared parameters),
or the environment's state beside it (MAPPO; Yu et al. 2021, "The Surprising Effectiveness of PPO in
Cooperative Multi-Agent Games"). Otherwise they are the same. A return is that of an episode, the
sum over its 25 steps and over the three agents, with the environment's default local_ratio of 0.5.

`--peer` names a Python that has stable-baselines3 and mpe2: its PPO learns from as many agent steps
beside each seed, with the same settings. `--references` plays 300 episodes each of random choices,
of standing still, and of a script that sends each agent to a landmark of its own, and trains
nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from commands import HERE, environment, table, train

GAMES = 32
EPISODE = 25
EPOCHS, MINIBATCHES = 10, 4
STEPS = GAMES * EPISODE * 3  # agent steps of an update: an episode of each game
LR, GAMMA, LAMBDA, ENTROPY, REWARD_SCALE = 1e-3, 0.95, 0.95, 0.01, 0.1

KEYS = f"""
env = "pettingzoo:mpe2/simple_spread_v3"
algorithm = "ppo"
num_env_runners = 1
envs_per_runner = {GAMES}
fragment_steps = {EPISODE}
synchronous = true
batch_size = {STEPS}
epochs = {EPOCHS}
minibatches = {MINIBATCHES}
lr = {LR}
gamma = {GAMMA}
lambda_ = {LAMBDA}
entropy_coefficient = {ENTROPY}
value_coefficient = 0.5
reward_scale = {REWARD_SCALE}
checkpoint_updates = 1000000
"""

PEER = {
    "n_steps": EPISODE,
    "batch_size": STEPS // MINIBATCHES,
    "n_epochs": EPOCHS,
    "learning_rate": LR,
    "gamma": GAMMA,
    "gae_lambda": LAMBDA,
    "ent_coef": ENTROPY,
    "vf_coef": 0.5,
}

Curve = list[tuple[int, float]]  # (agent steps, mean return of the last 100 episodes)
Act = Callable[[dict[str, Any], np.random.Generator], dict[str, int]]


def trained(sees: str, steps: int, seed: int, more: list[str]) -> Curve:
    """Train one seed."""
    with tempfile.TemporaryDirectory(prefix="simple-spread-") as directory:
        config = Path(directory, "config.toml")
        config.write_text(f'{KEYS}critic_sees = "{sees}"\nstop_steps = {steps}\n')
        _, lines = train(config, "--seed", seed, *more)
    return [
        (line["env_steps_trained"], line["episode_return_mean"])
        for line in lines
        if line.get("episode_return_mean") is not None
    ]


def trained_by_peer(python: str, steps: int, seed: int) -> Curve:
    """Train one seed with Stable-Baselines3."""
    given = {"games": GAMES, "steps": steps, "seed": seed, "reward_scale": REWARD_SCALE}
    command = [python, str(HERE / "peers" / "sb3_agents.py"), json.dumps({**given, "ppo": PEER})]
    done = subprocess.run(command, check=True, env=environment(), stdout=subprocess.PIPE, text=True)
    curve: Curve = json.loads(done.stdout.splitlines()[-1])["curve"]
    return curve


def at_random(seen: dict[str, Any], rng: np.random.Generator) -> dict[str, int]:
    return {agent: int(rng.integers(5)) for agent in seen}


def still(seen: dict[str, Any], rng: np.random.Generator) -> dict[str, int]:
    return dict.fromkeys(seen, 0)


def to_landmarks(seen: dict[str, Any], rng: np.random.Generator) -> dict[str, int]:
    """Each agent goes to a landmark of its own, so that all ways together are shortest."""
    agents = list(seen)
    ways = np.stack([seen[agent][4:10].reshape(3, 2) for agent in agents])  # [A, landmarks, 2]
    far = np.linalg.norm(ways, axis=-1)  # [A, landmarks]
    best = min(itertools.permutations(range(3)), key=lambda to: sum(far[range(3), to]))
    actions = {}
    for number, (agent, landmark) in enumerate(zip(agents, best, strict=True)):
        left = ways[number, landmark] - 0.35 * seen[agent][:2]  # it slides on for a while
        axis = int(np.abs(left).argmax())
        near = np.abs(left).max() < 0.04
        actions[agent] = 0 if near else 1 + 2 * axis + int(left[axis] > 0)
    return actions


def played(act: Act, episodes: int = 300) -> list[float]:
    """Returns of episodes."""
    from mpe2 import simple_spread_v3

    game, rng, returns = simple_spread_v3.parallel_env(), np.random.default_rng(0), []
    for seed in range(episodes):
        seen, _ = game.reset(seed=seed)
        total = 0.0
        while game.agents:
            seen, rewards, *_ = game.step(act(seen, rng))
            total += sum(rewards.values())
        returns.append(total)
    return returns


def references() -> str:
    rows = []
    for name, act in (("random", at_random), ("still", still), ("script", to_landmarks)):
        returns = played(act)
        error = stdev(returns) / len(returns) ** 0.5
        rows.append([name, f"{mean(returns):.1f} ± {error:.1f}"])
    return table("simple_spread, without training", ["who plays", "mean return"], rows)


def at(curve: Curve, steps: float) -> float:
    """The return after N trained steps, or at the end."""
    return next((value for trained_on, value in curve if trained_on >= steps), curve[-1][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400_000, help="agent steps of each run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--sees", nargs="+", default=["observation", "state"])
    parser.add_argument("--peer", metavar="PYTHON", help="train by Stable-Baselines3, too")
    parser.add_argument("--references", action="store_true", help="train nothing")
    parser.add_argument("more", nargs="*", help="further options of juggler train, behind --")
    said = parser.parse_args()
    if said.references:
        print(references())
        return
    shares = (0.25, 0.5, 0.75, 1.0)
    found: dict[str, list[list[float]]] = {}
    for seed in range(said.first_seed, said.first_seed + said.seeds):
        curves = {sees: trained(sees, said.steps, seed, said.more) for sees in said.sees}
        if said.peer:
            curves["Stable-Baselines3"] = trained_by_peer(said.peer, said.steps, seed)
        for who, curve in curves.items():
            returns = [at(curve, share * said.steps) for share in shares]
            found.setdefault(who, []).append(returns)
            print(json.dumps({"seed": seed, "who": who, "returns": returns}), flush=True)
    rows = [
        [
            who,
            *(
                f"{mean(each):.1f} ({min(each):.1f} to {max(each):.1f})"
                for each in zip(*runs, strict=True)
            ),
        ]
        for who, runs in found.items()
    ]
    header = ["value function sees", *(f"{share * said.steps / 1000:g}k steps" for share in shares)]
    print(table(f"simple_spread, {said.seeds} seeds", header, rows))


if __name__ == "__main__":
    main()
