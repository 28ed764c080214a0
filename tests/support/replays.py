"""Replays and tables of small rows with numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from juggler.learner.data.replay.replay import Replay
from juggler.learner.data.replay.rules import Rules
from juggler.learner.data.replay.table import Table
from juggler.learner.data.sources import Columns


def make(**changes: Any) -> Replay:
    defaults: dict[str, Any] = {"capacity": 100, "size": 4, "ratio": 2.0}
    return Replay(lambda columns: dict(columns), **{**defaults, **changes})


def table_of(
    capacity: int, kind: type[Table] = Table, seed: int = 0, directory: str = "", **rules: Any
) -> Any:
    return kind(capacity, Rules(**rules), np.random.default_rng(seed), directory)


def numbered(first: int, count: int) -> Columns:
    return {"number": torch.arange(first, first + count), "half": torch.ones(count, 2)}


def drawn(samples: Any) -> list[int]:
    return [int(x) for each in samples for x in each["number"]]
