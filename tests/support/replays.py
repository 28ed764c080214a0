"""A replay of small rows with numbers."""

from __future__ import annotations

from typing import Any

import torch

from juggler.learner.data.replay.replay import Replay
from juggler.learner.data.sources import Columns


def make(**changes: Any) -> Replay:
    defaults: dict[str, Any] = {"capacity": 100, "size": 4, "ratio": 2.0}
    return Replay(lambda columns: dict(columns), **{**defaults, **changes})


def numbered(first: int, count: int) -> Columns:
    return {"number": torch.arange(first, first + count), "half": torch.ones(count, 2)}


def drawn(samples: Any) -> list[int]:
    return [int(x) for each in samples for x in each["number"]]
