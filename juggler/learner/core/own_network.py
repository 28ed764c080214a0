"""A network that a core around another one trains for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from juggler.learner.core.learner_core import Seam
from juggler.learner.optim.flat_module import Places, seeded
from juggler.learner.optim.optimizers import Adam, Step, on_host
from juggler.runtime.wire.structures import tree_map

#: Rows in one pass without gradients.
_CHUNK = 2048


class LossSum(NamedTuple):
    """A loss, before it is divided by the steps that it is over; of this learner alone."""

    gradient: Tensor  # [P]
    total: Tensor  # []
    steps: Tensor  # [] of the dtype of the gradient


class OwnNetwork:
    """The structure of a network, its optimizer, and its place in a state.

    In a state, `constant` has the tensors that never change by name, `trained` is the vector [P] of
    all others, `moments` are those of the optimizer, and `key` [] is another one after each step.
    """

    def __init__(self, name: str, make: Callable[[], nn.Module], constant: str = "") -> None:
        """Args:
        name: what its parameters are drawn from, beside a seed.
        make: makes the network with newly drawn parameters.
        constant: what the names of parameters begin with that never change; "": there are none.
        """
        self._name, self._make = name, make
        self._network = self._made(0)
        self._places = Places(self._network)
        self._adam = Adam()
        self._shapes = {
            name: parameter.shape
            for name, parameter in self._network.named_parameters()
            if not (constant and name.startswith(constant))
        }
        self._sizes = [shape.numel() for shape in self._shapes.values()]

    def beginning(self, seed: int) -> dict[str, Any]:
        """Its part of a state before the first update."""
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
        """The network with the tensors of a state, and these trained ones [P]."""
        pieces = zip(self._shapes.items(), torch.split(trained, self._sizes), strict=True)
        named = {name: piece.view(shape) for (name, shape), piece in pieces}
        result: Tensor = self._places.call({**own["constant"], **named}, *args)
        return result

    @torch.no_grad()
    def in_chunks(self, own: Mapping[str, Any], rows: Any, *args: Any) -> Tensor:
        """The network on a tree of rows [B, ...], without gradients, in memory that does not grow
        with them -> [B]."""
        leaves: list[Tensor] = []
        tree_map(leaves.append, rows)
        parts = [
            self(
                own,
                own["trained"],
                tree_map(lambda x, start=start: x[start : start + _CHUNK], rows),
                *args,
            )
            for start in range(0, len(leaves[0]), _CHUNK)
        ]
        return torch.cat(parts)  # [B]

    def loss_sum(
        self, own: Mapping[str, Any], total_of: Callable[[Tensor], Tensor], steps: Tensor
    ) -> LossSum:
        """The gradient of a sum of losses.

        Args:
            own: the network's part of a state.
            total_of: the trained tensors [P] -> the sum [].
            steps: [] that it is over.
        """
        trained = own["trained"].detach().requires_grad_()  # [P]
        with torch.enable_grad():
            total = total_of(trained)  # []
            (gradient,) = torch.autograd.grad(total, trained)  # [P]
        return LossSum(gradient, total.detach(), steps.to(gradient.dtype))

    def nothing(self, own: Mapping[str, Any]) -> LossSum:
        """The same over no step."""
        trained: Tensor = own["trained"]  # [P]
        zero = trained.new_zeros(())  # []
        return LossSum(torch.zeros_like(trained), zero, zero)

    def stepped(
        self, own: dict[str, Any], losses: Sequence[LossSum], lr: float, seam: Seam
    ) -> tuple[dict[str, Any], Tensor]:
        """One step of the optimizer on a sum of mean losses, each over the steps of all learners ->
        the state after it, and these means [losses]. It leaves `own` as it was."""
        flat = torch.stack(
            [torch.cat([x.gradient, x.total.view(1), x.steps.view(1)]) for x in losses]
        )
        sums = seam.sums(flat)  # [losses, P + 2]
        counts = sums[:, -1]  # [losses]
        means = sums[:, :-1] / counts.clamp(min=1).unsqueeze(1)  # [losses, P + 1]
        gradient = means[:, :-1].sum(0)  # [P]
        rate = torch.full((), lr, dtype=torch.float64, device=gradient.device)  # []
        moved = gradient.isfinite().all() & (counts > 0).any()  # []
        step = Step(rate, moved, self._sizes, in_place=on_host(gradient))
        begun = tree_map(torch.clone, {name: own[name] for name in ("trained", "moments")})
        trained, moments = self._adam.update(begun["trained"], gradient, begun["moments"], step)
        after = {
            **own,
            "trained": trained,  # [P]
            "moments": moments,
            "key": torch.where(moved, (own["key"] + 1) % 2**32, own["key"]),  # []
        }
        return after, means[:, -1]

    def _made(self, seed: int) -> nn.Module:
        with seeded(seed, self._name):
            return self._make()
