"""A distribution of your own: a categorical one that never stops exploring.

    python examples/custom_distribution.py

trains with it on CartPole for a few seconds, until the mean return is 200, although one action in
twenty is random. custom_distribution.toml has the same run in a file. `juggler.DistributionSpec`
explains how to write a distribution from scratch.
"""

from __future__ import annotations

import gymnasium
import torch

import juggler


class Curious(juggler.CategoricalSpec):
    """A categorical distribution with 5 % of uniform exploration."""

    def __call__(self, inputs: torch.Tensor) -> juggler.Categorical:
        decided = torch.softmax(inputs, -1)  # [..., n]
        return super().__call__(torch.log(0.95 * decided + 0.05 / self.inputs_size))


def curious(action_space: gymnasium.spaces.Discrete) -> Curious:
    return Curious(int(action_space.n), int(action_space.start))


if __name__ == "__main__":
    module = juggler.RLModuleSpec(model_config={"distribution": curious})
    result = juggler.train("cartpole", module=module, stop_return=200, stop_steps=2_000_000)
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint, module=module)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
