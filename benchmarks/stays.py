"""Does solved stay solved? Greedy play in the million steps after the first return of 475."""

from __future__ import annotations

from statistics import median

from commands import table, train

SEEDS = range(5)
SETTLED = 200_000  # steps after which evaluations are of policies that had reached 475
MORE = 1_000_000


def measure() -> str:
    rows = [_row(algorithm) for algorithm in ("impala", "appo", "ppo")]
    head = ["cartpole", "steps to 475, median (most)", "evaluations"]
    head += ["least in a million steps, by seed", "goal"]
    return table("Solved stays solved", head, rows)


def _row(algorithm: str) -> list[str]:
    found = [_run(algorithm, seed) for seed in SEEDS]
    steps = [each[0] / 1e3 for each in found]
    evaluations = sum(len(each[1]) for each in found)
    least = ", ".join(f"{min(each[1]):.0f}" for each in found)
    reached = f"{median(steps):.0f}k ({max(steps):.0f}k)"
    return [algorithm, reached, str(evaluations), least, "≥ 400"]


def _run(algorithm: str, seed: int) -> tuple[int, list[float]]:
    """Steps until 475, and the results of evaluations after that."""
    _, lines = train(
        *("cartpole", "--algorithm", algorithm, "--seed", seed),
        *("--stop-return", 501, "--stop-steps", 2_000_000),
        *("--evaluation-seconds", 1, "--evaluation-episodes", 20),
    )
    curve = [(line["env_steps_trained"], line["episode_return_mean"] or 0.0) for line in lines]
    solved = next(steps for steps, value in curve if value >= 475)
    evaluations = [
        line["evaluation_return_mean"]
        for line in lines
        if SETTLED < line["env_steps_trained"] - solved <= MORE + SETTLED
    ]
    return solved, evaluations
