"""Connectors as a user writes them."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from juggler.runtime.connectors.connector import (
    ActionConnector,
    LearnerConnector,
    ObservationConnector,
)


class Halve(ObservationConnector):
    def __init__(self, observation_space, action_space, times=1, offset=0.0):
        super().__init__(observation_space, action_space)
        self.factor, self.offset = 0.5**times, offset

    def __call__(self, observations):
        return observations * np.float32(self.factor)


class FirstNumber(ObservationConnector):
    def __init__(self, observation_space, action_space):
        if observation_space.shape != (2,):
            raise ValueError(f"observations must be two numbers, not {observation_space}")
        super().__init__(spaces.Box(-1, 1, (1,), np.float32), action_space)

    def __call__(self, observations):
        return observations[:, :1]


class TakesAll(ObservationConnector):
    def __init__(self, observation_space, action_space, **options):
        super().__init__(observation_space, action_space)
        self.options = options

    def __call__(self, observations):
        return observations


class ForgotItsSpaces(ObservationConnector):
    def __init__(self, observation_space, action_space):
        pass

    def __call__(self, observations):
        return observations


class Twice(ActionConnector):
    """The policy may choose half of what the environment allows."""

    def __init__(self, observation_space, action_space):
        half = spaces.Box(action_space.low / 2, action_space.high / 2)
        super().__init__(observation_space, half)

    def __call__(self, actions):
        return actions * 2


class PlusOne(ActionConnector):
    """The environment gets one more than the policy chose."""

    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, spaces.Box(action_space.low - 1, action_space.high - 1))

    def __call__(self, actions):
        return actions + 1


class Negate(LearnerConnector):
    def __call__(self, columns):
        return columns | {"rewards": -columns["rewards"]}


def function(observation_space, action_space):
    return Halve(observation_space, action_space)
