"""The optimizers of one parameter group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from juggler.learner.optim.config import OptimizerSpec
from juggler.learner.optim.optimizers import (
    Moments,
    Optimizer,
    Step,
    clip_by_global_norm,
    clip_by_norm,
    make_optimizer,
)
from juggler.learner.optim.parameter_group import ParameterGroup
from juggler.runtime.checkpoints.weights import is_named
from juggler.runtime.nearest import all_of


class ParameterGroupOptimizers:
    """One or more optimizers, each for a stretch of a group's parameter vector [P]. Each clips its
    own part of the gradient.

    Moments are vectors [P] over all stretches, 0 where an optimizer has no moment of that name, and
    counters, which all optimizers share.

    Attributes:
        lr_keys: the keys of the schedules of their learning rates.
    """

    def __init__(self, group: ParameterGroup, specs: Sequence[OptimizerSpec]) -> None:
        """Rearranges the group's vector so that each optimizer's parameters are one stretch.

        Args:
            group: the parameter group, of which nothing has been made yet.
            specs: of the optimizer for the rest, then of the others.

        Raises:
            ValueError: several optimizers name the same parameter.
        """
        rest = dict.fromkeys(group.sizes, 0)
        for place, spec in enumerate(specs):
            if spec.training_only:
                rest.update(dict.fromkeys(group.training_only(), place))
        places = {name: _place(group, name, specs, rest[name]) for name in group.sizes}
        group.arrange(sorted(places, key=lambda name: places[name]))
        own = [
            [group.sizes[name] for name in group.sizes if places[name] == place]
            for place in range(len(specs))
        ]
        there = [(spec, sizes) for spec, sizes in zip(specs, own, strict=True) if sizes]
        self._parts = [_Part(spec, sizes) for spec, sizes in there]
        self._stretches = [sum(sizes) for _, sizes in there]
        number = {place: index for index, place in enumerate(sorted(set(places.values())))}
        self._part_of = {name: number[place] for name, place in places.items()}
        self.lr_keys = tuple(dict.fromkeys(spec.lr_key for spec, _ in there))

    def optimizer_of(self, name: str) -> Optimizer:
        """The optimizer of a parameter, by its name in the group.

        Raises:
            KeyError: the group has no such parameter.
        """
        return self._parts[self._part_of[name]].optimizer

    def init(self, parameters: Tensor) -> Moments:
        """The moments before the first update of parameters [P]."""
        return self._joined([part.init(x) for part, x in self._split(parameters)])

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
        """One step of each optimizer.

        Args:
            parameters: [P]
            gradient: [P], before clipping.
            norm: [] of the gradient.
            moments: from the step before.
            lrs: [] by their keys.
            moved: as in `Step`.
            in_place: as in `Step`.

        Returns:
            New parameters [P], and moments.
        """
        if len(self._parts) == 1:
            return self._parts[0].update(parameters, gradient, norm, moments, lrs, moved, in_place)
        gradients = torch.split(gradient, self._stretches)  # [p] each
        vectors = {name: torch.split(x, self._stretches) for name, x in moments.items() if x.ndim}
        updated = []
        counts = [part.parameters for part in self._parts]
        changes = torch.split(moved, counts) if moved.ndim else [moved] * len(gradients)
        for place, (part, x) in enumerate(self._split(parameters)):
            own = {
                name: vectors[name][place] if name in vectors else moment
                for name, moment in moments.items()
            }
            norm = torch.linalg.vector_norm(gradients[place])  # []
            changed = changes[place]  # [] or [k]
            updated.append(part.update(x, gradients[place], norm, own, lrs, changed, in_place))
        parameters = torch.cat([x for x, _ in updated])  # [P]
        return parameters, self._joined([new for _, new in updated])

    def _split(self, parameters: Tensor) -> list[tuple[_Part, Tensor]]:
        return list(zip(self._parts, torch.split(parameters, self._stretches), strict=True))

    def _joined(self, parts: Sequence[Moments]) -> Moments:
        """Join the moments of all stretches."""
        if len(parts) == 1:
            return parts[0]
        joined: Moments = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            first = next(part[name] for part in parts if name in part)
            if first.ndim:
                pieces = [
                    part[name] if name in part else first.new_zeros(size)
                    for part, size in zip(parts, self._stretches, strict=True)
                ]  # [p] each
                first = torch.cat(pieces)  # [P]
            joined[name] = first
        return joined


class _Part:
    """One optimizer, for one stretch of the vector."""

    def __init__(self, spec: OptimizerSpec, sizes: list[int]) -> None:
        """Args:
        spec: the optimizer's settings.
        sizes: the sizes of its parameters.
        """
        self._lr_key, self._lr_scale = spec.lr_key, spec.lr_scale
        self.optimizer = make_optimizer(spec.config)
        self._limit = spec.config.grad_clip
        self._clip_by = spec.config.grad_clip_by
        self._sizes = sizes
        self.parameters = len(sizes)

    def init(self, parameters: Tensor) -> Moments:
        return self.optimizer.init(parameters)

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
        clipped = self._clipped(gradient, norm)  # [P]
        step = Step(lrs[self._lr_key] * self._lr_scale, moved, self._sizes, in_place)
        return self.optimizer.update(parameters, clipped, moments, step)

    def _clipped(self, gradient: Tensor, norm: Tensor) -> Tensor:
        if self._limit is None:
            return gradient
        if self._clip_by == "value":
            return gradient.clamp(-self._limit, self._limit)  # [P]
        if self._clip_by == "norm":
            return clip_by_norm(gradient, self._sizes, self._limit)  # [P]
        return clip_by_global_norm(gradient, norm, self._limit)  # [P]


def check_patterns(groups: Sequence[ParameterGroup], specs: Sequence[OptimizerSpec]) -> None:
    """Raises:
    ValueError: a pattern matches no parameter of any group; lists the parameters.
    """
    names = [_full(group, name) for group in groups for name in group.sizes]
    for spec in specs:
        for pattern in spec.patterns:
            if not any(is_named(pattern, name) for name in names):
                if len(groups) == 1 and len(groups[0].modules) == 1:
                    names = [name.partition(":")[2] for name in names]
                raise ValueError(
                    f"optimizers.{spec.name}: no parameter has a name like {pattern!r}; there are "
                    + ", ".join(names)
                )


def _place(group: ParameterGroup, name: str, specs: Sequence[OptimizerSpec], rest: int) -> int:
    """The index of a parameter's optimizer: the one whose patterns match it, else `rest`."""
    full = _full(group, name)
    named = [
        place
        for place, spec in enumerate(specs)
        if any(is_named(pattern, full) for pattern in spec.patterns)
    ]
    if len(named) > 1:
        both = all_of(f"optimizers.{specs[place].name}" for place in named)
        raise ValueError(f"{both} both name {name!r}: a parameter has one optimizer")
    return named[0] if named else rest


def _full(group: ParameterGroup, name: str) -> str:
    """A parameter's name, with the name of its module before it."""
    return name if ":" in name else f"{group.id}:{name}"
