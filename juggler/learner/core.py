"""LearnerCore: what an algorithm is, apart from devices, processes and counting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from juggler.learner.config import LearnerConfig
from juggler.runtime.wire.trees import Tree

S = TypeVar("S")

#: One module's part of a sample, by the names in `columns`: tensors, or maps of tensors by string
#: keys, nested to any depth.
Columns = Mapping[str, Any]
#: What one update learns from, by module id.
Sample = Mapping[str, Columns]
#: Gradients, each one flat vector [P], by unit: the id of a module, or of those trained as one.
Grads = dict[str, Tensor]
#: Numbers about an update by name, by module id; 0-d tensors where the update was computed.
Metrics = dict[str, dict[str, Tensor]]
#: Parameters and buffers by name, by module id.
Params = dict[str, dict[str, Tensor]]


class UnitAux(NamedTuple):
    """What `grads` found out about one unit, beside its gradient."""

    live_steps: dict[str, Tensor]  # [] int64 by module id: their weights in a mean over learners
    metrics: Metrics
    buffers: dict[str, Tensor]  # as the forward passes left them


#: By unit.
Aux = dict[str, UnitAux]


class StepOutput(NamedTuple, Generic[S]):
    """What an update leads to."""

    state: S
    metrics: Metrics
    priorities: dict[str, Tensor] | None = None  # by module id, for samples from a replay


class LearnerCore(Protocol[S]):
    """An algorithm as functions of an explicit state, a tree of tensors.

    Between `grads` and `apply` is the one seam for what concerns gradients as such: reducing them
    over learners, accumulating them, refusing stale ones. A core holds no tensors of its own that
    training changes; all of that is in the state.
    """

    name: str
    """As in a run's configuration and in its checkpoints."""

    trains_on: frozenset[str]
    """Which updates it serves: "episodes", "batch" or both."""

    config: LearnerConfig
    """Its hyper-parameters."""

    def init(self, seed: int) -> S:
        """A state on the CPU with parameters drawn from the seed; the same ones every time."""

    def grads(self, state: S, sample: Sample) -> tuple[Grads, Aux]:
        """Gradients for the modules in the sample, means over its live steps.

        Leaves the state as it is.
        """

    def apply(self, state: S, grads: Grads, aux: Aux) -> StepOutput[S]:
        """One step of the optimizer, for the modules that have a gradient.

        `apply` may consume the state it is given: afterwards only the new one may be used. What
        `get_params` returned before stays as it was.
        """

    def step(self, state: S, sample: Sample) -> StepOutput[S]:
        """`apply` after `grads`."""
        grads, aux = self.grads(state, sample)
        return self.apply(state, grads, aux)

    def initial_states(self) -> dict[str, Any]:
        """By module id, what modules with a state begin an episode with: trees of tensors [...]."""
        return {}

    def get_params(self, state: S) -> Params:
        """The parameters and buffers that acting needs, without copies."""

    def state_to_tree(self, state: S) -> dict[str, Tree]:
        """The state as named arrays, for a checkpoint."""

    def state_from_tree(self, tree: Tree, like: S) -> S:
        """The state in a checkpoint, on the devices where `like`, a state of this core, is.

        Raises:
            StateMismatch: the arrays are not those of a state of this core.
        """
