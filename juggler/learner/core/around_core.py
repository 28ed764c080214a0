"""AroundCore, a core that changes another core's samples."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, TypedDict

import torch
from torch import Tensor, nn

from juggler.learner.config import ImitationConfig, IntrinsicConfig
from juggler.learner.core.forward import CHUNK, pieces
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.hashing import mixed, uniform
from juggler.learner.core.learner_core import (
    ALONE,
    Aux,
    Columns,
    Grads,
    LearnerCore,
    Metrics,
    Params,
    Seam,
    Space,
    StepOutput,
)
from juggler.learner.core.state_trees import arrays_like, tensors_like
from juggler.learner.data.sources import DataSource
from juggler.learner.optim.flat_module import TensorSwapper, seeded
from juggler.learner.optim.optimizers import Adam, Step, on_host
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree


class AroundState(TypedDict):
    """States of a core and of its wrapper."""

    inner: Any
    own: dict[str, Any]  # a tree of tensors


class AroundCore(LearnerCore[AroundState], ABC):
    """Wraps another core, changes its samples, and learns from them too.

    A subclass defines its state (`own_state`) and how it changes samples (`learned`, and `shown` if
    learning costs more than that). Everything else is delegated, including replay priorities.
    """

    kind: str
    """Part of the core's name, and its branch in checkpoints."""

    def __init__(self, inner: LearnerCore[Any]) -> None:
        """Wrap a core, which learns from the changed samples."""
        self.inner = inner
        self.name = f"{inner.name} with {self.kind}"
        self.config, self.trains_on = inner.config, inner.trains_on
        self.trains_in_groups, self.schedules = inner.trains_in_groups, inner.schedules

    @abstractmethod
    def own_state(self, seed: int) -> dict[str, Any]:
        """Return this wrapper's own initial state, a tree of CPU tensors."""

    @abstractmethod
    def learned(
        self, state: AroundState, sample: Columns, seam: Seam
    ) -> tuple[dict[str, Any], Columns, Metrics]:
        """Learn from a sample; return new state, inner sample and metrics.

        All learners of a group make the same calls of the seam, for any samples. `state` is not
        changed.
        """

    def shown(self, state: AroundState, sample: Columns) -> Columns:
        """Return the inner core's sample, without learning from it."""
        return self.learned(state, sample, ALONE)[1]

    def data_source(self, seed: int = 0) -> DataSource:
        return self.inner.data_source(seed)

    def init(self, seed: int) -> AroundState:
        return AroundState(inner=self.inner.init(seed), own=self.own_state(seed))

    def grads(self, state: AroundState, sample: Columns) -> tuple[Grads, Aux]:
        """Return the inner core's gradients; this core learns only in `step`."""
        return self.inner.grads(state["inner"], self.shown(state, sample))

    def apply(self, state: AroundState, grads: Grads, aux: Aux) -> StepOutput[AroundState]:
        output = self.inner.apply(state["inner"], grads, aux)
        return output._replace(state=AroundState(inner=output.state, own=state["own"]))

    def step(
        self, state: AroundState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[AroundState]:
        own, shown, found = self.learned(state, sample, seam)
        output = self.inner.step(state["inner"], shown, seam)
        metrics = {**output.metrics, **found}
        return output._replace(state=AroundState(inner=output.state, own=own), metrics=metrics)

    def in_parts(self, minibatches: int | None, epochs: int | None) -> Self:
        core = copy.copy(self)
        core.inner = self.inner.in_parts(minibatches, epochs)
        return core

    def batch_spaces(self) -> tuple[Space, Space] | None:
        return self.inner.batch_spaces()

    def critic_space(self) -> Space | None:
        return self.inner.critic_space()

    def initial_state(self) -> dict[str, Any]:
        return self.inner.initial_state()

    def get_params(self, state: AroundState) -> Params:
        return self.inner.get_params(state["inner"])

    def with_weights(
        self, state: AroundState, weights: Mapping[str, Tree], seed: int, *, whole: bool = False
    ) -> AroundState:
        """Replace the inner core's weights; this core's state continues."""
        inner = self.inner.with_weights(state["inner"], weights, seed, whole=whole)
        return AroundState(inner=inner, own=state["own"])

    def state_to_tree(self, state: AroundState) -> dict[str, Tree]:
        return {**self.inner.state_to_tree(state["inner"]), self.kind: arrays_like(state["own"])}

    def state_from_tree(self, tree: Tree, like: AroundState) -> AroundState:
        rest: dict[str, Any] = dict(tree) if isinstance(tree, Mapping) else {}
        own = tensors_like({self.kind: rest.pop(self.kind, {})}, {self.kind: like["own"]})
        inner = self.inner.state_from_tree(rest, like["inner"])
        return AroundState(inner=inner, own=own[self.kind])


#: Losses of some of a sample's entries, each as a sum [] and the number [] of its terms. Arguments
#: are the network's part of a state, indices [B] of the entries, a key [] of the epoch, the number
#: of the minibatch from 1, and the trained tensors [P].
Losses = Callable[[dict[str, Any], Tensor, Tensor, int, Tensor], Sequence[tuple[Tensor, Tensor]]]


class Rewarded(NamedTuple):
    """A sample with rewards, and what the network learns from it."""

    own: dict[str, Any]  # with the statistics of this sample
    columns: Columns
    metrics: Metrics
    losses: Losses


class RewardingCore(AroundCore, ABC):
    """An AroundCore whose own network makes the rewards.

    Args:
        inner: learns from these rewards.
        config: the keys of the wrapper's table.
        instead: advice for an algorithm to which rewards make no difference.

    Raises:
        ValueError: the algorithm does not learn from rewards, or its kept steps or episode ends
            cannot be distinguished.
    """

    inner: GradientCore
    network: OwnNetwork
    loss_names: tuple[str, ...]
    """Metrics of the losses, in order. Losses of one name are added."""

    def __init__(
        self, inner: LearnerCore[Any], config: IntrinsicConfig | ImitationConfig, instead: str
    ) -> None:
        table = config.table
        if not isinstance(inner, GradientCore):
            raise ValueError(
                f"{table} is for a GradientCore, and {inner.name} ({type(inner).__name__}) is none"
            )
        if not inner.learns_from_rewards:
            raise ValueError(
                f"{table} makes no difference to {inner.name}, which learns nothing from rewards: "
                f"{instead}"
            )
        inner.must_keep_each_step(table)
        super().__init__(inner)
        config.validate()
        self.own = config

    @abstractmethod
    def rewarded(self, state: AroundState, sample: Columns, seam: Seam) -> Rewarded:
        """Return the inner core's sample, before the network learns from it."""

    def passes(self) -> tuple[int, int]:
        """Return the network's minibatches and epochs, equal in a group."""
        return self.inner.passes()

    def own_state(self, seed: int) -> dict[str, Any]:
        return self.network.beginning(seed)

    def learned(
        self, state: AroundState, sample: Columns, seam: Seam
    ) -> tuple[dict[str, Any], Columns, Metrics]:
        found = self.rewarded(state, sample, seam)
        entries = sample[c.LIVE].numel()
        own, means = self.network.trained(
            found.own, self.passes(), entries, found.losses, self.own.lr, seam
        )
        metrics = dict(found.metrics)
        for name, mean in zip(self.loss_names, means.unbind(), strict=True):
            metrics[name] = metrics[name] + mean if name in metrics else mean
        return own, found.columns, metrics

    def shown(self, state: AroundState, sample: Columns) -> Columns:
        return self.rewarded(state, sample, ALONE).columns


class OwnNetwork:
    """A network with its optimizer, and its part of a state.

    In a state, `constant` holds fixed tensors by name, `trained` the other tensors as a vector [P],
    and `moments` the optimizer's moments. `key` [] changes with each step.

    Args:
        name: determines the parameters, together with a seed.
        make: makes the network with newly drawn parameters.
        constant: prefix of the names of fixed parameters; "": all are trained.
    """

    def __init__(self, name: str, make: Callable[[], nn.Module], constant: str = "") -> None:
        self._name, self._make = name, make
        self._network = self._made(0)
        self._places = TensorSwapper(self._network)
        self._adam = Adam()
        self._shapes = {
            name: parameter.shape
            for name, parameter in self._network.named_parameters()
            if not (constant and name.startswith(constant))
        }
        self._sizes = [shape.numel() for shape in self._shapes.values()]

    def beginning(self, seed: int) -> dict[str, Any]:
        """Return its part of a state before the first update."""
        network = self._made(seed)
        tensors = {name: x.detach() for name, x in network.named_parameters()}
        trained = torch.cat([tensors.pop(name).reshape(-1) for name in self._shapes])  # [P]
        return {
            "constant": {**tensors, **dict(network.named_buffers())},
            "trained": trained,
            "moments": self._adam.init(trained),
            "key": torch.tensor(seed % 2**32),  # []
        }

    def __call__(self, own: Mapping[str, Any], trained: Tensor, *args: Any) -> Tensor:
        """Apply the network with a state's constant tensors and `trained` [P]."""
        pieces = zip(self._shapes.items(), torch.split(trained, self._sizes), strict=True)
        named = {name: piece.view(shape) for (name, shape), piece in pieces}
        result: Tensor = self._places.call(self._network, {**own["constant"], **named}, *args)
        return result

    @torch.no_grad()
    def in_chunks(self, own: Mapping[str, Any], rows: Any, *args: Any) -> Tensor:
        """Apply the network to rows [B, ...] in bounded memory -> [B]."""
        parts = [self(own, own["trained"], part, *args) for part in pieces(rows, CHUNK)]
        return torch.cat(parts)  # [B]

    def stepped(
        self,
        own: dict[str, Any],
        losses_of: Callable[[Tensor], Sequence[tuple[Tensor, Tensor]]],
        lr: float,
        seam: Seam,
    ) -> tuple[dict[str, Any], Tensor]:
        """Make an optimizer step; return new state and mean losses [losses].

        It minimizes the sum of the means, each over the steps of all learners. `own` is not
        changed.

        Args:
            own: the network's part of a state.
            losses_of: the trained tensors [P] -> sum [] and number of steps [] of each loss.
            lr: learning rate.
            seam: connection to the other learners.
        """
        trained = own["trained"].detach().requires_grad_()  # [P]
        with torch.enable_grad():
            sums, steps = map(torch.stack, zip(*losses_of(trained), strict=True))  # [losses] both
            # Counts of all learners come first: then the sum of the learners' gradients is the
            # gradient of the sum of means.
            counts = seam.sums(steps.to(sums.dtype))  # [losses]
            means = sums / counts.clamp(min=1)  # [losses]
            (own_gradient,) = torch.autograd.grad(means.sum(), trained)  # [P]
        flat = seam.sums(torch.cat([own_gradient, means.detach()]))  # [P + losses]
        gradient, means = flat[: len(trained)], flat[len(trained) :]
        # Nothing moves without a step anywhere, or with a gradient that is not finite.
        rate = torch.full((), lr, dtype=torch.float64, device=gradient.device)  # []
        moved = gradient.isfinite().all() & (counts > 0).any()  # []
        step = Step(rate, moved, self._sizes, in_place=on_host(gradient))
        begun = tree_map(torch.clone, {name: own[name] for name in ("trained", "moments")})
        stepped, moments = self._adam.update(begun["trained"], gradient, begun["moments"], step)
        after = {
            **own,
            "trained": stepped,  # [P]
            "moments": moments,
            "key": torch.where(moved, (own["key"] + 1) % 2**32, own["key"]),  # []
        }
        return after, means

    def trained(
        self,
        own: dict[str, Any],
        passes: tuple[int, int],
        entries: int,
        losses: Losses,
        lr: float,
        seam: Seam,
    ) -> tuple[dict[str, Any], Tensor]:
        """Make optimizer steps on random parts of a sample.

        Args:
            own: the network's part of a state.
            passes: minibatches and epochs.
            entries: number of entries in the sample.
            losses: losses over some of them.
            lr: learning rate.
            seam: connection to the other learners, which make the same number of steps.

        Returns:
            The new `own`, and the losses' means [losses] over these steps.
        """
        (minibatches, epochs), each = passes, []
        # Learners of a group share one state, but draw apart. A user's seam may have no rank.
        apart = mixed(torch.tensor(getattr(seam, "rank", 0), device=own["key"].device))  # []
        for _ in range(epochs):
            key = mixed(own["key"]) ^ apart  # []
            order = uniform(key, (entries,)).argsort()  # [entries]
            # With fewer entries than minibatches, some parts are empty.
            for number, part in enumerate(order.tensor_split(minibatches), start=1):
                own, means = self.stepped(own, partial(losses, own, part, key, number), lr, seam)
                each.append(means)  # [losses]
        return own, torch.stack(each).mean(0)

    def _made(self, seed: int) -> nn.Module:
        with seeded(seed, self._name):
            return self._make()
