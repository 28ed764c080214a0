"""IMPALA: its configuration and its loss."""

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.impala.config import ImpalaConfig


class ImpalaAlgorithm(Algorithm):
    config = ImpalaConfig
    core = "juggler.learner.algorithms.impala.core:Impala"
    off_policy = True
