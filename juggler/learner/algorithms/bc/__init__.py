"""BC: its configuration and its loss."""

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.bc.config import BcConfig


class BcAlgorithm(Algorithm):
    config = BcConfig
    core = "juggler.learner.algorithms.bc.core:Bc"
    offline = True
