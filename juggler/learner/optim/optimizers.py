"""Adam and RMSProp as functions of one flat vector; clipping.

The optimizers of torch hold their state and update parameters in place. Here both are values. The
order of operations is that of torch.optim's single-tensor forms or, on the host, of Adam's fused
one, so results agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from juggler.learner.optim.config import OptimizerConfig

#: An optimizer's state for one parameter vector: vectors of the same length, and 0-d counters.
Moments = dict[str, Tensor]


class Step(NamedTuple):
    """How an optimizer makes a step."""

    lr: Tensor  # []
    moved: Tensor  # bool [K], for each of the parameters in the vector, or [] for all: which change
    sizes: Sequence[int]  # of the K parameters
    in_place: bool = False  # whether the old tensors may change: see `on_host`


class Optimizer(Protocol):
    def init(self, parameters: Tensor) -> Moments:
        """The state before the first update of parameters [P]."""

    def update(
        self, parameters: Tensor, gradient: Tensor, moments: Moments, step: Step
    ) -> tuple[Tensor, Moments]:
        """One step: parameters and gradient [P] -> new parameters and moments, which may be the old
        tensors if the step is one in place."""


@dataclass(frozen=True)
class Adam:
    """Kingma & Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def init(self, parameters: Tensor) -> Moments:
        return {
            "mean": torch.zeros_like(parameters),  # [P] of the gradient
            "mean_square": torch.zeros_like(parameters),  # [P] of the gradient
            "updates": torch.zeros((), dtype=torch.float64, device=parameters.device),  # []
        }

    def update(
        self, parameters: Tensor, gradient: Tensor, moments: Moments, step: Step
    ) -> tuple[Tensor, Moments]:
        if step.in_place:
            return parameters, self._in_place(parameters, gradient, moments, step)
        beta1, beta2 = self.betas
        updates = moments["updates"] + 1  # []
        mean = torch.lerp(moments["mean"], gradient, 1 - beta1)  # [P]
        mean_square = torch.addcmul(
            moments["mean_square"] * beta2, gradient, gradient, value=1 - beta2
        )  # [P]
        # Both means start at 0; these factors correct the bias.
        step_size = step.lr / (1 - beta1**updates)  # []
        root_correction = (1 - beta2**updates).sqrt()  # []
        root = mean_square.sqrt() / root_correction + self.epsilon  # [P]
        stepped = torch.addcdiv(parameters, mean * -step_size, root)  # [P]
        new = {"mean": mean, "mean_square": mean_square, "updates": updates}
        moved = of_elements(step)  # [] or [P]
        return torch.where(moved, stepped, parameters), chosen(moved, new, moments)

    def _in_place(
        self, parameters: Tensor, gradient: Tensor, moments: Moments, step: Step
    ) -> Moments:
        """The moments after a step in one pass over memory. Neighbours in the vector make it
        together if they have moved equally often."""
        updates = moments["updates"]  # [], or [P] where parameters do not always move together
        sizes = step.sizes if step.moved.ndim or updates.ndim else [len(parameters)]
        starts = list(accumulate(sizes[:-1], initial=0))
        counts = updates[starts] if updates.ndim else updates.expand(len(starts))  # [K]
        told = zip(step.moved.expand(len(starts)).tolist(), counts.tolist(), sizes, strict=True)
        stop, vectors = 0, (parameters, gradient, moments["mean"], moments["mean_square"])
        for (moves, count), own in groupby(told, key=itemgetter(0, 1)):
            start, stop = stop, stop + sum(size for _, _, size in own)
            if not moves:
                continue
            x, slope, mean, mean_square = ([each[start:stop]] for each in vectors)  # [p] each
            torch._fused_adam_(
                x,
                slope,
                mean,
                mean_square,
                [],
                [torch.tensor(count + 1)],  # []
                lr=float(step.lr),
                beta1=self.betas[0],
                beta2=self.betas[1],
                eps=self.epsilon,
                weight_decay=0.0,
                amsgrad=False,
                maximize=False,
            )
            if updates.ndim:
                updates[start:stop] = count + 1
        if updates.ndim:
            return moments
        return {**moments, "updates": updates + step.moved}  # several optimizers may share it


@dataclass(frozen=True)
class RMSProp:
    """Tieleman & Hinton 2012, lecture 6.5 of "Neural Networks for Machine Learning"."""

    decay: float = 0.99
    epsilon: float = 1e-8

    def init(self, parameters: Tensor) -> Moments:
        return {"mean_square": torch.zeros_like(parameters)}  # [P] of the gradient

    def update(
        self, parameters: Tensor, gradient: Tensor, moments: Moments, step: Step
    ) -> tuple[Tensor, Moments]:
        mean_square = torch.addcmul(
            moments["mean_square"] * self.decay, gradient, gradient, value=1 - self.decay
        )  # [P]
        root = mean_square.sqrt() + self.epsilon  # [P]
        stepped = torch.addcdiv(parameters, gradient * -step.lr, root)  # [P]
        # Beside an Adam, moments have names that are not its own.
        own = {"mean_square": moments["mean_square"]}
        moved = of_elements(step)  # [] or [P]
        kept = chosen(moved, {"mean_square": mean_square}, own)
        return torch.where(moved, stepped, parameters), kept


def on_host(x: Tensor) -> bool:
    """Whether the host reads numbers of a tensor without waiting for a device. Within torch.func it
    cannot read any."""
    return x.device.type == "cpu"


def of_elements(step: Step) -> Tensor:
    """Which elements of the vector change -> bool [P], or [] for all."""
    if not step.moved.ndim:
        return step.moved
    each = zip(step.moved.unbind(), step.sizes, strict=True)
    return torch.cat([moved.expand(size) for moved, size in each])  # [P]


def chosen(
    condition: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of `new` where the condition holds, else those of `old`. The host reads
    nothing."""
    return {
        name: x if new[name] is x else torch.where(condition, new[name], x)
        for name, x in old.items()
    }


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    if config.optimizer == "adam":
        return Adam(betas=config.adam_betas, epsilon=config.optimizer_epsilon)
    return RMSProp(decay=config.rmsprop_decay, epsilon=config.optimizer_epsilon)


def clip_by_global_norm(gradient: Tensor, norm: Tensor, limit: float) -> Tensor:
    """A gradient [P] with this norm (0-d), scaled down to `limit` if it is longer."""
    return gradient * (limit / (norm + 1e-6)).clamp(max=1.0)  # [P]


def clip_by_norm(gradient: Tensor, sizes: Sequence[int], limit: float) -> Tensor:
    """A gradient [P] for parameters of these sizes; each parameter's part is scaled down to `limit`
    if it is longer."""
    pieces = torch.split(gradient, list(sizes))  # [p] each
    clipped = [clip_by_global_norm(x, torch.linalg.vector_norm(x), limit) for x in pieces]
    return torch.cat(clipped)  # [P]
