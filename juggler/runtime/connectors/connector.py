"""The kinds of connectors: one class for each place.

                      EnvRunner                                      learner
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
its place. Its attributes of the same names are the spaces of its output. Data are whole batches:
trees of arrays with a leading dimension [B], see `juggler.runtime.wire.structures`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.trees import Tree

if TYPE_CHECKING:
    from torch import Tensor

Space = gymnasium.Space[Any]
#: A batch of one module on the learner's device: trees of tensors, by the names in `columns`.
Columns = dict[str, Any]


class Connector:
    """One piece of a pipeline.

    A subclass calls `__init__` with the spaces of its output.

    Attributes:
        observation_space: the space of the observations in its output.
        action_space: the space in which the module acts, if this connector knows it.
        takes_tensors: in an EnvRunner, whether the methods also work on tensors, with operations
            that torch can export.
    """

    takes_tensors = False

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space


class ObservationConnector(Connector, ABC):
    """Changes an observation in an EnvRunner, before it is stored.

    The result goes to the module and, in the batch, to the learner, so the learner does not repeat
    the work.
    """

    @abstractmethod
    def __call__(self, observations: Any) -> Any:
        """Return new observations for observations [B, ...], which do not change."""


class MergeableConnector(ObservationConnector):
    """Gathers moments of the observations in every EnvRunner.

    During a fragment it uses the latest moments of all EnvRunners together. The moments that it
    gathers go to the driver, which merges them.
    """

    @abstractmethod
    def watch(self, observations: Any) -> None:
        """Remember the unchanged observations [N, ...] of one step.

        The array may change after the call.
        """

    @abstractmethod
    def take_delta(self, live: NDArray[np.bool_]) -> Tree:
        """Return and reset the moments watched since the last call.

        Args:
            live: [N, T], the steps that count.

        Raises:
            NonFiniteObservation: an observation has NaN or infinity.
        """

    @abstractmethod
    def forget(self) -> None:
        """Forget watched observations, because their fragment is lost."""

    @abstractmethod
    def set_state(self, state: Tree) -> None:
        """Use these moments from now on."""

    def numbers(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that calls use, by name.

        Names are identifiers. Exported policies pass them to `with_numbers`; a connector without
        both methods cannot be exported.
        """
        raise NotImplementedError(f"connector {type(self).__name__} has no numbers()")

    def with_numbers(self, observations: Any, numbers: Mapping[str, Tensor]) -> Any:
        """Return new observations [B, ...] as tensors, from `numbers`."""
        raise NotImplementedError(f"connector {type(self).__name__} has no with_numbers()")


class NonFiniteObservation(ValueError):
    """An observation has NaN or infinity, so it has no moments.

    Attributes:
        row: row of the observation, of N.
        step: its step, of T.
    """

    def __init__(self, row: int, step: int) -> None:
        super().__init__(f"the observation of environment {row} at step {step} is not finite")
        self.row, self.step = row, step


class ContextConnector(Connector, ABC):
    """Adds the past to an observation: frames, or the last action.

    Batches hold the plain observation and, for each row, the context at its start. The EnvRunner
    adds context step by step (NumPy), the learner for whole rows at once (torch, on its device);
    the module sees the same in both. A context is a tree of arrays [N, ...].

    Attributes:
        for_acting: whether the module sees the context. Otherwise only the learner uses it.
        uses_rewards: whether `advance` uses rewards.
    """

    for_acting = True
    uses_rewards = True

    @abstractmethod
    def initial(self, observations: Any) -> Any:
        """Return the context [B, ...] at the start of episodes, newly allocated.

        Takes their first observations [B, ...].
        """

    @abstractmethod
    def __call__(self, observations: Any, context: Any) -> Any:
        """Return the module's observations [N, ...] for plain ones [N, ...]."""

    @abstractmethod
    def advance(
        self, context: Any, observations: Any, actions: Any, rewards: NDArray[np.float32]
    ) -> Any:
        """Return the context of the next step, in newly allocated memory.

        Args:
            context: of this step.
            observations: of this step, as passed to `__call__`.
            actions: the policy's choice.
            rewards: [N]
        """

    @abstractmethod
    def over_rows(self, columns: Columns, context: Any) -> Columns:
        """Return the batch with all observations as the module sees them.

        Observations after a row's end, or at a step that is not live, are not used if the step
        before ended an episode.

        Args:
            columns: the batch, which is not changed.
            context: [N, ...] at the start of each row.
        """


class ActionConnector(Connector, ABC):
    """Converts the policy's actions to the environment's, in an EnvRunner.

    Batches hold the policy's actions. The connector is built with the action space of its results;
    its `action_space` is the space of its inputs.
    """

    idle = False
    """Whether there is nothing to do in this space, so that the connector is left out."""

    @abstractmethod
    def __call__(self, actions: Any) -> Any:
        """Return new actions for actions [N, ...], which do not change."""

    def undo(self, actions: Any) -> Any:
        """Return actions [N, ...] for which a call returns these.

        A data set has the environment's actions.
        """
        raise NotImplementedError(
            f"connector {type(self).__name__} has no undo(), which returns the policy's choice for "
            "an action in a data set: write it, or leave the connector out"
        )


class LearnerConnector(Connector, ABC):
    """Changes a learner's batch on its device before the algorithm.

    Attributes:
        sums: function from sums over a batch to the sums over the batches of all learners in the
            update, elementwise; set by the learner. A connector that estimates statistics of
            batches passes its sums through it, so that all learners have the estimate over all
            batches. Each learner must call it the same number of times: once in `__call__`.
        uses_observations: whether a call reads or changes observations.
    """

    uses_observations = True

    sums: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    @abstractmethod
    def __call__(self, columns: Columns) -> Columns:
        """Return columns of the same batch; the given tensors are not changed."""

    def get_state(self) -> dict[str, Tensor]:
        """Return what the connector has learned from batches, for a checkpoint."""
        return {}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `get_state` returned."""
