"""A learner's pipeline over the batches of one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from juggler.runtime.connectors.connector import (
    Columns,
    ContextConnector,
    LearnerConnector,
    Space,
)
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree


class LearnerPipeline:
    """The learner's half of context connectors, followed by learner connectors.

    Attributes:
        stored_space: of the observations in batches.
        observation_space: of the module's observations.
        contexts: context connectors by name, in order.
    """

    def __init__(
        self,
        contexts: Mapping[str, ContextConnector],
        connectors: Mapping[str, LearnerConnector],
        observation_space: Space,
    ) -> None:
        self.contexts = dict(contexts)
        self._connectors = dict(connectors)
        self.stored_space = observation_space
        self.observation_space = observation_space
        for context in contexts.values():
            self.observation_space = context.observation_space

    def __call__(self, columns: Columns) -> Columns:
        """New columns for those of a collated batch on its device, which stay as they are."""
        for name, context in self.contexts.items():
            columns = context.over_rows(columns, columns[c.STATES][c.CONNECTOR_STATES][name])
        for connector in self._connectors.values():
            columns = connector(columns)
        return columns

    def without_batch(self, device: torch.device) -> None:
        """Take part in an update of a group to which this learner brings no batch."""
        for connector in self._connectors.values():
            connector.without_batch(device)

    def add_up_with(self, sums: Callable[[Tensor], Tensor]) -> None:
        """Have connectors add up over all learners of a group; see `LearnerConnector.sums`."""
        for connector in self._connectors.values():
            connector.sums = sums

    def example_contexts(self) -> dict[str, Tree]:
        """The contexts of one row, by name. Their arrays [...] show the shapes and dtypes that
        batches must have."""
        examples: dict[str, Tree] = {}
        space = self.stored_space
        for name, connector in self.contexts.items():
            context = connector.initial(zeros(space, (1,)))  # [1, ...]
            examples[name] = tree_map(lambda array: array[0, ...], context)  # [...]
            space = connector.observation_space
        return examples

    def get_state(self) -> dict[str, dict[str, Tensor]]:
        """The states of the connectors that have one, by name."""
        states = {name: connector.get_state() for name, connector in self._connectors.items()}
        return {name: state for name, state in states.items() if state}

    def set_state(self, states: Mapping[str, Any]) -> None:
        """Continue from these states.

        Raises:
            ValueError: they belong to other connectors.
        """
        if odd := states.keys() ^ self.get_state().keys():
            raise ValueError(f"states of other connectors: only one side has {sorted(odd)}")
        for name, state in states.items():
            self._connectors[name].set_state(state)
