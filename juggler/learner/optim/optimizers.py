"""Adam and RMSProp on one flat vector, with clipping and parameter groups.

torch's optimizers hold state and update parameters in place. Here both are values. The order of
operations is the same as in torch.optim's single-tensor forms or, on the host, in fused Adam, so
results agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from juggler.learner.optim.config import OptimizerSpec
from juggler.learner.optim.flat_module import FlatModule, Moments
from juggler.runtime.near_matches import all_of
from juggler.runtime.wrong_value import points_of


class Schedule:
    """Piecewise linear function of steps, constant outside its points.

    It is computed on the device of the step counter, so no update waits for a device.

    Args:
        points: (step, value) pairs by rising step, or one value for all steps.

    Raises:
        ValueError: as for `points_of`.
    """

    def __init__(self, points: float | Sequence[tuple[float, float]]) -> None:
        self.points = points_of(points)

    def __call__(self, steps: Tensor) -> Tensor:
        """Return the value after this many steps (0-d) -> 0-d, float64."""
        value = torch.full_like(steps, self.points[0][1], dtype=torch.float64)  # []
        for (start, low), (stop, high) in pairwise(self.points):
            share = ((steps.double() - start) / (stop - start)).clamp(0, 1)  # []
            value = value + share * (high - low)  # []
        return value


class Step(NamedTuple):
    """Inputs of an optimizer step."""

    lr: Tensor  # []
    moved: Tensor  # bool [K], which parameters in the vector change, or [] for all
    sizes: Sequence[int]  # of the K parameters
    in_place: bool = False  # whether the old tensors may change: see `on_host`


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
        """Step in one pass over memory, grouping neighbours with equal step counts."""
        updates = moments["updates"]  # [], or [P] if parameters do not always move together
        sizes = step.sizes if step.moved.ndim or updates.ndim else [len(parameters)]
        # The host reads which neighbours move alike: they share one call of the kernel.
        starts = list(accumulate(sizes[:-1], initial=0))
        counts = updates[starts] if updates.ndim else updates.expand(len(starts))  # [K]
        each = zip(step.moved.expand(len(starts)).tolist(), counts.tolist(), sizes, strict=True)
        stop, vectors = 0, (parameters, gradient, moments["mean"], moments["mean_square"])
        for (moves, count), own in groupby(each, key=itemgetter(0, 1)):
            start, stop = stop, stop + sum(size for _, _, size in own)
            # Their moments keep their age, too.
            if not moves:
                continue
            # Views, through which the kernel writes into the vectors themselves.
            x, slope, mean, mean_square = ([vector[start:stop]] for vector in vectors)  # [p] each
            torch._fused_adam_(
                x,
                slope,
                mean,
                mean_square,
                [],
                # torch has a tensor for each counter.
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
        # Alongside an Adam, there are moments that RMSProp does not have.
        own = {"mean_square": moments["mean_square"]}
        moved = of_elements(step)  # [] or [P]
        kept = chosen(moved, {"mean_square": mean_square}, own)
        return torch.where(moved, stepped, parameters), kept


#: Returns new parameters [P] and moments after a step, perhaps in place.
Optimizer: TypeAlias = Adam | RMSProp


def on_host(x: Tensor) -> bool:
    """Return whether the host reads a tensor without waiting for a device.

    Within torch.func it cannot read any tensor.
    """
    return x.device.type == "cpu"


def of_elements(step: Step) -> Tensor:
    """Return which elements change, bool [P], or [] for all."""
    if not step.moved.ndim:
        return step.moved
    each = zip(step.moved.unbind(), step.sizes, strict=True)
    return torch.cat([moved.expand(size) for moved, size in each])  # [P]


def chosen(
    condition: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Select between `new` and `old` tensors by a condition, on their device."""
    return {
        name: x if new[name] is x else torch.where(condition, new[name], x)
        for name, x in old.items()
    }


def clip_by_global_norm(gradient: Tensor, norm: Tensor, limit: float) -> Tensor:
    """Scale a gradient [P] of this norm (0-d) down to `limit`."""
    return gradient * (limit / (norm + 1e-6)).clamp(max=1.0)  # [P]


