"""PPO: its configuration and its loss."""

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.ppo.config import PpoConfig


class PpoAlgorithm(Algorithm):
    config = PpoConfig
    core = "juggler.learner.algorithms.ppo.core:Ppo"
