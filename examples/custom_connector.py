"""Connectors of your own: observations of the module, rewards of the learner.

    python examples/custom_connector.py

trains CartPole for some seconds, until the mean return is 200. The policy does not see how fast
anything moves, and has to find that from the last three observations. custom_connector.toml has the
same run in a file.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import juggler


class Positions(juggler.ObservationConnector):
    """Keeps the two of CartPole's four numbers that are not velocities."""

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> None:
        assert isinstance(observation_space, gymnasium.spaces.Box)
        low, high = observation_space.low[[0, 2]], observation_space.high[[0, 2]]
        super().__init__(gymnasium.spaces.Box(low, high), action_space)

    def __call__(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        return observations[:, [0, 2]]  # [B, 2]


class StayInTheMiddle(juggler.LearnerConnector):
    """Lowers the reward, the more the farther out the cart is."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        weight: float,
    ) -> None:
        super().__init__(observation_space, action_space)
        self.weight = weight

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        away = columns["observations"][..., 0].abs()  # [N, T]
        return columns | {"rewards": columns["rewards"] - self.weight * away}  # [N, T]


if __name__ == "__main__":
    connectors = {
        "env_to_module": [Positions, {"use": "frame_stack", "k": 3}],
        "learner": [{"use": StayInTheMiddle, "weight": 0.2}],
    }
    result = juggler.train("cartpole", connectors=connectors, stop_return=200, stop_steps=2_000_000)
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint, connectors=connectors)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
