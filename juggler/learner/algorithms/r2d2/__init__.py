"""R2D2: its configuration and its loss."""

from gymnasium.spaces import Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.r2d2.config import R2d2Config


class R2d2Algorithm(Algorithm):
    config = R2d2Config
    core = "juggler.learner.algorithms.r2d2.core:R2d2"
    module = "juggler.runtime.modules.q_network:QNetwork"
    action_spaces = (Discrete,)
    off_policy = True
