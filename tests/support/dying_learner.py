"""A process with the second learner of a group, to be killed."""

from __future__ import annotations

import os
import signal
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
from gymnasium import spaces

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.group.torch_peers import GlooPeers
from support.batches import make_batch

GENERATION = 6


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def main(address: str, config: dict[str, Any], dies_at: str, ready: Event) -> None:
    """Join a group, and be killed in its second update.

    Args:
    address: of the meeting point.
    config: of the learner.
    dies_at: the "arrival" of its sample, before the other one knows, or the "step" after it.
    ready: is set before it goes to the meeting point, where the other does not wait for long.
    """
    observations, actions = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)
    model = {"hidden_sizes": [8]}
    learner = build_learner(config, None, observations, actions, model)
    ready.set()
    learner.join(GlooPeers(address, GENERATION, 1, 2, "127.0.0.1", lambda: False))
    learner.update_from_episodes([make_batch(4, 8, seed=101)])
    if dies_at == "arrival":
        die()
    learner.core.step = die  # type: ignore[method-assign]
    learner.update_from_episodes([make_batch(4, 8, seed=102)])
