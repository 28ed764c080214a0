"""Forward and Loss: argument and result of an algorithm's loss function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from juggler.learner.core.learner_core import given
from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS
from juggler.learner.data.sources import Columns
from juggler.learner.optim.flat_module import FlatModule
from juggler.runtime.episodes.batch import COLUMNS
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.near_matches import nearest
from juggler.runtime.wire.structures import first_leaf, tree_map


class Loss(NamedTuple):
    """The loss on a sample, returned by a core's `loss`.

    Attributes:
        total: a mean over live steps, which is minimized.
        live_steps: number of steps in that mean. Learners of a group, and micro-batches, weight
            their gradients and their `means` by it, so it must count exactly the steps in `total`.
        metrics: numbers for people, by name. They are only logged, and not combined over several
            learners.
        means: numbers that the algorithm's decisions depend on, such as the KL divergence at which
            PPO stops early, by the names in the core's `mean_names`. Each must be a mean over live
            steps: then all learners of a group get the mean over all of their samples, and make the
            same decision. `next_extra` finds them in `aux.means`. {}: no decision depends on the
            sample, as in most algorithms.
        priorities: how much there is to learn from each row [N] of the sample, such as the largest
            error in it, for a replay with priorities; none without one.

    A step that is not live (it only resets an environment, pads a short row, or is part of a
    burn-in) counts in none of these: its loss has weight 0 in a mean, and it is not in the number
    that the mean divides by. `LiveMean` computes this mean. A sample without a live step has
    `live_steps` 0: its means are 0, and it does not change parameters.
    """

    total: Tensor  # []
    live_steps: Tensor  # [] int64
    metrics: dict[str, Tensor]  # [] each
    means: dict[str, Tensor]  # [] each
    priorities: Tensor | None = None  # [N]


def checked_loss(
    where: str, loss: object, columns: Columns, mean_names: Collection[str], *, mapped: bool
) -> Loss:
    """Check that a core's `loss` returned a differentiable Loss.

    Args:
        where: name of the function, for the error.
        loss: the returned value.
        columns: the sample.
        mean_names: names that its `means` must have.
        mapped: whether within `torch.func`, whose tensors do not show whether they take a gradient.

    Raises:
        ValueError: the loss is invalid. The message explains what to return instead.
    """
    if not isinstance(loss, Loss):
        raise ValueError(
            f"{where} returned {_kind(loss)}: return "
            "juggler.Loss(total, live_steps, metrics, means={}) instead"
        )

    def must(holds: bool, field: str, value: object, instead: str) -> None:
        if not holds:
            found = f"{where} returned a Loss whose {field} is {_kind(value)}"
            raise ValueError(f"{found}: return {instead}")

    # Each message says what to return, since this is the first check of a new loss.
    mean = "the mean over live steps, a tensor of shape (), as juggler.LiveMean(live) computes it"
    must(_is_scalar(loss.total), "total", loss.total, mean)
    if not mapped and not loss.total.requires_grad:
        raise ValueError(
            f"{where} returned a Loss whose total takes no gradient: compute it from the outputs "
            "of forward, without detach() or torch.no_grad() on the way"
        )
    # Learners of a group weight gradients by this count.
    steps = loss.live_steps
    number = "the number of live steps, an integer tensor of shape (), such as live.sum()"
    must(_is_scalar(steps) and not steps.is_floating_point(), "live_steps", steps, number)
    for field in ("metrics", "means"):
        numbers = getattr(loss, field)
        must(isinstance(numbers, dict), field, numbers, "a dict of tensors of shape () by name")
        of_steps = "a mean of juggler.LiveMean(live) or torch.tensor(number)"
        for name, value in numbers.items():
            instead = f"a tensor of shape (), such as {of_steps}"
            must(_is_scalar(value), f"{field}[{name!r}]", value, instead)
    # All learners reduce the same names in the same order.
    if loss.means.keys() != set(mean_names):
        raise ValueError(
            f"{where} returned a Loss with the means {sorted(loss.means)}, and the mean_names of "
            f"its class are {sorted(mean_names)}: give both the same names"
        )
    rows = len(columns.get(c.LIVE, columns.get(IMPORTANCE_WEIGHTS, ())))
    if loss.priorities is not None and rows:
        fits = isinstance(loss.priorities, Tensor) and loss.priorities.shape == (rows,)
        instead = f"a number for each of {rows} rows, a tensor of shape ({rows},), such as the "
        must(fits, "priorities", loss.priorities, f"{instead}largest error, errors.abs().amax(1)")
    return loss


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == ()


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return (
        f"{value!r}"
        if isinstance(value, (int, float))
        else f"a value of type {type(value).__name__}"
    )


class Forward:
    """A training pass with the parameters and buffers of a state.

    Args:
        flat: the module's structure.
        parameters: [P], or by name.
        buffers: buffers by name.

    Attributes:
        flat: the module's structure.
        named: the parameters by name.
        buffers: buffers by name; a pass may change them.
    """

    def __init__(
        self,
        flat: FlatModule,
        parameters: Tensor | Mapping[str, Tensor],
        buffers: dict[str, Tensor],
    ) -> None:
        self.flat, self.buffers = flat, buffers
        self.named = flat.named(parameters) if isinstance(parameters, Tensor) else parameters

    @property
    def parameters(self) -> Tensor:
        """All parameters in one vector [P]."""
        return self.flat.joined(self.named)

    def using(self, parameters: Tensor | Mapping[str, Tensor]) -> Self:
        """Copy this pass with other parameters; buffers are copied."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return type(self)(self.flat, parameters, buffers)

    def frozen(self) -> Self:
        """Copy this pass without gradients of the parameters."""
        return self.using({name: x.detach() for name, x in self.named.items()})

    def differentiable(self) -> Self:
        """Copy this pass with each parameter as a leaf of the graph."""
        return self.using({name: x.detach().requires_grad_() for name, x in self.named.items()})

    def in_chunks(self) -> InChunks:
        """Copy this pass without gradients, in chunks."""
        return InChunks(self.flat, self.named, self.buffers)

    @property
    def module(self) -> RLModule:
        """The module, for its spaces and distribution; its parameters are not trained."""
        return self.flat.module

    def initial_state(self) -> dict[str, Any]:
        """Return the module's initial state, with this pass's parameters and buffers."""
        return self.flat.initial_state(self.named, self.buffers)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter of the module."""
        return self.named[self.flat.names[name]]

    def buffer(self, name: str) -> Tensor:
        """Return a buffer of the module."""
        return self.buffers[self.flat.names[name]]

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Set a module buffer, which also goes to EnvRunners.

        Raises:
            ValueError: the buffer does not exist, or the value is not a tensor of its shape.
        """
        names = {own: first for own, first in self.flat.names.items() if first in self.buffers}
        owner = type(self.module).__name__
        if name not in names:
            raise ValueError(f"{owner} has no buffer {name!r}{nearest(name, names)}")
        old = self.buffers[names[name]]
        if not isinstance(value, Tensor) or value.shape != old.shape:
            raise ValueError(
                f"the buffer {name!r} of {owner} was given {_kind(value)}: give it a tensor of "
                f"shape {tuple(old.shape)}"
            )
        self.buffers[names[name]] = value.to(old.dtype)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return self.flat.forward_train(self.named, self.buffers, batch)


