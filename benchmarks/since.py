"""Compare speed, memory and time to solved with an earlier commit.

    python benchmarks/since.py COMMIT [TABLE ...] [--pairs 3]

Each figure is measured by the scripts of its own tree, in alternating pairs. A ratio above 1 means
that the working tree is faster or smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import HERE, environment, machine, pairs, table

_STREAM = "statistics.median(commands.script('streams.py', {}, '--turns', 4)['ours'])"
_AGENTS = """[statistics.median(rate for rate, *_ in each) for name, each in commands.written(
    'multi_agent.py', '--turns', 2).items() if name.startswith({!r})][0]"""
_GATEWAY = """commands.written('gateway.py', '--idle', 0, '--rounds', 2, '--shapes', {0!r})[{0!r}][
    'gateway']['steps_per_second']"""

#: Python expressions by table and row. Each is evaluated in benchmarks/ of both trees.
FIGURES: dict[str, dict[str, str]] = {
    "throughput": {
        "1 × 64, steps/s": "run.trained_rate(64)",
        "1 × 256, steps/s": "run.trained_rate(256)",
        "1 × 64 SyncVectorEnv, steps/s": "run.trained_rate(64, 1, '--vectorize', 'sync')",
        "2 × 64, steps/s": "run.trained_rate(64, 2)",
    },
    "ppo": {"1 × 64, steps/s": "run.trained_rate(64, 1, '--algorithm', 'ppo')"},
    "memory": {"all processes, 1/MB": "1 / commands.script('memory.py')['megabytes']"},
    "solved": {
        "command to 450, 1/s": "1 / commands.train('cartpole', '--stop-return', 450,"
        " '--no-confirm', '--seed', 0)[0]['wall_seconds_to_solved']",
    },
    "streams": {
        "episodes, 256 KB, MB/s": _STREAM.format("'episodes', '--bytes', 256 << 10"),
        "episodes, 4 MB, MB/s": _STREAM.format("'episodes', '--bytes', 4 << 20"),
        "weights, 4 MB, MB/s": _STREAM.format("'weights', '--bytes', 4 << 20"),
    },
    "multi_agent": {
        "16 × 4 CartPoles, two modules, steps/s": _AGENTS.format("CartPoles, 16 × 4, two modules"),
        "connect_four_v3, steps/s": _AGENTS.format("connect_four_v3"),
    },
    "gateway": {
        "64 × 1, steps/s": _GATEWAY.format("64x1"),
        "16 × 64, steps/s": _GATEWAY.format("16x64"),
    },
}

#: Runs in benchmarks/ of a tree. An older tree's `commands` may lack `written`, so this defines it.
_PROGRAM = """
import json, statistics, sys, tempfile
from pathlib import Path
import commands, run

def written(name, *options):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "found.json")
        done = commands.subprocess.run(
            [sys.executable, str(commands.HERE / name), *map(str, options), "--json", str(path)],
            capture_output=True, text=True, env=commands.environment())
        if done.returncode:
            raise RuntimeError(done.stderr)
        return json.loads(path.read_text())

commands.written = written
print(json.dumps(eval(sys.argv[1])))
"""


def figure(tree: Path, expression: str) -> float:
    """Evaluate an expression in a tree.

    Raises:
        RuntimeError: the expression failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, expression],
        capture_output=True,
        text=True,
        cwd=tree / "benchmarks",
        env={**environment(), "PYTHONPATH": f"{tree / 'benchmarks'}{os.pathsep}{tree}"},
    )
    if done.returncode:
        raise RuntimeError(f"{expression} in {tree}:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Check out a commit, and remove the checkout at the end."""
    git = ["git", "-C", str(HERE)]
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        tree = Path(directory, "tree")
        subprocess.run([*git, "worktree", "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="a commit, branch or tag to compare with")
    parser.add_argument("tables", nargs="*", help=f"some of {', '.join(FIGURES)}; all if none")
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    if unknown := set(given.tables) - FIGURES.keys():
        parser.error(f"no table {', '.join(sorted(unknown))}: there are {', '.join(FIGURES)}")
    print(f"On {machine()}, against {given.commit}.\n", flush=True)
    with tree_of(given.commit) as before:
        for name in given.tables or FIGURES:
            rows = []
            for row, expression in FIGURES[name].items():
                ours, theirs, ratios = pairs(
                    lambda expression=expression: figure(HERE.parent, expression),  # type: ignore[misc]
                    lambda expression=expression: figure(before, expression),  # type: ignore[misc]
                    given.pairs,
                )
                spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
                ratio = f"**{statistics.median(ratios):.2f}** {spread}"
                rows.append([row, f"{ours:.4g}", f"{theirs:.4g}", ratio])
                print(f"{name}: {row}: {ratio}", file=sys.stderr, flush=True)
            head = ["", "working tree", "before", "ratio (≥ 0.95)"]
            print(table(name, head, rows), flush=True)


if __name__ == "__main__":
    main()
