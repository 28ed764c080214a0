"""An environment of your own, with Gymnasium's interface.

    python examples/custom_environment.py

trains a thermostat for a few seconds. The return is minus a tenth of the deviation from 20 °C,
summed over 100 minutes. Its mean begins near -25, and the run stops at -7.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import juggler


class Thermostat(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Keep a room at 20 °C by switching the heating."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.inside, self.outside = self.np_random.uniform([10, -10], [30, 15])
        self.minute = 0
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self.inside += 0.02 * (self.outside - self.inside) + action
        self.minute += 1
        error = abs(self.inside - 20)
        # The task has no end of its own, so the time limit truncates the episode.
        return self._observe(), -error / 10, False, self.minute == 100, {}

    def _observe(self) -> NDArray[np.float32]:
        return np.array([(self.inside - 20) / 10, self.outside / 10], np.float32)


if __name__ == "__main__":
    result = juggler.train(env=Thermostat, stop_return=-7, stop_steps=2_000_000, lr=1e-3, gamma=0.9)
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint, env=Thermostat)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