class Optimizers:
    """One or more optimizers, each for a range of the parameters [P].

    Each clips its own part of the gradient. Moments are vectors [P] over all ranges, 0 if an
    optimizer has no moment of that name, and counters, which all optimizers share.

    Attributes:
        lr_keys: keys of the learning rates' schedules.
    """

    def __init__(self, flat: FlatModule, specs: Sequence[OptimizerSpec]) -> None:
        """Rearrange the module's vector so that each optimizer's parameters are adjacent.

        Args:
            flat: the module, before any vector is made.
            specs: spec of the main optimizer, then of the others.

        Raises:
            ValueError: a pattern matches no parameter, or several optimizers match the same one.
        """
        _check_patterns(flat.sizes, specs)
        training_only = flat.training_only()
        members: list[list[str]] = [[] for _ in specs]
        for name in flat.sizes:
            members[_place(name, specs, name in training_only)].append(name)
        # With its parameters side by side, each optimizer's part of a vector is a view.
        flat.arrange([name for own in members for name in own])
        self._parts: list[_ParameterRange] = []
        self._part_of: dict[str, _ParameterRange] = {}
        for spec, own in zip(specs, members, strict=True):
            if own:
                part = _ParameterRange(spec, [flat.sizes[name] for name in own])
                self._parts.append(part)
                self._part_of.update(dict.fromkeys(own, part))
        self._ranges = [sum(part.sizes) for part in self._parts]
        self.lr_keys = tuple(dict.fromkeys(part.lr_key for part in self._parts))

    def optimizer_of(self, name: str) -> Optimizer:
        """Return the optimizer of a parameter.

        Raises:
            KeyError: the module has no such parameter.
        """
        return self._part_of[name].optimizer

    def init(self, parameters: Tensor) -> Moments:
        """Return the moments before the first update of parameters [P]."""
        return self._joined([part.optimizer.init(x) for part, x in self._split(parameters)])

    def update(
        self,
        parameters: Tensor,
        gradient: Tensor,
        norm: Tensor,
        moments: Moments,
        lrs: Mapping[str, Tensor],
        moved: Tensor,
        in_place: bool,
    ) -> tuple[Tensor, Moments]:
        """Make one step of each optimizer.

        Args:
            parameters: [P]
            gradient: [P], before clipping.
            norm: norm [] of the gradient.
            moments: moments from the previous step.
            lrs: learning rates [] by their keys.
            moved: see `Step`.
            in_place: see `Step`.

        Returns:
            New parameters [P], and moments.
        """
        if len(self._parts) == 1:
            (part,) = self._parts
            step = part.step(lrs, moved, in_place)
            return part.optimizer.update(parameters, part.clipped(gradient, norm), moments, step)
        gradients = torch.split(gradient, self._ranges)  # [p] each
        vectors = {name: torch.split(x, self._ranges) for name, x in moments.items() if x.ndim}
        counts = [len(part.sizes) for part in self._parts]
        changes = torch.split(moved, counts) if moved.ndim else [moved] * len(gradients)
        updated = []
        for place, (part, x) in enumerate(self._split(parameters)):
            # Counters are shared, so every optimizer gets the same ones.
            own = {
                name: vectors[name][place] if name in vectors else moment
                for name, moment in moments.items()
            }
            clipped = part.clipped(gradients[place], torch.linalg.vector_norm(gradients[place]))
            step = part.step(lrs, changes[place], in_place)
            updated.append(part.optimizer.update(x, clipped, own, step))
        parameters = torch.cat([x for x, _ in updated])  # [P]
        return parameters, self._joined([new for _, new in updated])

    def _split(self, parameters: Tensor) -> list[tuple[_ParameterRange, Tensor]]:
        return list(zip(self._parts, torch.split(parameters, self._ranges), strict=True))

    def _joined(self, parts: Sequence[Moments]) -> Moments:
        """Join the moments of all ranges."""
        if len(parts) == 1:
            return parts[0]
        joined: Moments = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            first = next(part[name] for part in parts if name in part)
            if first.ndim:
                pieces = [
                    part[name] if name in part else first.new_zeros(size)
                    for part, size in zip(parts, self._ranges, strict=True)
                ]  # [p] each
                first = torch.cat(pieces)  # [P]
            joined[name] = first
        return joined


class _ParameterRange:
    """An optimizer for one range of the vector, with parameter sizes."""

    def __init__(self, spec: OptimizerSpec, sizes: list[int]) -> None:
        self._spec, self.sizes, self.lr_key = spec, sizes, spec.lr_key
        config = spec.config
        self.optimizer: Optimizer = RMSProp(config.rmsprop_decay, config.optimizer_epsilon)
        if config.optimizer == "adam":
            self.optimizer = Adam(config.adam_betas, config.optimizer_epsilon)

    def step(self, lrs: Mapping[str, Tensor], moved: Tensor, in_place: bool) -> Step:
        lr = lrs[self.lr_key] * self._spec.lr_scale  # []
        return Step(lr, moved, self.sizes, in_place)

    def clipped(self, gradient: Tensor, norm: Tensor) -> Tensor:
        """Clip a gradient [p] with this norm []."""
        limit, by = self._spec.config.grad_clip, self._spec.config.grad_clip_by
        if limit is None:
            return gradient
        if by == "value":
            return gradient.clamp(-limit, limit)  # [p]
        if by == "norm":
            pieces = torch.split(gradient, self.sizes)  # of each parameter
            return torch.cat(
                [clip_by_global_norm(x, torch.linalg.vector_norm(x), limit) for x in pieces]
            )  # [p]
        return clip_by_global_norm(gradient, norm, limit)  # [p]


def _check_patterns(names: Collection[str], specs: Sequence[OptimizerSpec]) -> None:
    """Raise ValueError, with all names, if a pattern matches no parameter."""
    for spec in specs:
        for pattern in spec.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"optimizers.{spec.name}: no parameter has a name like {pattern!r}; there are "
                    + ", ".join(names)
                )


def _place(name: str, specs: Sequence[OptimizerSpec], training_only: bool) -> int:
    """Return the index of a parameter's optimizer, the main one by default."""
    named = [
        place
        for place, spec in enumerate(specs)
        if any(fnmatchcase(name, pattern) for pattern in spec.patterns)
    ]
    if len(named) > 1:
        both = all_of(f"optimizers.{specs[place].name}" for place in named)
        raise ValueError(f"{both} both name {name!r}: a parameter has one optimizer")
    for_training = [k for k, spec in enumerate(specs) if spec.training_only and training_only]
    return (named or for_training or [0])[0]
