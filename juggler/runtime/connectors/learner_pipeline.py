"""A learner's pipeline over the batches of one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from juggler.runtime.connectors.connector import (
    Columns,
    ContextConnector,
    LearnerConnector,
    Space,
)
from juggler.runtime.connectors.frame_stack import FRAMES, FrameStack
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree


class LearnerPipeline:
    """The learner's half of context connectors, followed by learner connectors.

    Attributes:
        stored_space: of the observations in batches.
        observation_space: of the module's observations.
        contexts: context connectors by name, in order.
        frames_once: whether batches come out with each frame once, for a source of data that keeps
            them; `stacked` makes stacks of what it gives, as the module sees them.
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
        self._stack = _only_stack(self.contexts, self._connectors)
        self.frames_once = False
        self._rows_stay = False

    def keep_frames_once(self, *, rows_stay: bool = False) -> None:
        """Let batches come out with each frame once, if stacking frames is all that this pipeline
        does with observations.

        Args:
            rows_stay: the source of data gives whole rows as they came. Then these come out without
                stacks; otherwise as `FrameStack.numbered` makes them.
        """
        self.frames_once, self._rows_stay = self._stack is not None, rows_stay

    def leaves_stacks_out(self, columns: Mapping[str, Any]) -> bool:
        """Whether columns that came out of this pipeline are still to be `stacked`. Those that
        somebody else has made may have whole stacks."""
        if self._stack is None or not self.frames_once:
            return False
        return self._stack.is_without(columns) if self._rows_stay else FRAMES in columns

    def stacked(self, columns: Columns) -> Columns:
        """Columns as the module sees them, of what a source gives: rows as they came, or columns
        whose observations are frames [..., k, ...]."""
        if self._stack is None or not self.frames_once:
            return columns
        if not self._rows_stay:
            return self._stack.stacked(columns)
        return self._stack.over_rows(columns, self._context(columns, self._stack))

    def __call__(self, columns: Columns) -> Columns:
        """New columns for those of a collated batch on its device, which stay as they are."""
        columns = self.in_context(columns)
        for connector in self._connectors.values():
            columns = connector(columns)
        return columns

    def in_context(self, columns: Columns) -> Columns:
        """The same after the context connectors alone."""
        for context in self.contexts.values():
            state = self._context(columns, context)
            if not self.frames_once or context is not self._stack:
                columns = context.over_rows(columns, state)
            elif not self._rows_stay:
                columns = self._stack.numbered(columns, state)
        return columns

    def _context(self, columns: Columns, of: ContextConnector) -> Any:
        """A connector's context at the start of each row [N, ...]."""
        (name,) = (name for name, each in self.contexts.items() if each is of)
        return columns[c.STATES][c.CONNECTOR_STATES][name]

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


def _only_stack(
    contexts: Mapping[str, ContextConnector], connectors: Mapping[str, LearnerConnector]
) -> FrameStack | None:
    """The connector that stacks frames, if no other one has to do with observations."""
    others = [context for context in contexts.values() if context.for_acting]
    if len(others) != 1 or any(each.uses_observations for each in connectors.values()):
        return None
    return others[0] if type(others[0]) is FrameStack else None
