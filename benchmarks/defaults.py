"""Results with default settings: sixteen environments with only their name and the algorithm set,
compared with Stable-Baselines3's defaults after as many steps.

    JUGGLER_SB3_PYTHON=/tmp/sb3/bin/python python benchmarks/defaults.py run
    python benchmarks/defaults.py run --who impala ppo --seeds 0 --tasks taxi frozen-lake
    python benchmarks/defaults.py table

Each run appends a line to a file when it ends, and runs with a line there are skipped, so the table
can be made in pieces. `table` prints all results so far.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from commands import HERE, environment, table

OURS = ("impala", "ppo", "appo")
THEIRS = {"sb3-ppo": "ppo", "sb3-a2c": "a2c"}
WHO = (*OURS, *THEIRS)
THEIR_PYTHON = "JUGGLER_SB3_PYTHON"
TOYS = HERE.parent / "tests"
RESULTS = HERE / "defaults.jsonl"
LEVEL = 0.1  # of the way from chance to the best: less than that, seeds of either differ by


@dataclass(frozen=True)
class Task:
    """An environment, the steps to train, and how it is evaluated.

    Attributes:
        steps: of training.
        episodes: that are played at the end, with the likeliest actions.
        chance: the return of random actions.
        best: about the greatest return there is, or that is seen after so few steps.
        kwargs: of the environment, for both.
        policy: which of theirs its spaces need.
    """

    env: str
    steps: int
    episodes: int
    chance: float
    best: float
    kwargs: dict[str, Any] = field(default_factory=dict)
    policy: str = "MlpPolicy"


#: In order of what they cost.
TASKS = {
    "blackjack": Task("Blackjack-v1", 60_000, 2000, -0.39, -0.045),
    "lamps": Task("support.toys:Lamps", 40_000, 100, 10, 20),
    "valve": Task("support.toys:Valve", 40_000, 100, -0.4, 20),
    "dials": Task("support.toys:Dials", 40_000, 100, 5.2, 20),
    "cliff-walking": Task(
        # Without a limit, an episode of random actions would take thousands of steps.
        "CliffWalking-v1",
        150_000,
        10,
        -2000,
        -13,
        {"max_episode_steps": 200},
    ),
    "errand": Task(
        "support.toys:Errand", 80_000, 200, -1, 0.8, {"nested": False}, policy="MultiInputPolicy"
    ),
    # Their convolutions need at least 36 × 36 pixels, so 10 × 10 go to fully connected layers.
    "catch": Task("support.toys:Catch", 80_000, 200, -0.75, 1),
    "frozen-lake": Task("FrozenLake-v1", 80_000, 400, 0.015, 0.74),
    "cartpole": Task("CartPole-v1", 80_000, 20, 22, 500),
    "acrobot": Task("Acrobot-v1", 80_000, 50, -499, -80),
    "mountain-car": Task("MountainCar-v0", 100_000, 50, -200, -100),
    "taxi": Task("Taxi-v4", 150_000, 100, -770, 8),
    "pendulum": Task("Pendulum-v1", 100_000, 50, -1230, -150),
    "lunar-lander": Task("LunarLander-v3", 150_000, 30, -180, 260),
    "hopper": Task("Hopper-v5", 150_000, 20, 18, 2500),
    "half-cheetah": Task("HalfCheetah-v5", 150_000, 5, -280, 2000),
}


def ours(task: Task, algorithm: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        run_dir = str(Path(directory, "run"))
        command = [sys.executable, "-m", "juggler"]
        given = ["--env", task.env, "--algorithm", algorithm, "--seed", str(seed)]
        if task.kwargs:
            given += ["--env-kwargs", json.dumps(task.kwargs)]
        given += ["--stop-steps", str(task.steps), "--run-dir", run_dir, "--progress", "off"]
        subprocess.run([*command, "train", *given], check=True, env=_toys(), stdout=-3)
        summary = json.loads(Path(run_dir, "summary.json").read_text())
        asked = ["--episodes", str(task.episodes), "--seed", str(1_000_000 + seed)]
        played = subprocess.run(
            [sys.executable, __file__, "play", run_dir, *asked],
            check=True,
            env=_toys(),
            stdout=subprocess.PIPE,
            text=True,
        )
    return {
        "training": summary["episode_return_mean"],
        "evaluation": float(played.stdout.splitlines()[-1]),
        "steps": summary["env_steps_trained"],
    }


def theirs(task: Task, algorithm: str, seed: int) -> dict[str, Any]:
    given = {
        "algorithm": algorithm,
        "env": task.env,
        "env_kwargs": task.kwargs,
        "policy": task.policy,
        "steps": task.steps,
        "episodes": task.episodes,
        "seed": seed,
    }
    command = [os.environ[THEIR_PYTHON], str(HERE / "peers/sb3_defaults.py"), json.dumps(given)]
    done = subprocess.run(command, check=True, env=_toys(), stdout=subprocess.PIPE, text=True)
    return {**json.loads(done.stdout.splitlines()[-1]), "steps": task.steps}


def _toys() -> dict[str, str]:
    paths = [str(TOYS), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**environment(), "PYTHONPATH": os.pathsep.join(paths)}


def known(file: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Results by task, who and seed: the newest of each for this many steps."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        (line["task"], line["who"], line["seed"]): line
        for line in lines
        if line["task"] in TASKS and line["budget"] == TASKS[line["task"]].steps
    }


def run(file: Path, who: list[str], tasks: list[str], seeds: list[int], at_once: int) -> None:
    there = known(file)
    # Seed by seed, so that an interrupted series is a whole table of fewer seeds.
    wanted = [(task, name, seed) for seed in seeds for task in tasks for name in who]

    def one(key: tuple[str, str, int]) -> None:
        task, name, seed = key
        started = time.monotonic()
        try:
            if name in THEIRS:
                found = theirs(TASKS[task], THEIRS[name], seed)
            else:
                found = ours(TASKS[task], name, seed)
        except subprocess.CalledProcessError as error:
            print(task, name, seed, "failed:", error, file=sys.stderr, flush=True)
            return
        took = round(time.monotonic() - started, 1)
        line = {"task": task, "who": name, "seed": seed, "budget": TASKS[task].steps, **found}
        with file.open("a") as out:
            out.write(json.dumps({**line, "seconds": took}) + "\n")
        print(line, took, flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, [key for key in wanted if key not in there]))


def show(file: Path, who: list[str]) -> str:
    there = known(file)
    rows = []
    level = {each: [0, 0, 0] for each in OURS}  # at least level, not below, compared
    for name, task in TASKS.items():
        row = [f"{task.env.rpartition(':')[2]}, {task.steps // 1000}k"]
        scores: dict[str, float | None] = {}
        for each in who:
            found = [line for key, line in there.items() if key[:2] == (name, each)]
            values = [line["evaluation"] for line in found]
            scores[each] = median(values) if values else None
            row.append(_cell(values, found))
        rows.append(row)
        their = scores.get("sb3-ppo")
        for each, counts in level.items():
            if their is not None and (mine := scores.get(each)) is not None:
                counts[0] += mine >= their - LEVEL * (task.best - task.chance)
                counts[1] += mine >= their
                counts[2] += 1
    rows.append(["at least level", *(_share(level.get(each)) for each in who)])
    return table("Defaults", ["", *who], rows)


def _share(counts: list[int] | None) -> str:
    if counts is None:
        return ""
    return f"{counts[0]} of {counts[2]} ({counts[1]} not below)"


def _cell(values: list[float], found: list[dict[str, Any]]) -> str:
    """The evaluation return, with the number of seeds if several; then the training return."""
    if not values:
        return ""
    digits = 2 if max(map(abs, values)) < 10 else 0
    text = f"**{median(values):.{digits}f}**"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f}, {len(values)} seeds)"
    trained = [line["training"] for line in found if line["training"] is not None]
    return f"{text}; {median(trained):.{digits}f}" if trained else text


def play(run_dir: str, episodes: int, seed: int) -> float:
    from juggler.driver.play_checkpoint import evaluate

    return evaluate(run_dir, episodes, seed).mean


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--results", type=Path, default=RESULTS, help="file of results")
    both.add_argument("--who", nargs="+", choices=WHO, default=[*OURS, "sb3-ppo"])
    commands = parser.add_subparsers(dest="command", required=True)
    missing = "run all that has no result in the file yet"
    running = commands.add_parser("run", parents=[both], help=missing)
    running.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    running.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    running.add_argument("--at-once", type=int, default=1)
    commands.add_parser("table", parents=[both], help="print the table of results")
    playing = commands.add_parser("play", help="play a run's newest checkpoint, deterministically")
    playing.add_argument("run_dir")
    playing.add_argument("--episodes", type=int, default=20)
    playing.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.command == "run":
        if any(name in THEIRS for name in given.who) and not os.environ.get(THEIR_PYTHON):
            raise SystemExit(
                f"Stable-Baselines3 needs a Python of its own, which {THEIR_PYTHON} names: "
                "benchmarks/sample-efficiency.md says how to get one"
            )
        run(given.results, given.who, given.tasks, given.seeds, given.at_once)
    elif given.command == "table":
        print(show(given.results, given.who))
    else:
        print(play(given.run_dir, given.episodes, given.seed))


if __name__ == "__main__":
    main()