class NamedColumns(dict[str, Any]):
    """Columns whose KeyError lists the existing names."""

    def __missing__(self, name: object) -> Any:
        if name in COLUMNS:  # the learner reports which sample has no such column
            raise KeyError(name)
        raise KeyError(f"there is no column {name!r}{nearest(name, self)}")


# `torch.func` maps over a loss's columns as over a dict.
pytree.register_pytree_node(
    NamedColumns,
    lambda columns: (list(columns.values()), list(columns)),
    lambda values, names: NamedColumns(zip(names, values, strict=True)),
)


#: Observations in one chunk.
CHUNK = 2048


class InChunks(Forward):
    """A training pass without gradients, chunked to bound its memory."""

    @torch.no_grad()
    def __call__(self, batch: Batch) -> dict[str, Any]:
        leaf = first_leaf(batch[c.OBSERVATIONS])  # [B, ...], or [B, T, ...] with states
        size = max(1, CHUNK // leaf.shape[1]) if c.STATES in batch else CHUNK
        if len(leaf) <= size:
            return super().__call__(batch)
        outputs = [super(InChunks, self).__call__(part) for part in pieces(batch, size)]
        joined: dict[str, Any] = tree_map(lambda *parts: torch.cat(parts), *outputs)
        return joined


def pieces(tree: Any, size: int) -> Iterator[Any]:
    """Split tensors [B, ...] of a tree into trees of `size` rows."""
    for at in range(0, len(first_leaf(tree)), size):
        yield tree_map(lambda x, at=at: x[at : at + size], tree)


def gradient_of(total: Tensor, forward: Forward) -> Tensor:
    """Return the gradient [P] of a loss [] through a `differentiable` pass."""
    leaves = list(forward.named.values())
    found = torch.autograd.grad(total, leaves, materialize_grads=True)
    return torch.cat([x.reshape(-1) for x in found])  # [P]


def gradient_for_vmap(
    loss_of: Callable[[Forward], Loss], forward: Forward
) -> tuple[Tensor, Loss, dict[str, Tensor]]:
    """Return gradient [P], loss and new buffers, by `torch.func.grad`.

    This is slower than torch.autograd, but `torch.func.vmap` can map it.
    """

    def total_of(parameters: Tensor) -> tuple[Tensor, tuple[dict[str, Any], dict[str, Tensor]]]:
        used = forward.using(parameters)
        loss = loss_of(used)
        # torch.func does not accept None as a tensor.
        return loss.total, (given(loss), used.buffers)

    gradient, (found, buffers) = torch.func.grad(total_of, has_aux=True)(forward.parameters)
    return gradient, Loss(**found), buffers
