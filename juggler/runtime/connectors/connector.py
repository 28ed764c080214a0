"""What a connector is: one class for each place it may stand in.

                        runner                                        learner
    environment ─▶ ObservationConnector ─▶ the batch ──────────▶ the batch
                           │                                        │
                           ▼                                        ▼
                   ContextConnector                       ContextConnector.over_rows
                           │                                        │
                           ▼                                        ▼
                        module                             LearnerConnector ─▶ module
                           │
                           ▼
    environment ◀─ ActionConnector

Every connector is built as `Class(observation_space, action_space, **options)` with the spaces at
its place, and tells with the attributes of the same names what it hands on. Data are whole batches:
trees of arrays with a leading dimension [B], as `juggler.runtime.wire.structures` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.trees import Tree

if TYPE_CHECKING:
    from torch import Tensor

Space = gymnasium.Space[Any]
#: A batch of one module on the learner's device: trees of tensors by the names in `columns`.
Columns = dict[str, Any]


class Connector:
    """One piece of a pipeline.

    A subclass calls `__init__` with the spaces that it hands on.

    Attributes:
        observation_space: of what it hands on.
        action_space: what the module acts in, as far as this connector knows.
        takes_tensors: in a runner, whether its methods do with tensors what they do with arrays, in
            operations that torch can export.
    """

    takes_tensors = False

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space


class ObservationConnector(Connector, ABC):
    """In a runner, what happens to an observation before anybody keeps it.

    What it makes goes to the module and, by way of the batch, to the learner, which does not do it
    again.
    """

    @abstractmethod
    def __call__(self, observations: Any) -> Any:
        """Observations [B, ...] as new ones; those given stay as they are."""


class MergeableConnector(ObservationConnector):
    """One that gathers moments of what it sees, in every runner.

    It uses those it was last given, of all runners together, for a whole fragment. What it gathers
    meanwhile goes to the driver, which merges it.
    """

    @abstractmethod
    def watch(self, observations: Any) -> None:
        """Remember the observations [N, ...] of one step of a fragment, as they come in.

        They may change after the call.
        """

    @abstractmethod
    def take_delta(self, live: NDArray[np.bool_]) -> Tree:
        """Moments of what was watched since the last call, and forget it.

        Args:
            live: [N, T], the steps that count.

        Raises:
            NotFinite: one of them held NaN or infinity.
        """

    @abstractmethod
    def forget(self) -> None:
        """Forget what was watched: its fragment is lost."""

    @abstractmethod
    def set_state(self, state: Tree) -> None:
        """Use these moments from now on."""

    def numbers(self) -> dict[str, NDArray[Any]]:
        """What calls use of the moments, by names that are identifiers. With `with_numbers`, for
        those who act elsewhere; a connector that has neither cannot be exported to them."""
        raise NotImplementedError(f"connector {type(self).__name__} has no numbers()")

    def with_numbers(self, observations: Any, numbers: Mapping[str, Tensor]) -> Any:
        """Observations [B, ...] as new ones, as calls make them with `numbers`, in tensors."""
        raise NotImplementedError(f"connector {type(self).__name__} has no with_numbers()")


class NotFinite(ValueError):
    """NaN or infinity where moments were to be taken.

    Attributes:
        row: of the observation, [N].
        step: [T]
    """

    def __init__(self, row: int, step: int) -> None:
        super().__init__(f"the observation of environment {row} at step {step} is not finite")
        self.row, self.step = row, step


class ContextConnector(Connector, ABC):
    """Adds what came before to an observation, such as earlier frames or the last action.

    Batches hold the plain observation and, for each row, the context at its start. The runner adds
    context step by step (NumPy), the learner for whole rows at once (torch, on its device); the
    module sees the same from both. A context is a tree of arrays [N, ...].

    Attributes:
        for_acting: whether the module sees anything of it. (Else it is there for the learner.)
        uses_rewards: whether `advance` looks at rewards.
    """

    for_acting = True
    uses_rewards = True

    @abstractmethod
    def initial(self, observations: Any) -> Any:
        """The context [B, ...] at the start of episodes whose first observations [B, ...] these
        are, in memory of its own."""

    @abstractmethod
    def __call__(self, observations: Any, context: Any) -> Any:
        """What the module sees [N, ...] for observations [N, ...]."""

    @abstractmethod
    def advance(
        self, context: Any, observations: Any, actions: Any, rewards: NDArray[np.float32]
    ) -> Any:
        """The context of the next step, in memory of its own.

        Args:
            context: of this step.
            observations: of this step, as they were given to `__call__`.
            actions: what the policy chose.
            rewards: [N]
        """

    @abstractmethod
    def over_rows(self, columns: Columns, context: Any) -> Columns:
        """A batch with observations, last and final observations as the module sees them.

        What the module sees after a row's end, or at a step that is not live, is of no use to
        anybody where the step before ended an episode.

        Args:
            columns: stay as they are.
            context: [N, ...] at the start of each row.
        """


class ActionConnector(Connector, ABC):
    """In a runner, from what the policy chose to what the environment gets.

    Batches hold what the policy chose. It is built with the action space that its own actions must
    be in; its `action_space` is that of the actions it takes.
    """

    idle = False
    """Nothing is to be done in this space: it is left out."""

    @abstractmethod
    def __call__(self, actions: Any) -> Any:
        """Actions [N, ...] as new ones; those given stay as they are."""


class LearnerConnector(Connector, ABC):
    """In a learner, what happens to a batch on its device before anything is learned from it."""

    @abstractmethod
    def __call__(self, columns: Columns) -> Columns:
        """Columns of the same batch; the tensors given stay as they are."""

    def get_state(self) -> dict[str, Tensor]:
        """What it has learned from batches so far, for a checkpoint."""
        return {}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that `get_state` gave."""
