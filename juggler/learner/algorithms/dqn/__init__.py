"""DQN: its configuration and its loss."""

from gymnasium.spaces import Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.dqn.config import DqnConfig


class DqnAlgorithm(Algorithm):
    config = DqnConfig
    core = "juggler.learner.algorithms.dqn.core:Dqn"
    module = "juggler.runtime.modules.q_network:QNetwork"
    action_spaces = (Discrete,)
    off_policy = True
