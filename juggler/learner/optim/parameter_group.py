"""Parameter groups: modules that share parameters, and so are trained as one."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from juggler.learner.optim.places import Places
from juggler.learner.optim.training_pass import TrainingPass
from juggler.runtime.modules.acting import acting_names
from juggler.runtime.modules.distributions.base import Constants
from juggler.runtime.modules.multi_rl_module import MultiRLModule
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.nearest import all_of

#: Functions that make modules with newly drawn parameters: one for each module id, or one for all.
Factories = Mapping[str, Callable[[], RLModule]] | Callable[[], MultiRLModule]


class ParameterGroup:
    """The structure of some modules, and the place of their parameters in a vector [P].

    With all parameters in one vector, an optimizer step, a norm or a reduction over learners takes
    only a few operations, however many layers there are. Parameters that need no gradient count as
    buffers.

    A tensor has the same name in a group as in its module. In a group of several modules the name
    is "module:name", with the first module that has the tensor.

    Attributes:
        id: its id in states and checkpoints: that of its module, or all ids joined by "+".
        modules: by id, for their spaces and distributions. Their own parameters are not trained.
        sizes: the sizes of the parameters, by their names in the group, in the vector's order.
    """

    def __init__(self, modules: Mapping[str, RLModule], training_pass: TrainingPass) -> None:
        """Args:
            modules: by id.
            training_pass: computes their training passes.

        Raises:
            ValueError: one of the modules cannot be trained.
        """
        self.id = "+".join(modules)
        self._pass = training_pass
        self.modules = dict(modules)
        self._names: dict[str, dict[str, str]] = {}  # names in the group, by module id and own name
        self._shapes: dict[str, torch.Size] = {}  # of parameters, by their names in the group
        found: dict[int, str] = {}
        for module_id, module in modules.items():
            prefix = "" if len(modules) == 1 else f"{module_id}:"
            names = {
                name: found.setdefault(id(tensor), prefix + name)
                for name, tensor in chain(
                    # A tensor that a module has under several names is listed under each of them.
                    module.named_parameters(remove_duplicate=False),
                    module.named_buffers(remove_duplicate=False),
                )
            }
            self._names[module_id] = names
            for name, parameter in _trained(module).items():
                self._shapes[names[name]] = parameter.shape
        self.arrange(list(self._shapes))
        _check_one_dtype(modules)
        self._initial_states = {
            module_id: Places(_InitialState(module))
            for module_id, module in modules.items()
            if module.get_initial_state()
        }
        self._acting = {module_id: acting_names(module) for module_id, module in modules.items()}

    def arrange(self, names: Sequence[str]) -> None:
        """Put the parameters into this order; only before anything is made of the group."""
        self._shapes = {name: self._shapes[name] for name in names}
        self.sizes = {name: math.prod(shape) for name, shape in self._shapes.items()}
        self._sizes = list(self.sizes.values())
        own = [set(self._names[module_id].values()) for module_id in self.modules]
        users = [[name in names for names in own] for name in self._shapes]
        self._users = Constants(np.array(users))  # [K, modules]

    def names(self, module_id: str) -> Mapping[str, str]:
        """The names in the group of a module's parameters and buffers, by its own names."""
        return self._names[module_id]

    def flatten(self, modules: Mapping[str, RLModule]) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of the parameters [P] and buffers of other modules with the same structure."""
        tensors = {
            self._names[module_id][name]: tensor.detach()
            for module_id in self.modules
            for name, tensor in chain(
                modules[module_id].named_parameters(), modules[module_id].named_buffers()
            )
        }
        flat = torch.cat([tensors.pop(name).reshape(-1) for name in self._shapes])  # [P]
        return flat, {name: buffer.clone() for name, buffer in tensors.items()}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector [P], by the parameters' names in the group."""
        pieces = torch.split(flat, self._sizes)  # [p] each
        return {
            name: piece.view(shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    @staticmethod
    def joined(named: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `named`."""
        return torch.cat([piece.reshape(-1) for piece in named.values()])  # [P]

    def training_only(self) -> set[str]:
        """Names of the parameters that no module needs to act."""
        acting = chain.from_iterable(
            (self._names[module_id][name] for name in names)
            for module_id, names in self._acting.items()
        )
        return self.sizes.keys() - set(acting)

    def acting(
        self, parameters: Tensor, buffers: Mapping[str, Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        """The tensors that acting needs, by module id and the module's own names; not copied."""
        tensors = {**self.named(parameters), **buffers}
        return {
            module_id: {name: tensors[self._names[module_id][name]] for name in names}
            for module_id, names in self._acting.items()
        }

    def forward_train(
        self,
        module_id: str,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batch: Batch,
    ) -> dict[str, Any]:
        """The training pass of one module with these parameters, as from `named`, and buffers.

        The pass may update the given buffers in place, for example those of a normalization.
        """
        tensors = {**parameters, **buffers}
        named = {name: tensors[own] for name, own in self._names[module_id].items()}
        return self._pass(self.modules[module_id], named, batch)

    def initial_state(
        self, module_id: str, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """The state of one module at the start of an episode, which may be learned."""
        if module_id not in self._initial_states:
            return {}
        tensors = {**parameters, **buffers}
        named = {f"module.{name}": tensors[own] for name, own in self._names[module_id].items()}
        state: dict[str, Any] = self._initial_states[module_id].call(named)
        return state

    def concerned(self, live_steps: Mapping[str, Tensor]) -> Tensor:
        """Which parameters a sample trains -> bool [K], in the order of `sizes`, or [] for all.

        Args:
            live_steps: 0-d, by id of the modules that have a part in the sample.
        """
        (one, *_) = live_steps.values()  # []
        if len(self.modules) == 1:
            return one > 0  # []
        none = torch.zeros_like(one)  # []
        steps = torch.stack([live_steps.get(each, none) for each in self.modules])  # [modules]
        (users,) = self._users.on(one.device)  # [K, modules]
        return (users & (steps > 0)).any(1)  # [K]


class _InitialState(nn.Module):
    """`get_initial_state` as a forward pass, because torch can call that with other parameters."""

    def __init__(self, module: RLModule) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> dict[str, Any]:
        return self.module.get_initial_state()


def _trained(module: RLModule) -> dict[str, torch.nn.Parameter]:
    """Parameters that need a gradient.

    Raises:
        ValueError: there are none.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameters to train")
    return trained


def _check_one_dtype(modules: Mapping[str, RLModule]) -> None:
    """Raises:
    ValueError: trained parameters are neither all float32 nor all float64.
    """
    dtypes = {p.dtype for module in modules.values() for p in _trained(module).values()}
    if dtypes not in ({torch.float32}, {torch.float64}):
        kinds = all_of(type(module).__name__ for module in modules.values())
        raise ValueError(
            f"{kinds} has parameters in {', '.join(sorted(map(str, dtypes)))}: trained parameters "
            "must be all float32 or all float64; to compute in fewer bits, keep them so and use "
            "torch.autocast in the module"
        )


def make_modules(factories: Factories, seed: int) -> tuple[dict[str, RLModule], list[list[str]]]:
    """Modules by id, drawn from a seed; and lists of the ids that share parameters."""
    if isinstance(factories, Mapping):
        modules = {}
        for module_id, make in factories.items():
            with seeded(seed, module_id):
                modules[module_id] = make()
        return modules, [[module_id] for module_id in modules]
    with seeded(seed, "multi"):
        multi = factories()
    return dict(multi.items()), [list(ids) for ids in multi.shared_groups()]


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed torch's CPU generator by the seed and the name; restore it afterwards."""
    entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))
    try:
        yield
    finally:
        torch.set_rng_state(before)
