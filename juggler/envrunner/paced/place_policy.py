"""What acts for agents that have places, each at its own pace."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.trees import Tree


class PlacePolicy(Protocol):
    """Acts for any B of S agents at a time; see `GatheredPolicy`, which says what each call means.

    Attributes:
        blank_inputs: zeros [D], in the shape of the inputs of the action distribution.
        remembers: it keeps something of each agent from step to step.
    """

    blank_inputs: NDArray[np.float32]
    remembers: bool

    def seed(self, seed: int) -> None: ...

    def grow(self, capacity: int) -> None: ...

    def act(
        self, observations: Any, places: NDArray[np.intp], first: NDArray[np.bool_]
    ) -> tuple[Any, Any, NDArray[np.float32]]: ...

    def act_deterministically(
        self, observations: Any, places: NDArray[np.intp], first: NDArray[np.bool_]
    ) -> Any: ...

    def rewarded(self, places: NDArray[np.intp], rewards: NDArray[np.floating[Any]]) -> None: ...

    def states_before(self, places: NDArray[np.intp]) -> dict[str, Tree]: ...

    def log_probabilities(
        self, inputs: NDArray[np.float32], actions: Tree
    ) -> NDArray[np.float32]: ...

    def why_not_finite(self, inputs: NDArray[np.float32]) -> str: ...
