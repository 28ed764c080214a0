"""LearnerCore: what an algorithm is, apart from devices, processes and counting."""

from __future__ import annotations

from collections.abc import Mapping
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

#: Gradients, each one flat vector [P], by parameter group: the id of a module, or of those that
#: are trained as one.
Grads = dict[str, Tensor]
#: Numbers about an update by name, by module id; 0-d tensors where the update was computed.
Metrics = dict[str, dict[str, Tensor]]
#: Parameters and buffers by name, by module id.
Params = dict[str, dict[str, Tensor]]


class GradientAux(NamedTuple):
    """What `grads` found out about one parameter group, beside its gradient."""

    live_steps: dict[str, Tensor]  # [] int64 by module id: their weights in a mean over learners
    metrics: Metrics
    buffers: dict[str, Tensor]  # as the forward passes left them
    #: What the algorithm decides by, 0-d means over live steps: learners of a group agree on them
    #: as on the gradient.
    means: Metrics
    #: In a group of several modules the part of each in the gradient [P]: its weight in a mean over
    #: learners is the module's own.
    gradients: dict[str, Tensor] = {}  # noqa: RUF012 (nobody changes it)


#: By parameter group.
Aux = dict[str, GradientAux]


class StepOutput(NamedTuple, Generic[S]):
    """What an update leads to."""

    state: S
    metrics: Metrics
    priorities: dict[str, Tensor] | None = None  # by module id, for samples from a replay


class Seam(Protocol):
    """What happens to gradients between `grads` and `apply`: the one place for all that concerns
    them as such, such as reducing them over the learners of a group."""

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        """What to apply in place of these."""

    def sums(self, x: Tensor) -> Tensor:
        """Sums over a sample -> the same over all learners' samples, elementwise."""


class Alone:
    """The seam of a learner by itself, where nothing happens."""

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        return grads, aux

    def sums(self, x: Tensor) -> Tensor:
        return x


ALONE: Final = Alone()


class LearnerCore(Protocol[S]):
    """An algorithm as functions of an explicit state, a tree of tensors.

    The same state and sample give the same result, bit for bit on the same device: a core holds no
    tensors of its own that training changes, nor a random generator, and draws from none; all of
    that is in the state. Modules that a sample has no part for stay as they are.

    `apply` and `step` may consume the state that they are given, and nothing else: whoever called
    them goes on with the new one alone, and copies the old one first where both are needed. They
    may change the old one's tensors in place, or make the new one of them. Never changed are the
    sample, which another core may learn from next, and what `get_params` and `state_to_tree`
    returned before, of which a core with tensors that change in place returns copies. `grads`
    changes nothing at all.

    A core may stand around another one: its state holds the other's, and it changes samples,
    gradients or states on their way.
    """

    name: str
    """As in a run's configuration and in its checkpoints."""

    trains_on: frozenset[str]
    """Which updates it serves: "episodes", "batch" or both."""

    config: LearnerConfig
    """Its hyper-parameters."""

    def data_source(self) -> DataSource:
        """What decides which samples are learned from, and when: a new one for each learner."""
        return Queue()

    def init(self, seed: int) -> S:
        """A state on the CPU with parameters drawn from the seed; the same ones every time."""

    def grads(self, state: S, sample: Sample) -> tuple[Grads, Aux]:
        """Gradients for the modules in the sample, means over its live steps.

        Leaves the state as it is.
        """

    def apply(self, state: S, grads: Grads, aux: Aux) -> StepOutput[S]:
        """One step of the optimizer, for the modules that have a gradient.

        May consume the state, and leaves gradients and sample as they are.
        """

    def step(self, state: S, sample: Sample, seam: Seam = ALONE) -> StepOutput[S]:
        """One update: `apply` after `grads`, as often as the algorithm does that with one sample.

        May consume the state, and leaves the sample as it is.
        """
        return self.apply(state, *seam.gradients(*self.grads(state, sample)))

    def step_in_parts(
        self, state: S, sample: Sample, seam: Seam, minibatches: int | None, epochs: int | None
    ) -> StepOutput[S]:
        """One update in so many steps of the optimizer.

        May consume the state, and leaves the sample as it is.

        Args:
            state: as of `step`.
            sample: the same.
            seam: the same.
            minibatches: parts of the sample, of a step each; none: as the config says.
            epochs: passes over all of them; none: as the config says.

        Raises:
            ValueError: the core does not do that.
        """
        raise ValueError(f"{self.name} takes neither minibatch_size nor num_epochs")

    def batch_spaces(self) -> Mapping[str, tuple[Space, Space]]:
        """By module id, the observation and the action space that batches of columns must fit,
        which then are checked as whole batches of episodes; {}: columns may be any."""
        return {}

    def nothing(self, state: S) -> tuple[Grads, Aux]:
        """What `grads` would give for a sample of all modules without a single live step: what a
        learner of a group contributes where its own sample lacks a module.

        Raises:
            ValueError: the core cannot be one of a group.
        """
        raise ValueError(f"{self.name} has no `nothing`: it cannot train in a group of learners")

    def initial_states(self) -> dict[str, Any]:
        """By module id, what modules with a state begin an episode with: trees of tensors [...]."""
        return {}

    def get_params(self, state: S) -> Params:
        """The parameters and buffers that acting needs, in the `weights_dtype` of the config. Later
        steps do not change them."""

    def with_weights(
        self, state: S, weights: Mapping[str, Tree], seed: int, *, whole: bool = False
    ) -> S:
        """The state with parameters and buffers from elsewhere in place of its own. What follows
        from these (the optimizer's memory, a target network) begins anew; counts go on.

        Args:
            state: on any device; left as it is.
            weights: name -> array by module id, as of `get_params`. What they lack stays.
            seed: of what begins anew.
            whole: weights that lack something are refused.

        Raises:
            ValueError: the core cannot do that, or a StateMismatch: they do not fit its modules.
        """
        raise ValueError(f"{self.name} has no `with_weights`: it cannot take over weights")

    def state_to_tree(self, state: S) -> dict[str, Tree]:
        """The state as named arrays, for a checkpoint. Later steps do not change them."""

    def state_from_tree(self, tree: Tree, like: S) -> S:
        """The state in a checkpoint, on the devices where `like`, a state of this core, is.

        Raises:
            StateMismatch: the arrays are not those of a state of this core.
        """
