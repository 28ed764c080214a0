"""LearnerCore: an algorithm, without devices, processes or counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import gymnasium
from torch import Tensor

from juggler.learner.config import LearnerConfig
from juggler.learner.data.sources import Columns as Columns
from juggler.learner.data.sources import DataSource, Queue
from juggler.learner.data.sources import Sample as Sample
from juggler.runtime.wire.trees import Tree

S = TypeVar("S")
Space = gymnasium.Space[Any]

#: Gradients by parameter group, each one flat vector [P]. A group is named after its modules.
Grads = dict[str, Tensor]
#: By module id, numbers about an update by name: 0-d tensors on the device of the update.
Metrics = dict[str, dict[str, Tensor]]
#: By module id, parameters and buffers by name.
Params = dict[str, dict[str, Tensor]]


class GradientAux(NamedTuple):
    """What `grads` returns about one parameter group besides its gradient."""

    live_steps: dict[str, Tensor]  # [] int64 by module id: the weights in a mean over learners
    metrics: Metrics
    buffers: dict[str, Tensor]  # as the forward passes left them
    #: 0-d means over live steps that the algorithm's decisions depend on. They are reduced over the
    #: learners of a group, like the gradient.
    means: Metrics
    #: In a group of several modules, each module's part of the gradient [P], because each has its
    #: own weight in a mean over learners.
    gradients: dict[str, Tensor] = {}  # noqa: RUF012 (nobody changes it)
    #: [N] by module id: how much there is to learn from each row of this learner's own sample.
    priorities: dict[str, Tensor] = {}  # noqa: RUF012
    #: [] int64 by module id, of modules whose sample says so: how many steps count for schedules,
    #: at all learners together. Of other modules, the live steps do.
    new_steps: dict[str, Tensor] = {}  # noqa: RUF012


#: By parameter group.
Aux = dict[str, GradientAux]


class StepOutput(NamedTuple, Generic[S]):
    """The result of an update."""

    state: S
    metrics: Metrics
    priorities: dict[str, Tensor] | None = None  # by module id, for samples from a replay


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
    and draws from none. Modules that a sample has no part for stay as they are.

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

    def grads(self, state: S, sample: Sample) -> tuple[Grads, Aux]:
        """Gradients for the modules in the sample, as means over its live steps.

        Leaves the state as it is.
        """

    def apply(self, state: S, grads: Grads, aux: Aux) -> StepOutput[S]:
        """One optimizer step, for the modules that have a gradient.

        May consume the state, and leaves gradients and sample as they are.
        """

    def step(self, state: S, sample: Sample, seam: Seam = ALONE) -> StepOutput[S]:
        """One update: `grads` and `apply`, as often as the algorithm repeats them on one sample.

        May consume the state, and leaves the sample as it is.
        """
        return self.apply(state, *seam.gradients(*self.grads(state, sample)))

    def step_in_parts(
        self, state: S, sample: Sample, seam: Seam, minibatches: int | None, epochs: int | None
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

    def batch_spaces(self) -> Mapping[str, tuple[Space, Space]]:
        """By module id, (observation space, action space) of batches of columns. Such batches are
        then checked like batches of episodes; {}: any columns are accepted."""
        return {}

    def critic_spaces(self) -> Mapping[str, Space]:
        """By module id, the space of "critic_observations" of those modules that have them."""
        return {}

    def nothing(self, state: S) -> tuple[Grads, Aux]:
        """The result of `grads` for a sample without a single live step. A learner of a group
        contributes it for modules that its own sample lacks.

        Raises:
            ValueError: the core cannot train in a group of learners.
        """
        raise ValueError(f"{self.name} has no `nothing`: it cannot train in a group of learners")

    def initial_states(self) -> dict[str, Any]:
        """By module id, the state at the start of an episode: trees of tensors [...]."""
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
            weights: name -> array by module id, as from `get_params`. Others stay as they are.
            seed: for what starts anew.
            whole: whether missing weights are an error.

        Raises:
            StateMismatch: the weights do not fit the modules.
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
