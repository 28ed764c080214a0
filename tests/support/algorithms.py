"""What tests over all algorithms have to know of each."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from juggler.learner.algorithms.off_policy.config import OffPolicyConfig
from juggler.learner.algorithms.r2d2.config import R2d2Config
from juggler.learner.algorithms.registry import ALGORITHMS

TWO = spaces.Discrete(2)
#: Has 0 and 1 among its actions, so that batches of choices between two are batches of this, too.
NUMBER = spaces.Box(-0.5, 1.5, (), np.float32)


def acts_in_choices(algorithm: str) -> bool:
    """Whether an algorithm that ships can choose between Discrete actions."""
    kinds = ALGORITHMS[algorithm].action_spaces
    return not kinds or spaces.Discrete in kinds


def action_space_of(algorithm: str) -> gymnasium.Space[Any]:
    """A space that an algorithm that ships can act in, with the actions 0 and 1."""
    return TWO if acts_in_choices(algorithm) else NUMBER


def keeps_steps(algorithm: str) -> bool:
    """Whether an algorithm that ships draws from steps that it keeps."""
    return issubclass(ALGORITHMS[algorithm].config, OffPolicyConfig)


def needs_memory(algorithm: str) -> bool:
    """Whether an algorithm that ships trains only modules with a state."""
    return issubclass(ALGORITHMS[algorithm].config, R2d2Config)
