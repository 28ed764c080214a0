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
    buffers: dict[str, Tensor] = {}  # noqa: RUF012 (nobody changes it): as passes left them
    #: 0-d means over live steps that the algorithm's decisions depend on. They are reduced over the
    #: learners of a group, like the gradient.
    means: Metrics = {}  # noqa: RUF012
    #: [N]: how much there is to learn from each row of this learner's own sample.
    priorities: Tensor | None = None
    #: [] int64: how many steps count for schedules, at all learners together; None: the live ones.
    new_steps: Tensor | None = None

    def given(self) -> dict[str, Any]:
        """Its fields that are not None, as a tree of tensors."""
        return {name: each for name, each in self._asdict().items() if each is not None}


class StepOutput(NamedTuple, Generic[S]):
    """The result of an update."""

    state: S
    metrics: Metrics
    priorities: Tensor | None = None  # [N], for samples from a replay


class Seam(Protocol):
    """What happens to gradients between `grads` and `apply`, such as their reduction over the
    learners of a group."""

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        """The gradients to apply instead of these."""

    def sums(self, x: Tensor) -> Tensor:
        """Sums over this learner's sample -> sums over all learners' samples, elementwise."""


class Alone:
    """The seam of a single learner, which changes nothing."""

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
    place, or use them in the new state. A caller who needs the old state later copies it first.
    They never change the sample, from which another core may learn next. Nor do they change what
    `get_params` and `state_to_tree` returned before: a core that changes tensors in place returns
    copies from these. `grads` changes nothing at all.

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
    """By key of the configuration, functions of the steps trained on: [] -> []. A `Learner` puts
    others in their place where a run is told to."""

    def data_source(self, seed: int = 0) -> DataSource:
        """A new source of data, which decides what is learned from and when; one per learner.

        Args:
            seed: of what it draws.
        """
        return Queue()

    def init(self, seed: int) -> S:
        """A state on the CPU. The same seed draws the same parameters every time."""

    def grads(self, state: S, sample: Columns) -> tuple[Grads, Aux]:
        """The gradient, as a mean over the sample's live steps.

        Leaves the state as it is.
        """

    def apply(self, state: S, grads: Grads, aux: Aux) -> StepOutput[S]:
        """One optimizer step.

        May consume the state, and leaves gradients and sample as they are.
        """

    def step(self, state: S, sample: Columns, seam: Seam = ALONE) -> StepOutput[S]:
        """One update: `grads` and `apply`, as often as the algorithm repeats them on one sample.

        May consume the state, and leaves the sample as it is.
        """
        return self.apply(state, *seam.gradients(*self.grads(state, sample)))

    def step_in_parts(
        self, state: S, sample: Columns, seam: Seam, minibatches: int | None, epochs: int | None
    ) -> StepOutput[S]:
        """One update with a given number of minibatches and epochs.

        May consume the state, and leaves the sample as it is.

        Args:
            state: as in `step`.
            sample: as in `step`.
            seam: as in `step`.
            minibatches: parts of the sample, one optimizer step for each; None: the config's.
            epochs: passes over all minibatches; None: the config's.

        Raises:
            ValueError: the core does not support it.
        """
        raise ValueError(f"{self.name} takes neither minibatch_size nor num_epochs")

    def batch_spaces(self) -> tuple[Space, Space] | None:
        """(observation space, action space) of batches of columns. Such batches are then checked
        like batches of episodes; None: any columns are accepted."""
        return None

    def critic_space(self) -> Space | None:
        """The space of "critic_observations"; None: the module has none."""
        return None

    def initial_state(self) -> dict[str, Any]:
        """The module's state at the start of an episode, a tree of tensors [...]; {}: none."""
        return {}

    def get_params(self, state: S) -> Params:
        """The parameters and buffers that acting needs, in the config's `weights_dtype`. Later
        steps do not change them."""

    def with_weights(
        self, state: S, weights: Mapping[str, Tree], seed: int, *, whole: bool = False
    ) -> S:
        """The state with parameters and buffers from elsewhere. What depends on them (the
        optimizer's moments, a target network) starts anew; counts continue.

        Args:
            state: on any device; not changed.
            weights: name -> array, as from `get_params`. Others stay as they are.
            seed: for what starts anew.
            whole: whether missing weights are an error.

        Raises:
            StateMismatch: the weights do not fit the module.
            ValueError: the core does not support it.
        """
        raise ValueError(f"{self.name} has no `with_weights`: it cannot take over weights")

    def state_to_tree(self, state: S) -> dict[str, Tree]:
        """The state as named arrays, for a checkpoint. Later steps do not change them."""

    def state_from_tree(self, tree: Tree, like: S) -> S:
        """The state from a checkpoint, on the devices of `like`, another state of this core.

        Raises:
            StateMismatch: the arrays are not a state of this core.
        """
