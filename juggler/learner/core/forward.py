"""Forward and Loss: what an algorithm's loss function takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.structures import tree_map


class Loss(NamedTuple):
    """The loss on a sample, as a core's `loss` returns it.

    Attributes:
        total: a mean over live steps, which is minimized.
        live_steps: how many steps that mean is over. Learners of a group, and micro-batches, weight
            their gradients and their `means` by it, so it must count exactly the steps in `total`.
        metrics: numbers for people, by name. They are logged, and nothing depends on them: those of
            several learners are not combined.
        means: numbers that the algorithm decides by, such as the KL divergence at which PPO stops
            early, by the names in the core's `mean_names`. Each must be a mean over live steps:
            then all learners of a group get the mean over all of their samples, and decide the
            same. `next_extra` finds them in `aux.means`. {}: the algorithm decides nothing by the
            sample, as with most.
        priorities: how much there is to learn from each row [N] of the sample, such as the largest
            error in it, for a replay that draws rows by that; none where there is no such replay.

    A step that is not live (one that only resets an environment, fills up a short row, or is part
    of a burn-in) counts in none of these: its loss has the weight 0 in a mean, and it is not in the
    number that the mean divides by. `LiveMean` computes this mean. A sample without a live step has
    `live_steps` 0: it gives means of 0, and leaves parameters as they are.
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
        where: for the error, what returned it.
        loss: what was returned.
        columns: of which it is the loss.
        mean_names: names that its `means` must have.
        mapped: within `torch.func`, whose tensors do not say whether they take a gradient.

    Raises:
        ValueError: the loss is invalid; says what to return instead.
    """
    if not isinstance(loss, Loss):
        raise ValueError(
            f"{where} returned {_kind(loss)}: return "
            "juggler.Loss(total, live_steps, metrics, means={}) instead"
        )
    if not _is_scalar(loss.total):
        raise ValueError(
            f"{where} returned a Loss whose total is {_kind(loss.total)}: return the mean over "
            "live steps, a tensor of shape (), as juggler.LiveMean(live) computes it"
        )
    if not mapped and not loss.total.requires_grad:
        raise ValueError(
            f"{where} returned a Loss whose total takes no gradient: compute it from the outputs "
            "of forward, without detach() or torch.no_grad() on the way"
        )
    if not _is_scalar(loss.live_steps) or loss.live_steps.is_floating_point():
        raise ValueError(
            f"{where} returned a Loss whose live_steps is {_kind(loss.live_steps)}: return the "
            "number of live steps, an integer tensor of shape (), such as live.sum()"
        )
    for field in ("metrics", "means"):
        numbers = getattr(loss, field)
        if not isinstance(numbers, dict):
            raise ValueError(
                f"{where} returned a Loss whose {field} is {_kind(numbers)}: return a dict of "
                "tensors of shape () by name"
            )
        for name, value in numbers.items():
            if not _is_scalar(value):
                raise ValueError(
                    f"{where} returned a Loss whose {field}[{name!r}] is {_kind(value)}: return a "
                    "tensor of shape (), such as a mean of juggler.LiveMean(live) or "
                    "torch.tensor(number)"
                )
    if loss.means.keys() != set(mean_names):
        raise ValueError(
            f"{where} returned a Loss with the means {sorted(loss.means)}, and the mean_names of "
            f"its class are {sorted(mean_names)}: give both the same names"
        )
    rows = _rows_of(columns)
    if loss.priorities is not None and rows is not None and not _has(loss.priorities, rows):
        raise ValueError(
            f"{where} returned a Loss whose priorities is {_kind(loss.priorities)}, of a sample of "
            f"{rows} rows: return a number for each row, a tensor of shape ({rows},), such as the "
            "largest error in each row, errors.abs().amax(1)"
        )
    return loss


def _rows_of(columns: Columns) -> int | None:
    """Number of rows in a sample; None: its source is unknown."""
    of_rows = columns.get(c.LIVE, columns.get(IMPORTANCE_WEIGHTS))  # [N, ...]
    return None if of_rows is None else len(of_rows)


def _has(priorities: object, rows: int) -> bool:
    return isinstance(priorities, Tensor) and priorities.shape == (rows,)


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == ()


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"{value!r}" if isinstance(value, (int, float)) else f"of type {type(value).__name__}"


class Forward:
    """A training pass with the parameters and buffers of a state.

    Args:
        flat: the module's structure.
        parameters: [P], or all of them by name.
        buffers: by name.

    Attributes:
        flat: the module's structure.
        named: the parameters by name.
        buffers: by name; a pass may change them.
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
        """The parameters in one vector [P]."""
        return self.flat.joined(self.named)

    def using(self, parameters: Tensor | Mapping[str, Tensor]) -> Self:
        """Copy of this pass with other parameters, and copied buffers."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return type(self)(self.flat, parameters, buffers)

    def frozen(self) -> Self:
        """Copy of this pass without gradients of the parameters."""
        return self.using({name: x.detach() for name, x in self.named.items()})

    def differentiable(self) -> Self:
        """Copy of this pass whose gradients add up parameter by parameter."""
        return self.using({name: x.detach().requires_grad_() for name, x in self.named.items()})

    def in_chunks(self) -> InChunks:
        """Copy of this pass without gradients, in chunks."""
        return InChunks(self.flat, self.named, self.buffers)

    @property
    def module(self) -> RLModule:
        """The module, for its spaces and distribution; its parameters stay untrained."""
        return self.flat.module

    def initial_state(self) -> dict[str, Any]:
        """The module's `get_initial_state`, with the parameters and buffers of the state."""
        return self.flat.initial_state(self.named, self.buffers)

    def parameter(self, name: str) -> Tensor:
        """A parameter of the module."""
        return self.named[self.flat.names[name]]

    def buffer(self, name: str) -> Tensor:
        """A buffer of the module."""
        return self.buffers[self.flat.names[name]]

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Set a module buffer, which also goes to EnvRunners.

        Raises:
            ValueError: there is no such buffer, or the value is no tensor of its shape.
        """
        names = {own: first for own, first in self.flat.names.items() if first in self.buffers}
        whose = type(self.module).__name__
        if name not in names:
            raise ValueError(f"{whose} has no buffer {name!r}{nearest(name, names)}")
        old = self.buffers[names[name]]
        if not isinstance(value, Tensor) or value.shape != old.shape:
            raise ValueError(
                f"the buffer {name!r} of {whose} was given {_kind(value)}: give it a tensor of "
                f"shape {tuple(old.shape)}"
            )
        self.buffers[names[name]] = value.to(old.dtype)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return self.flat.forward_train(self.named, self.buffers, batch)


class NamedColumns(dict[str, Any]):
    """Columns whose KeyError lists the existing names."""

    def __missing__(self, name: object) -> Any:
        if name in COLUMNS:  # a learner says which sample lacks it
            raise KeyError(name)
        raise KeyError(f"there is no column {name!r}{nearest(name, self)}")


# `torch.func` maps over those of a loss as over a dict.
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
        leaf = _first_leaf(batch[c.OBSERVATIONS])  # [B, ...], or [B, T, ...] with states
        size = max(1, CHUNK // leaf.shape[1]) if c.STATES in batch else CHUNK
        if len(leaf) <= size:
            return super().__call__(batch)
        outputs = [
            super(InChunks, self).__call__(tree_map(lambda x, at=at: x[at : at + size], batch))
            for at in range(0, len(leaf), size)
        ]
        joined: dict[str, Any] = tree_map(lambda *parts: torch.cat(parts), *outputs)
        return joined


def _first_leaf(tree: Any) -> Tensor:
    while isinstance(tree, Mapping):
        tree = next(iter(tree.values()))
    leaf: Tensor = tree
    return leaf


def gradient_of(total: Tensor, forward: Forward) -> Tensor:
    """Gradient [P] of a loss [] through a `differentiable` pass."""
    leaves = list(forward.named.values())
    found = torch.autograd.grad(total, leaves, materialize_grads=True)
    return torch.cat([x.reshape(-1) for x in found])  # [P]


def gradient_for_vmap(
    loss_of: Callable[[Forward], Loss], forward: Forward
) -> tuple[Tensor, Loss, dict[str, Tensor]]:
    """Gradient [P], loss and new buffers, computed by `torch.func.grad`.

    It is slower than torch.autograd, but `torch.func.vmap` can map it.
    """

    def total_of(parameters: Tensor) -> tuple[Tensor, tuple[dict[str, Any], dict[str, Tensor]]]:
        used = forward.using(parameters)
        loss = loss_of(used)
        # torch.func takes no None for a tensor.
        return loss.total, (given(loss), used.buffers)

    gradient, (found, buffers) = torch.func.grad(total_of, has_aux=True)(forward.parameters)
    return gradient, Loss(**found), buffers
