"""The return over steps, compared with Stable-Baselines3: PPO with the same hyper-parameters.

python benchmarks/sample_efficiency.py
python benchmarks/sample_efficiency.py --off-policy --seeds 1    # SAC and TD3 in place of PPO

JUGGLER_SB3_PYTHON must name a Python with stable-baselines3; it need not be this one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from commands import HERE, environment, table, train, trained_run
from matplotlib.figure import Figure
from numpy.typing import NDArray

SEEDS = range(5)
AT_ONCE = 2  # parallel runs: only steps are counted here
THEIR_PYTHON = "JUGGLER_SB3_PYTHON"

Curve = tuple[list[int], list[float]]  # steps, mean return of the last 100 episodes by then


@dataclass(frozen=True)
class Task:
    """A task with its settings; all others are the defaults of Stable-Baselines3."""

    env: str
    steps: int
    envs: int
    rollout: int  # steps of each environment before an update
    lr: float = 3e-4
    gamma: float = 0.99
    lambda_: float = 0.95
    minibatch: int = 64
    epochs: int = 10

    @property
    def batch(self) -> int:
        return self.envs * self.rollout

    def ours(self, seed: int) -> Curve:
        _, lines = train(
            *("--algorithm", "ppo", "--synchronous", "--env", self.env, "--seed", seed),
            *("--stop-steps", self.steps, "--num-env-runners", 1, "--vectorize", "sync"),
            *("--envs-per-runner", self.envs, "--fragment-steps", self.rollout),
            *("--batch-size", self.batch, "--minibatches", self.batch // self.minibatch),
            *("--epochs", self.epochs, "--lr", self.lr, "--gamma", self.gamma),
            *("--lambda_", self.lambda_, "--clip", 0.2, "--entropy-coefficient", 0.0),
            # Our loss has half the squared error, theirs the whole.
            *("--value-coefficient", 2 * 0.5, "--grad-clip", 0.5),
            # Observations and rewards are not changed.
            *("--connectors", "{}"),
        )
        # Episodes of a round are counted once it has been trained on.
        known = [line for line in lines if line["episode_return_mean"] is not None]
        return (
            [line["env_steps_trained"] for line in known],
            [line["episode_return_mean"] for line in known],
        )

    def theirs(self, seed: int) -> Curve:
        ppo = {
            "n_steps": self.rollout,
            "batch_size": self.minibatch,
            "n_epochs": self.epochs,
            "learning_rate": self.lr,
            "gamma": self.gamma,
            "gae_lambda": self.lambda_,
        }
        given = {"env": self.env, "n_envs": self.envs, "steps": self.steps, "seed": seed}
        found = _theirs({**given, "algorithm": "PPO", "keys": ppo})
        return found["steps"], found["returns"]


TASKS = (
    Task("CartPole-v1", steps=100_000, envs=8, rollout=256),
    Task("Acrobot-v1", steps=100_000, envs=8, rollout=256),
    Task("Pendulum-v1", steps=120_000, envs=4, rollout=1024, lr=1e-3, gamma=0.9),
)


@dataclass(frozen=True)
class OffPolicy:
    """Pendulum as a configuration of ours that ships has it, and as much for Stable-Baselines3."""

    name: str
    steps: int = 20_000

    def ours(self, seed: int) -> float:
        """The mean return of 500 episodes of greedy play at the end: with 100, where they happen to
        begin makes a difference of 20."""
        import juggler

        options = ("--synchronous", "--stop-return", "0", "--stop-steps", str(self.steps))
        run = trained_run(f"pendulum-{self.name}", seed, (*options, "--no-confirm"))
        played = juggler.evaluate(run, episodes=500, seed=1000)
        shutil.rmtree(run.parent)
        return played.mean

    def theirs(self, seed: int) -> float:
        keys = {
            "learning_rate": 1e-3,
            "buffer_size": 100_000,
            "learning_starts": 1000,
            "batch_size": 256,
            "train_freq": 8,  # of each of four environments
            "gradient_steps": 32,
            "policy_kwargs": {"net_arch": [256, 256]},
        }
        found = _theirs(
            {
                "env": "Pendulum-v1",
                "n_envs": 4,
                "steps": self.steps,
                "seed": seed,
                "algorithm": self.name.upper(),
                "keys": keys,
                "noise": 0.1 if self.name == "td3" else None,
            }
        )
        greedy: float = found["greedy"]
        return greedy


def measure_off_policy(seeds: range) -> str:
    """The table of SAC and TD3."""
    _must_have_theirs()
    rows = []
    for task in (OffPolicy("sac"), OffPolicy("td3")):
        for side, play in (("Juggler", task.ours), ("Stable-Baselines3", task.theirs)):
            returns = [play(seed) for seed in seeds]
            cells = [f"{each:.0f}" for each in returns]
            rows.append([task.name.upper(), side, *cells, f"**{median(returns):.0f}**"])
            print(*rows[-1], flush=True)
    return table("SAC and TD3", ["", "", *(f"seed {seed}" for seed in seeds), "median"], rows)


def _theirs(given: dict[str, Any]) -> dict[str, Any]:
    """What their script has found."""
    command = [os.environ[THEIR_PYTHON], str(HERE / "peers/sb3_curves.py"), json.dumps(given)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _must_have_theirs() -> None:
    if not os.environ.get(THEIR_PYTHON):
        raise SystemExit(
            f"sample_efficiency needs a Python with stable-baselines3, which {THEIR_PYTHON} names: "
            "benchmarks/README.md says how to get one"
        )


def measure(picture: Path, seeds: range = SEEDS, tasks: tuple[Task, ...] = TASKS) -> str:
    """The table; draws the curves into `picture`."""
    _must_have_theirs()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {
            (task, seed): (pool.submit(task.ours, seed), pool.submit(task.theirs, seed))
            for seed in seeds
            for task in tasks
        }
        curves = {key: (mine.result(), theirs.result()) for key, (mine, theirs) in runs.items()}
    rows, drawn = [], {}
    for task in tasks:
        grid = np.linspace(task.steps / 20, task.steps, 20)  # [20]
        drawn[task] = [
            np.array([np.interp(grid, *curves[task, seed][side]) for seed in seeds])
            for side in (0, 1)
        ]  # [seeds, 20] of ours and of theirs
        rows += _rows(task, *drawn[task])
    _draw(drawn, picture)
    head = ["", "", *(f"{share} of the steps" for share in ("1/4", "2/4", "3/4", "all"))]
    return table("Sample efficiency", [*head, "mean over steps"], rows)


def _rows(task: Task, ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> list[list[str]]:
    """A task's rows for returns [seeds, 20]: the median, with the least and the greatest."""
    rows = []
    for name, returns in (("Juggler", ours), ("Stable-Baselines3", theirs)):
        columns = [*returns[:, 4::5].T, returns.mean(1)]  # [seeds] each
        cells = [f"**{median(x):.0f}** ({min(x):.0f} to {max(x):.0f})" for x in columns]
        rows.append([f"{task.env}, {task.steps // 1000}k steps", name, *cells])
    return rows


def _draw(drawn: dict[Task, list[NDArray[np.float64]]], picture: Path) -> None:
    figure = Figure(figsize=(3.6 * len(drawn), 3.4), layout="constrained")
    columns = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axes, (task, sides) in zip(columns, drawn.items(), strict=True):
        steps = np.linspace(task.steps / 20, task.steps, 20) / 1e3  # [20]
        for name, colour, returns in zip(
            ("Juggler", "Stable-Baselines3"), ("#0072b2", "#d55e00"), sides, strict=True
        ):
            axes.plot(steps, returns.T, color=colour, lw=0.7, alpha=0.45)
            axes.plot(steps, np.median(returns, 0), color=colour, lw=2.2, label=name)
        axes.set_title(task.env, fontsize=10)
        axes.set_xlabel("environment steps (thousand)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    columns[0].set_ylabel("mean return of 100 episodes")
    columns[0].legend(frameon=False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--off-policy", action="store_true", help="SAC and TD3 in place of PPO")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    options = parser.parse_args()
    if options.off_policy:
        print(measure_off_policy(range(options.seeds)))
    else:
        drawn = Path(__file__).with_name("sample_efficiency.png")
        print(measure(drawn, range(options.seeds)))
