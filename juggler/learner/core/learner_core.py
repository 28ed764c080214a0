"""LearnerCore: an algorithm, without devices, processes or counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import gymnasium
from torch import Tensor

from juggler.learner.config import LearnerConfig
from juggler.learner.data.sources import Columns as Columns
from juggler.learner.data.sources import DataSource, Queue
from juggler.runtime.wire.trees import Tree

S = TypeVar("S")
Space = gymnasium.Space[Any]

#: The gradient of a module's parameters [P].
Grads = Tensor
#: Numbers about an update by name: 0-d tensors on the device of the update.
Metrics = dict[str, Tensor]
#: Parameters and buffers by name.
Params = dict[str, Tensor]


class Aux(NamedTuple):
    """Results of `grads` apart from the gradient."""

    live_steps: Tensor  # [] int64: the weight in a mean over learners
    metrics: Metrics
    buffers: dict[str, Tensor] = {}  # noqa: RUF012 (never changed): after the passes
    #: 0-d means over live steps that the algorithm's decisions depend on. Groups of learners reduce
    #: them like the gradient.
    means: Metrics = {}  # noqa: RUF012
    #: [N]: how much there is to learn from each row of this learner's own sample.
    priorities: Tensor | None = None
    #: [] int64: number of steps for schedules, over all learners; None: the live steps.
    new_steps: Tensor | None = None


class StepOutput(NamedTuple, Generic[S]):
    """The result of an update."""

    state: S
    metrics: Metrics
    priorities: Tensor | None = None  # [N], for samples from a replay


def given(result: Any) -> dict[str, Any]:
    """Return fields that are not None, as a tree of tensors.

    Args:
        result: an `Aux`, `StepOutput` or `Loss`.
    """
    return {name: each for name, each in result._asdict().items() if each is not None}


class Seam(Protocol):
    """Transforms gradients between `grads` and `apply`, such as a reduction."""

    @property
    def in_group(self) -> bool:
        """Whether other learners make the same optimizer steps."""

    @property
    def rank(self) -> int:
        """This learner's rank in its group, for draws that differ."""

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        """Return the gradients to apply instead of these."""

    def sums(self, x: Tensor) -> Tensor:
        """Add up a sample's sums over all learners, elementwise."""


class Alone:
    """The seam of a single learner, which changes nothing."""

    in_group = False
    rank = 0

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        return grads, aux

    def sums(self, x: Tensor) -> Tensor:
        return x


ALONE: Final = Alone()


class LearnerCore(Protocol[S]):
    """An algorithm as functions of an explicit state, a tree of tensors.

    The same state and sample give the same result, bit for bit on the same device. Everything that
    training changes is in the state: the core itself has no such tensors, and uses no random
    generator.

    `apply` and `step` may consume the given state: they may change its tensors in place, or use
    them in the new state. To keep the old state, copy it first. They never change the sample, from
    which another core may learn next. Nor do they change earlier results of `get_params` and
    `state_to_tree`: a core that changes tensors in place returns copies from these. `grads` changes
    nothing.

    A core may wrap another core: its state then holds the inner state, and it changes samples,
    gradients or states.
    """

    name: str
    """The name in a run's configuration and checkpoints."""

    trains_on: frozenset[str]
    """Kinds of samples: "episodes", "batch" (columns) or both."""

    config: LearnerConfig
    """The hyper-parameters."""

    trains_in_groups: bool = False
    """Whether several learners can train it together: `step` sends everything that it derives from
    its own sample through the seam."""

    schedules: dict[str, Callable[[Tensor], Tensor]] = {}  # noqa: RUF012 (this one stays empty)
    """Functions of the steps trained on, [] -> [], by key. A `Learner` may override them."""

    def data_source(self, seed: int = 0) -> DataSource:
        """Make a learner's source of samples.

        Args:
            seed: seed of its draws.
        """
        return Queue()

    def init(self, seed: int) -> S:
        """Make a state on the CPU, determined by the seed."""

    def grads(self, state: S, sample: Columns) -> tuple[Grads, Aux]:
        """Compute the gradient, as a mean over the sample's live steps.

        Does not change the state.
        """

    def apply(self, state: S, grads: Grads, aux: Aux) -> StepOutput[S]:
        """Make one optimizer step.

        May consume the state, and does not change gradients and sample.
        """

    def step(self, state: S, sample: Columns, seam: Seam = ALONE) -> StepOutput[S]:
        """Make one update by `grads` and `apply`, repeated as the algorithm needs.

        May consume the state, and does not change the sample.
        """
        return self.apply(state, *seam.gradients(*self.grads(state, sample)))

    def in_parts(self, minibatches: int | None, epochs: int | None) -> LearnerCore[S]:
        """Return a core whose `step` makes this number of minibatches and epochs.

        Args:
            minibatches: parts of the sample, one optimizer step for each; None: the config's.
            epochs: passes over all minibatches; None: the config's.

        Raises:
            ValueError: the core does not support it.
        """
        raise ValueError(f"{self.name} takes neither minibatch_size nor num_epochs")

    def batch_spaces(self) -> tuple[Space, Space] | None:
        """Return observation and action space to check batches of columns against.

        None: any columns are accepted.
        """
        return None

    def critic_space(self) -> Space | None:
        """Return the space of "critic_observations"; None: the module has none."""
        return None

    def initial_state(self) -> dict[str, Any]:
        """Return the module's state at an episode's start, tensors [...]; {}: none."""
        return {}

    def get_params(self, state: S) -> Params:
        """Return parameters and buffers for acting, unaffected by later steps.

        They have the dtype `weights_dtype`.
        """

    def with_weights(
        self, state: S, weights: Mapping[str, Tree], seed: int, *, whole: bool = False
    ) -> S:
        """Replace a state's parameters and buffers.

        Dependent state (optimizer moments, a target network) is reset; counts continue.

        Args:
            state: a state on any device; not changed.
            weights: name -> array, as from `get_params`. Others do not change.
            seed: seed of the reset parts.
            whole: whether missing weights are an error.

        Raises:
            StateMismatch: the weights do not fit the module.
            ValueError: the core does not support it.
        """
        raise ValueError(f"{self.name} has no `with_weights`: it cannot take over weights")

    def state_to_tree(self, state: S) -> dict[str, Tree]:
        """Return named arrays for a checkpoint, unaffected by later steps."""

    def state_from_tree(self, tree: Tree, like: S) -> S:
        """Restore a state from a checkpoint, on the devices of `like`.

        Raises:
            StateMismatch: the arrays are not a state of this core.
        """
