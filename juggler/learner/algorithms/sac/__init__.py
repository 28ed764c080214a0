"""SAC: its configuration and its loss."""

from typing import ClassVar

from gymnasium.spaces import Box, Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.sac.config import SacConfig


class SacAlgorithm(Algorithm):
    config = SacConfig
    core = "juggler.learner.algorithms.sac.core:Sac"
    module = "juggler.runtime.modules.soft_actor_critic:SoftActorCritic"
    action_spaces = (Box, Discrete)
    off_policy = True
    lacks: ClassVar = {
        "exploration_ladder": "its policy is as random as the temperature lets it be, and explores "
        "by that; leave it out, or set temperature or target_entropy for all environments"
    }
