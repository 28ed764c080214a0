"""Checkpoints to write and to read, and what makes two of them the same."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from juggler.driver.league.payoffs import Payoffs
from juggler.driver.league.roster import Player
from juggler.runtime.checkpoints.checkpoint import Checkpoint


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
