"""APPO: its configuration and its loss."""

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.appo.config import AppoConfig


class AppoAlgorithm(Algorithm):
    config = AppoConfig
    core = "juggler.learner.algorithms.appo.core:Appo"
    off_policy = True
