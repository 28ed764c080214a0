"""The return over staleness: the same run with deeper and deeper queues."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from commands import table, train
from matplotlib.figure import Figure

DEPTHS = (1, 2, 4, 8, 16)
SEEDS = range(3)
STEPS = 1_500_000


def measure(picture: Path) -> str:
    """The table; draws the curves into `picture`."""
    rows, curves = [], {}
    for depth in DEPTHS:
        runs = [_run(depth, seed) for seed in SEEDS]
        curves[depth] = [_curve(lines) for _, lines in runs]
        used = [line for _, lines in runs for line in lines if line["staleness_mean"] is not None]
        finals = [summary["episode_return_mean"] for summary, _ in runs]
        reached = [_steps_to(lines, 475.0) for _, lines in runs]
        rows.append(
            [
                str(depth),
                f"{statistics.mean(line['staleness_mean'] for line in used):.2f}",
                str(max(line["staleness_max"] for line in used)),
                ", ".join("-" if steps is None else f"{steps / 1e3:.0f}k" for steps in reached),
                ", ".join(f"{final:.0f}" for final in finals),
            ]
        )
    _draw(curves, picture)
    head = [
        "--max-staleness",
        "mean staleness",
        "max",
        "steps to 475, by seed",
        f"return at {STEPS / 1e6:.1f}M steps, by seed",
    ]
    return table("Lag", head, rows)


def _run(depth: int, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    # As many requests in flight as the bound allows, so the queue is as deep as possible.
    return train(
        *("cartpole", "--seed", seed, "--stop-return", 501, "--no-confirm", "--stop-steps", STEPS),
        *("--max-staleness", depth, "--requests-per-runner", max(2, depth)),
    )


def _curve(lines: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    known = [line for line in lines if line["episode_return_mean"] is not None]
    return (
        [line["env_steps_trained"] for line in known],
        [line["episode_return_mean"] for line in known],
    )


def _steps_to(lines: list[dict[str, Any]], goal: float) -> int | None:
    return next(
        (
            int(line["env_steps_trained"])
            for line in lines
            if (line["episode_return_mean"] or 0.0) >= goal
        ),
        None,
    )


def _draw(curves: dict[int, list[tuple[list[int], list[float]]]], picture: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    colours = ("#0072b2", "#009e73", "#e69f00", "#d55e00", "#404040")
    for (depth, runs), colour in zip(curves.items(), colours, strict=True):
        for number, (steps, returns) in enumerate(runs):
            label = f"max_staleness {depth}" if number == 0 else None
            axes.plot([s / 1e6 for s in steps], returns, color=colour, label=label, lw=1.5)
    axes.set_xlabel("environment steps trained (million)")
    axes.set_ylabel("mean return of 100 episodes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    print(measure(Path(__file__).with_name("lag.png")))
