"""Small modules for a LearnerGroup."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

SPACES = {
    "observation_space": spaces.Box(-np.inf, np.inf, (4,), np.float32),
    "action_space": spaces.Discrete(2),
}
MODEL = {"hidden_sizes": [8]}


def spec(seed: int = 7, **learner: Any) -> dict[str, Any]:
    return {**SPACES, "model": MODEL, "learner": learner, "seed": seed}
