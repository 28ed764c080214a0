"""IQL: its configuration and its loss."""

from gymnasium.spaces import Box, Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.iql.config import IqlConfig


class IqlAlgorithm(Algorithm):
    config = IqlConfig
    core = "juggler.learner.algorithms.iql.core:Iql"
    module = "juggler.runtime.modules.implicit_actor_critic:ImplicitActorCritic"
    action_spaces = (Box, Discrete)
    offline = True
