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
    """What `grads` returns besides the gradient."""

    live_steps: Tensor  # [] int64: the weight in a mean over learners
    metrics: Metrics
    buffers: dict[str, Tensor] = {}  # noqa: RUF012 (never changed): as passes left them
    #: 0-d means over live steps that the algorithm's decisions depend on. They are reduced over the
    #: learners of a group, like the gradient.
    means: Metrics = {}  # noqa: RUF012
    #: [N]: how much there is to learn from each row of this learner's own sample.
    priorities: Tensor | None = None
    #: [] int64: how many steps count for schedules, at all learners together; None: the live ones.
    new_steps: Tensor | None = None


class StepOutput(NamedTuple, Generic[S]):
    """The result of an update."""

    state: S
    metrics: Metrics
    priorities: Tensor | None = None  # [N], for samples from a replay


def given(record: Any) -> dict[str, Any]:
    """Fields that are not None, as a tree of tensors.

    Args:
        record: an `Aux`, `StepOutput` or `Loss`.
    """
    return {name: each for name, each in record._asdict().items() if each is not None}


class Seam(Protocol):
    """Transforms gradients between `grads` and `apply`, such as a reduction."""

    @property
    def in_group(self) -> bool:
        """Whether other learners make the same steps of the optimizer."""

    @property
    def rank(self) -> int:
        """This learner's rank in its group, for draws that differ."""

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        """The gradients to apply instead of these."""

    def sums(self, x: Tensor) -> Tensor:
        """Sums over this learner's sample -> sums over all learners' samples, elementwise."""


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
    training changes is in the state: a core has no such tensors and no random generator of its own,
    and draws from none.

    `apply` and `step` may consume the state that they are given: they may change its tensors in
    place, or use them in the new state. To keep the old state, copy it first. They never change the
    sample, from which another core may learn next. Nor do they change what `get_params` and
    `state_to_tree` returned before: a core that changes tensors in place returns copies from these.
    `grads` changes nothing at all.

    A core may wrap another one: its state then holds the other's state, and it changes samples,
    gradients or states on the way.
    """

    name: str
    """The name in a run's configuration and checkpoints."""

    trains_on: frozenset[str]
    """What it can learn from: "episodes", "batch" (columns) or both."""

    config: LearnerConfig
    """Its hyper-parameters."""

    trains_in_groups: bool = False
    """Whether gradients may be those of several learners: `step` sends all that it finds in its own
    sample through the seam."""

    schedules: dict[str, Callable[[Tensor], Tensor]] = {}  # noqa: RUF012 (this one stays empty)
    """Functions of the steps trained on, [] -> [], by key. A `Learner` may override them."""

    def data_source(self, seed: int = 0) -> DataSource:
        """Make a learner's source of samples.

        Args:
            seed: of what it draws.
        """
        return Queue()

    def init(self, seed: int) -> S:
        """Make a state on the CPU, determined by the seed."""

    def grads(self, state: S, sample: Columns) -> tuple[Grads, Aux]:
        """The gradient, as a mean over the sample's live steps.

        Leaves the state as it is.
        """

    def apply(self, state: S, grads: Grads, aux: Aux) -> StepOutput[S]:
        """One optimizer step.

        May consume the state, and leaves gradients and sample as they are.
        """

    def step(self, state: S, sample: Columns, seam: Seam = ALONE) -> StepOutput[S]:
        """Make one update by `grads` and `apply`, repeated as the algorithm needs.

        May consume the state, and leaves the sample as it is.
        """
        return self.apply(state, *seam.gradients(*self.grads(state, sample)))

    def in_parts(self, minibatches: int | None, epochs: int | None) -> LearnerCore[S]:
        """A core whose `step` makes this number of minibatches and epochs.

        Args:
            minibatches: parts of the sample, one optimizer step for each; None: the config's.
            epochs: passes over all minibatches; None: the config's.

        Raises:
            ValueError: the core does not support it.
        """
        raise ValueError(f"{self.name} takes neither minibatch_size nor num_epochs")

    def batch_spaces(self) -> tuple[Space, Space] | None:
        """Observation and action space that batches of columns are checked against.

        None: any columns are accepted.
        """
        return None

    def critic_space(self) -> Space | None:
        """The space of "critic_observations"; None: the module has none."""
        return None

    def initial_state(self) -> dict[str, Any]:
        """Module state at an episode's start, tensors [...]; {}: none."""
        return {}

    def get_params(self, state: S) -> Params:
        """Parameters and buffers for acting, in `weights_dtype`, safe from later steps."""

    def with_weights(
        self, state: S, weights: Mapping[str, Tree], seed: int, *, whole: bool = False
    ) -> S:
        """Replace a state's parameters and buffers.

        Dependent state (optimizer moments, a target network) is reset; counts continue.

        Args:
            state: on any device; not changed.
            weights: name -> array, as from `get_params`. Others stay as they are.
            seed: for what is reset.
            whole: whether missing weights are an error.

        Raises:
            StateMismatch: the weights do not fit the module.
            ValueError: the core does not support it.
        """
        raise ValueError(f"{self.name} has no `with_weights`: it cannot take over weights")

    def state_to_tree(self, state: S) -> dict[str, Tree]:
        """State as named arrays, for a checkpoint; later steps leave them alone."""

    def state_from_tree(self, tree: Tree, like: S) -> S:
        """Restore a state from a checkpoint, on the devices of `like`.

        Raises:
            StateMismatch: the arrays are not a state of this core.
        """
