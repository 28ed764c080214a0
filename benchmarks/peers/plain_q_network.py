"""A network of action values like that of Stable-Baselines3, for comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from torch import nn

from juggler.runtime.modules.models import QNetwork


class PlainQNetwork(QNetwork):
    """Ours without layer normalization."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.normalize: nn.Module = nn.Identity()
