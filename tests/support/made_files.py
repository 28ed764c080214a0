"""Run directories and checkpoints that are made up, and disks that fail."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from juggler.driver.league.results import Payoffs
from juggler.driver.league.roster import Player
from juggler.runtime.checkpoints.checkpoint import Checkpoint

CONFIG = 'env = "CartPole-v1"\nalgorithm = "impala"\nstop_return = 475.0\n'


def line(
    steps: int, mean: float | None, wall_time: float | None = None, **more: Any
) -> dict[str, Any]:
    """A line of metrics."""
    wall = steps / 100 if wall_time is None else wall_time
    told = {"env_steps_sampled": steps, "env_steps_trained": steps, "wall_time": wall}
    return {**told, "episode_return_mean": mean, **more}


def append(run_dir: Path, *lines: dict[str, Any]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in lines))


def made(
    run_dir: Path,
    lines: list[dict[str, Any]],
    summary: dict[str, Any] | None = None,
    *,
    old: float = 100.0,
) -> Path:
    """The directory of a run that last wrote N seconds ago."""
    (run_dir / "checkpoints" / "000000007").mkdir(parents=True)
    (run_dir / "config.toml").write_text(CONFIG)
    append(run_dir, *lines)
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    for number, name in enumerate(("config.toml", "metrics.jsonl", "summary.json")):
        if (run_dir / name).exists():
            then = time.time() - old + number
            os.utime(run_dir / name, (then, then))
    return run_dir


def checkpoint(update: int = 7, generation: int = 1, **changes: Any) -> Checkpoint:
    rng = np.random.default_rng(update)
    made = Checkpoint(
        version=(generation, update),
        tree={
            "modules": {"default": {"encoder.0.weight": rng.standard_normal((4, 3))}},
            "optimizer": {"step": np.array(update), "empty": {}},
        },
        modules={"default": {"version": [generation, update], "extra": {"progress": 0.25}}},
        counters={"env_steps_trained": 1000 * update},
        config={"env": "CartPole-v1", "lr": 1e-3, "stop_return": None},
        spaces={"observation": {"kind": "Box", "low": [-float("inf")]}},
    )
    return replace(made, **changes)


def league_state(players: list[Player], payoffs: Payoffs) -> dict[str, Any]:
    """What the counters of a checkpoint have of a league."""
    return {
        "seed": 0,
        "next_match_id": 9,
        "times_built": 0,
        "players": [asdict(each) for each in players],
        "pairs": [asdict(each) for each in payoffs.pairs.values()],
        "kinds": [],
        "means": [],
    }


def same(a: Checkpoint, b: Checkpoint) -> bool:
    fields = ("version", "modules", "counters", "config", "spaces")
    return equal(a.tree, b.tree) and all(getattr(a, n) == getattr(b, n) for n in fields)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


_LITTLE = 4096  # bytes


def without_locks(*_: object) -> None:
    """Refuse a lock, as `fcntl.flock` does on a file system without locks."""
    raise OSError(errno.ENOLCK, "No locks available")


class Disk:
    """A file system of 8 MB, or limits instead of one."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self._mounted = _done("mount", "-t", "tmpfs", "-o", "size=8m", "juggler-test", path)
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, pid: int) -> None:
        """For the process, at least."""
        if not self._mounted:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LITTLE, self._limits[1]))
            return
        with (self.path / "filling").open("wb", buffering=0) as file:
            for size in (1 << 16, 1):  # to the last byte
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    pass

    def empty(self, pid: int) -> None:
        if self._mounted:
            (self.path / "filling").unlink()
        else:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, self._limits)

    def close(self) -> None:
        """Unmount everything."""
        while self._mounted and _done("umount", "--lazy", "--recursive", self.path):
            pass


def _done(*command: object) -> bool:
    try:
        done = subprocess.run([str(each) for each in command], check=False, capture_output=True)
    except OSError:
        return False
    return done.returncode == 0
