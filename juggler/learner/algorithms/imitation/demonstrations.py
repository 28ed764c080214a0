"""Demonstrated steps, in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from juggler.learner.core.state import to_device
from juggler.runtime.datasets.dataset import Dataset
from juggler.runtime.datasets.finding import DatasetError
from juggler.runtime.wire.structures import tree_map

Space = gymnasium.Space[Any]


class Demonstrations(NamedTuple):
    """M demonstrated steps."""

    observations: Any  # [M, ...]
    actions: Any  # [M, ...]
    terminated: Tensor  # [M] bool: the environment ended the episode with this step

    @classmethod
    def read(cls, name: str, observation_space: Space, action_space: Space) -> Demonstrations:
        """All steps of a data set.

        Args:
            name: its directory, or its name among those that Minari keeps.
            observation_space: of the module that is to imitate them.
            action_space: likewise.

        Raises:
            DatasetError: there is no such data set, it is damaged, it has other spaces, or
                observations or actions that are not finite.
        """
        data = Dataset(name)
        for what, own, other in (
            ("observations", data.observation_space, observation_space),
            ("actions", data.action_space, action_space),
        ):
            if own != other:
                raise DatasetError(
                    f"demonstrations {name!r} have {what} in {own}, and the module that is to "
                    f"imitate them has them in {other}: choose demonstrations of the same "
                    "environment, without connectors.env_to_module that change observations"
                )
        read = ("observations", "actions")
        episodes = [data.episode(index, finite=read) for index in range(len(data))]
        terminated = np.zeros(sum(map(len, episodes)), np.bool_)  # [M]
        ends = np.cumsum([len(episode) for episode in episodes]) - 1  # [episodes]
        terminated[ends] = [episode.terminated for episode in episodes]
        return cls(
            tree_map(_joined, *(tree_map(_before, each.observations) for each in episodes)),
            tree_map(_joined, *(each.actions for each in episodes)),
            torch.from_numpy(terminated),
        )

    def on(self, device: torch.device) -> Demonstrations:
        return Demonstrations(*(to_device(each, device) for each in self))

    def drawn(self, places: Tensor) -> Demonstrations:
        """Those at these places [B]."""
        return Demonstrations(*(tree_map(lambda x: x[places], each) for each in self))


def _before(observations: Any) -> Any:
    """Observations [L + 1, ...] without the last one."""
    return observations[:-1]


def _joined(*parts: Any) -> Tensor:
    """Arrays [L, ...] of several episodes -> [M, ...]."""
    return torch.from_numpy(np.concatenate(parts))
