"""Learners for a LearnerGroup, and the same ones in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from juggler.learner.algorithms.registry import build_learner
from support.group_specs import MODEL, SPACES

PATIENCE = 120.0  # seconds until a test fails; nothing takes as long
LEARNERS: dict[str, dict[str, Any]] = {
    "main": {"algorithm": "impala", "lr": 1e-3},
    "main_slow": {"algorithm": "impala", "lr": 1e-5},
    "target": {"algorithm": "appo", "lr": 3e-3, "batch_uses": 1, "buffer_batches": 1},
    "epochs": {"algorithm": "ppo", "lr": 2e-3, "minibatches": 2, "epochs": 2},
    "short": {"algorithm": "ppo", "gamma": 0.5, "minibatches": 1},
}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


def alone(name: str, seed: int = 7) -> Any:
    """The same learner in this process."""
    return build_learner(
        LEARNERS[name], None, SPACES["observation_space"], SPACES["action_space"], MODEL, seed=seed
    )


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name
