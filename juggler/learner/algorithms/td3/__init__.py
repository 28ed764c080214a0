"""TD3: its configuration and its loss."""

from gymnasium.spaces import Box

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.td3.config import Td3Config


class Td3Algorithm(Algorithm):
    config = Td3Config
    core = "juggler.learner.algorithms.td3.core:Td3"
    module = "juggler.runtime.modules.deterministic_actor_critic:DeterministicActorCritic"
    action_spaces = (Box,)
    off_policy = True
