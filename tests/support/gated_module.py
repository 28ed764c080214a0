"""A module whose updates wait for a file: slow for as long as a test likes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium

from juggler.runtime.modules.models import ActorCritic


class Gated(ActorCritic):
    """Goes on where `gate` in its model_config exists, and says at `gate`.waiting that it waits."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        rest = dict(model_config)
        self.gate = Path(rest.pop("gate"))
        super().__init__(observation_space, action_space, rest)

    def _forward_train(self, batch: Any) -> Any:
        if not self.gate.exists():
            self.gate.with_suffix(".waiting").touch()
        while not self.gate.exists():
            time.sleep(0.01)
        return super()._forward_train(batch)
