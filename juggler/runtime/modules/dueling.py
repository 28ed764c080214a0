"""A head for dueling networks: Wang et al. 2016, "Dueling Network Architectures for Deep RL"."""

from __future__ import annotations

from torch import Tensor, nn

from juggler.runtime.modules.layers import ACTIVATIONS, initialized
from juggler.runtime.modules.model_config import ModelConfig


class DuelingHead(nn.Module):
    """Values of actions, as the value of an observation and the advantages of actions there:

        Q(x, a) = V(x) + A(x, a) - 1/n Σ_b A(x, b)        (equation 9)

    V and A each have a hidden layer of their own, as wide as the features that both see. The mean
    is over all n actions, also those that a mask forbids: so it is the same whatever is legal.
    """

    def __init__(self, features: int, actions: int, numbers: int, config: ModelConfig) -> None:
        """
        Args:
            features: F.
            actions: n.
            numbers: K, that are estimated for each action: 1, or the logits of K returns.
            config: for activation and initializer.
        """
        super().__init__()
        self.shape = (actions, numbers)
        self.value = _stream(features, numbers, config)
        self.advantages = _stream(features, actions * numbers, config)

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., F] -> [..., n K]."""
        value = self.value(features).unsqueeze(-2)  # [..., 1, K]
        advantages = self.advantages(features).unflatten(-1, self.shape)  # [..., n, K]
        found: Tensor = value + advantages - advantages.mean(-2, keepdim=True)  # [..., n, K]
        return found.flatten(-2)  # [..., n K]


def _stream(features: int, outputs: int, config: ModelConfig) -> nn.Sequential:
    """A hidden layer, normalized as all that heads of a `QNetwork` see, and a linear one."""
    return nn.Sequential(
        initialized(nn.Linear(features, features), config.initializer),
        ACTIVATIONS[config.activation](),
        nn.LayerNorm(features),
        initialized(nn.Linear(features, outputs), config.initializer, gain=0.01),
    )
