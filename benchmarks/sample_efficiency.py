"""The return over steps, compared with Stable-Baselines3: PPO with the same hyper-parameters.

python benchmarks/sample_efficiency.py
python benchmarks/sample_efficiency.py --algorithms td3 sac dqn --seeds 2    # instead of PPO

JUGGLER_SB3_PYTHON must name a Python with stable-baselines3; it need not be this one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from commands import HERE, environment, table, train, trained_run
from matplotlib.figure import Figure
from numpy.typing import NDArray
from peers.greedy import greedy_return

SEEDS = range(5)
AT_ONCE = 2  # parallel runs: only steps are counted here
THEIR_PYTHON = "JUGGLER_SB3_PYTHON"

Curve = tuple[list[int], list[float]]  # steps, mean return of the last 100 episodes until then


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
    """A task for an algorithm that keeps steps, with the same settings on both sides."""

    env: str
    algorithm: str
    steps: int
    envs: int
    ours_keys: Mapping[str, object]
    theirs_keys: Mapping[str, object]
    noise: float | None = None  # deviation of what is added to actions

    def ours(self, seed: int) -> float:
        """The mean return of greedy play at the end."""
        import juggler

        options = ["--env", self.env, "--num-env-runners", "1", "--synchronous"]
        options += ["--envs-per-runner", str(self.envs), "--stop-steps", str(self.steps)]
        options += ["--connectors", "{}", "--optimizer-epsilon", "1e-8"]
        options += ["--model", json.dumps({**NETWORK, "initializer": "default"})]
        for key, value in self.ours_keys.items():
            values = value if isinstance(value, tuple) else (value,)
            options += [f"--{key}", *map(str, values)]
        run = trained_run("", seed, ["--algorithm", self.algorithm, *options])
        policy = juggler.load_policy(run)
        shutil.rmtree(run.parent)
        return greedy_return(lambda observations: policy.act(observations)[0], self.env)

    def theirs(self, seed: int) -> float:
        found = _theirs(
            {
                "env": self.env,
                "n_envs": self.envs,
                "steps": self.steps,
                "seed": seed,
                "algorithm": self.algorithm.upper(),
                "keys": {
                    **self.theirs_keys,
                    "buffer_size": 100_000,
                    "policy_kwargs": {"net_arch": NETWORK["hidden_sizes"]},
                },
                "noise": self.noise,
            }
        )
        greedy: float = found["greedy"]
        return greedy


NETWORK = {"hidden_sizes": [256, 256], "activation": "relu"}


def _pendulum(algorithm: str, noise: float | None) -> OffPolicy:
    """An update of 32 optimizer steps for each 8 steps of four environments."""
    return OffPolicy(
        env="Pendulum-v1",
        algorithm=algorithm,
        steps=20_000,
        envs=4,
        ours_keys={"fragment-steps": 8, "batch-size": 32, "lr": 1e-3, "replay-begin": 1000},
        theirs_keys={
            "learning_rate": 1e-3,
            "learning_starts": 1000,
            "batch_size": 256,
            "train_freq": 8,
            "gradient_steps": 32,
        },
        noise=noise,
    )


#: DQN has the RL Zoo's settings. There the target network is copied every ten steps of the
#: environment, and so before each update, which is 128 optimizer steps on 256 new steps.
OFF_POLICY = (
    _pendulum("td3", noise=0.1),
    _pendulum("sac", noise=None),
    OffPolicy(
        env="CartPole-v1",
        algorithm="dqn",
        steps=50_000,
        envs=1,
        ours_keys={
            "module": "peers.plain_q_network:PlainQNetwork",
            "fragment-steps": 256,
            "batch-size": 256,
            "lr": 2.3e-3,
            "replay-begin": 1024,
            "replay-batch-size": 64,
            "replay-ratio": 32,
            "target-period": 128,
            "target-share": 1,
            "exploration-epsilon": (0, 1, 8000, 0.04),
            "n-step": 1,
            "no-double": (),
            "no-target-acts": (),
        },
        theirs_keys={
            "learning_rate": 2.3e-3,
            "learning_starts": 1000,
            "batch_size": 64,
            "train_freq": 256,
            "gradient_steps": 128,
            "target_update_interval": 10,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
        },
    ),
)


def measure_off_policy(algorithms: Sequence[str], seeds: range) -> str:
    """The table of algorithms that keep steps."""
    _must_have_theirs()
    rows = []
    for task in OFF_POLICY:
        if task.algorithm not in algorithms:
            continue
        for side, play in (("Juggler", task.ours), ("Stable-Baselines3", task.theirs)):
            returns = [play(seed) for seed in seeds]
            cells = [f"{each:.0f}" for each in returns]
            name = f"{task.algorithm.upper()}, {task.env}, {task.steps // 1000}k steps"
            rows.append([name, side, *cells, f"**{median(returns):.0f}**"])
            print(*rows[-1], flush=True)
    head = ["", "", *(f"seed {seed}" for seed in seeds), "median"]
    return table("Greedy play after as many steps", head, rows)


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
            "benchmarks/sample-efficiency.md says how to get one"
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
    names = [task.algorithm for task in OFF_POLICY]
    parser.add_argument("--algorithms", nargs="+", choices=names, help="these instead of PPO")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    options = parser.parse_args()
    if options.algorithms:
        print(measure_off_policy(options.algorithms, range(options.seeds)))
    else:
        drawn = Path(__file__).with_name("sample_efficiency.png")
        print(measure(drawn, range(options.seeds)))
