"""PQN: its configuration and its loss."""

from gymnasium.spaces import Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.pqn.config import PqnConfig


class PqnAlgorithm(Algorithm):
    config = PqnConfig
    core = "juggler.learner.algorithms.pqn.core:Pqn"
    module = "juggler.runtime.modules.q_network:QNetwork"
    action_spaces = (Discrete,)
