"""An EnvRunner's pipeline from the environment's observations to the module's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.connectors.connector import (
    ContextConnector,
    MergeableConnector,
    ObservationConnector,
    Space,
)
from juggler.runtime.connectors.mergeable_state import State


class EnvToModule:
    """Observation connectors, and the context connectors after them.

    Attributes:
        observation_space: of the observations in batches.
        stored: connectors that make the observations in batches, in order.
        module_observation_space: of the module's observations.
        learns: whether a connector learns from what is watched.
        rewrites: whether batches hold anything other than the environment's own observations.
        contexts: context connectors by name, in order.
    """

    def __init__(
        self,
        stored: Mapping[str, ObservationConnector],
        contexts: Mapping[str, ContextConnector],
        observation_space: Space,
    ) -> None:
        self.stored = list(stored.values())
        self._mergeable = {
            name: each for name, each in stored.items() if isinstance(each, MergeableConnector)
        }
        self.contexts = dict(contexts)
        self.learns = bool(self._mergeable)
        self.rewrites = bool(stored)
        self.observation_space = self.stored[-1].observation_space if stored else observation_space
        self.module_observation_space = self.observation_space
        for context in contexts.values():
            self.module_observation_space = context.observation_space

    def numbers(self) -> dict[str, NDArray[Any]]:
        """What `with_numbers` needs, by name: everything here that changes during a run.

        Raises:
            NotImplementedError: a connector cannot be exported.
        """
        return {
            f"numbers_{place}_{name}": array
            for place, each in enumerate(self.stored)
            if isinstance(each, MergeableConnector)
            for name, array in each.numbers().items()
        }

    def with_numbers(self, observations: Any, numbers: Mapping[str, Any]) -> Any:
        """The same as a call, on tensors [B, ...], with the arrays of `numbers` as tensors."""
        for place, each in enumerate(self.stored):
            if isinstance(each, MergeableConnector):
                start = f"numbers_{place}_"
                own = {n.removeprefix(start): x for n, x in numbers.items() if n.startswith(start)}
                observations = each.with_numbers(observations, own)
            else:
                observations = each(observations)
        return observations

    def __call__(self, observations: Any) -> Any:
        """The observations that batches hold, for the environment's observations [B, ...]."""
        for connector in self.stored:
            observations = connector(observations)
        return observations

    def watch(self, observations: Any) -> Any:
        """The same for one step of a fragment [N, ...], which connectors also remember to learn
        from."""
        for connector in self.stored:
            if isinstance(connector, MergeableConnector):
                connector.watch(observations)
            observations = connector(observations)
        return observations

    def take_delta(self, live: NDArray[np.bool_]) -> State:
        """What the connectors have learned from the watched fragment; {} for nothing.

        Args:
            live: [N, T]

        Raises:
            NotFinite: an observation held NaN or infinity.
        """
        return {name: each.take_delta(live) for name, each in self._mergeable.items()}

    def forget(self) -> None:
        """Forget the watched fragment, because it is lost."""
        for connector in self._mergeable.values():
            connector.forget()

    def set_state(self, state: State) -> None:
        """Use what all EnvRunners have learned together.

        Raises:
            ValueError: the state belongs to other connectors.
        """
        if odd := state.keys() ^ self._mergeable.keys():
            raise ValueError(
                f"what connectors have learned is of others: only one side has {sorted(odd)}; use "
                "those that the run began with"
            )
        for name, connector in self._mergeable.items():
            connector.set_state(state[name])
