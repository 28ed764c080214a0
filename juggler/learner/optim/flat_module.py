"""FlatModule: a module's structure, with its parameters in one vector."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from juggler.runtime.modules.acting_part import acting_names
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.structures import tree_map

#: Makes a module with newly drawn parameters.
MakeModule = Callable[[], RLModule]
#: An optimizer's state for a parameter vector: vectors of the same length, and 0-d counters.
Moments = dict[str, Tensor]


class TrainState(TypedDict):
    """A module's training state; CPU optimizer steps change vectors in place."""

    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]
    moments: Moments  # the optimizer's
    extra: dict[str, Tensor]  # the algorithm's: 0-d, or [P]
    steps: Tensor  # [] int64: live steps trained on, for schedules


class FlatModule:
    """A module's structure, with its parameters in one vector [P].

    With all parameters in one vector, an optimizer step, a norm or a reduction over learners takes
    only a few operations. Parameters without a gradient count as buffers. A tensor with several
    names has the first of them.

    Attributes:
        module: for its spaces and distribution. Its own parameters are not trained.
        names: first name of each tensor, by all of its names.
        sizes: sizes of the parameters by name, in the vector's order.
    """

    def __init__(self, module: RLModule, training_pass: TrainingPass) -> None:
        """Take the structure of a module.

        Args:
            module: the module.
            training_pass: computes its training passes.

        Raises:
            ValueError: the module cannot be trained.
        """
        self.module = module
        self._pass = training_pass
        found: dict[int, str] = {}
        self.names: Mapping[str, str] = {
            name: found.setdefault(id(tensor), name)
            for name, tensor in chain(
                module.named_parameters(remove_duplicate=False),
                module.named_buffers(remove_duplicate=False),
            )
        }
        self._shapes = {name: x.shape for name, x in _trained(module).items()}
        self.arrange(list(self._shapes))
        self._has_state = bool(module.get_initial_state())
        self._acting = acting_names(module)

    def arrange(self, names: Sequence[str]) -> None:
        """Order the parameters, before any vector is made."""
        self._shapes = {name: self._shapes[name] for name in names}
        self.sizes = {name: math.prod(shape) for name, shape in self._shapes.items()}
        self._sizes = list(self.sizes.values())

    def flatten(self, module: RLModule) -> tuple[Tensor, dict[str, Tensor]]:
        """Copy parameters [P] and buffers of a module of this structure."""
        tensors = {
            name: tensor.detach()
            for name, tensor in chain(module.named_parameters(), module.named_buffers())
        }
        flat = torch.cat([tensors.pop(name).reshape(-1) for name in self._shapes])  # [P]
        return flat, {name: buffer.clone() for name, buffer in tensors.items()}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a vector [P], by the parameters' names."""
        pieces = torch.split(flat, self._sizes)  # [p] each
        return {
            name: piece.view(shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    @staticmethod
    def joined(named: Mapping[str, Tensor]) -> Tensor:
        """Undo `named`."""
        return torch.cat([piece.reshape(-1) for piece in named.values()])  # [P]

    def by_name(self, state: TrainState) -> dict[str, Any]:
        """Return a state with every vector [P] split into parameters."""
        return {
            **state,
            "parameters": self.named(state["parameters"]),
            "moments": {k: self.named(x) if x.ndim else x for k, x in state["moments"].items()},
            "extra": {k: self.named(x) if x.ndim else x for k, x in state["extra"].items()},
        }

    def from_names(self, named: Mapping[str, Any]) -> TrainState:
        """Undo `by_name`."""

        def joined(each: Tensor | dict[str, Tensor]) -> Tensor:
            return each if isinstance(each, Tensor) else self.joined(each)

        return TrainState(
            parameters=joined(named["parameters"]),  # [P]
            buffers=named["buffers"],
            moments={name: joined(each) for name, each in named["moments"].items()},
            extra={name: joined(each) for name, each in named["extra"].items()},
            steps=named["steps"],
        )

    def training_only(self) -> set[str]:
        """Return names of the parameters that acting does not need."""
        return self.sizes.keys() - {self.names[name] for name in self._acting}

    def acting(self, parameters: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors that acting needs, by the module's names; not copied."""
        tensors = {**self.named(parameters), **buffers}
        return {name: tensors[self.names[name]] for name in self._acting}

    def forward_train(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Batch
    ) -> dict[str, Any]:
        """Make the training pass with these parameters, as from `named`, and buffers.

        The pass may update the given buffers in place, for example a normalization's.
        """
        return self._pass(self._under_all_names(parameters, buffers), batch)

    def initial_state(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the module's state at an episode's start, possibly learned."""
        if not self._has_state:
            return {}
        tensors = self._under_all_names(parameters, buffers)
        state: dict[str, Any] = self._pass.places.call(self.module.get_initial_state, tensors)
        return state

    def _under_all_names(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        tensors = {**parameters, **buffers}
        return {name: tensors[first] for name, first in self.names.items()}


class TensorSwapper:
    """Swaps a module's parameters and buffers, with cached lookups.

    torch.func.functional_call is about eight times slower.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str, str]] = []  # a map, the key there, the name
        names: dict[int, str] = {}  # the first name of each tensor
        for prefix, part in module.named_modules(remove_duplicate=False):
            for tensors in (part._parameters, part._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                        self._places.append((tensors, key, name))

    def call(self, function: Callable[..., Any], tensors: Mapping[str, Tensor], *args: Any) -> Any:
        """Call a function with these tensors in the module, by first names."""
        before = [place[key] for place, key, _ in self._places]
        try:
            for place, key, name in self._places:
                place[key] = tensors[name]
            return function(*args)
        finally:
            for (place, key, _), tensor in zip(self._places, before, strict=True):
                place[key] = tensor


class TrainingPass:
    """Calls `forward_train` of a module with other tensors than its own.

    Args:
        module: the module.
        bfloat16: whether passes run under torch.autocast; their outputs are converted to float32.
        compiled: whether torch.compile compiles passes, for any number of rows. The first pass
            is not compiled, because it checks specs.

    Raises:
        ValueError: `compiled` is set, and there is no C++ compiler.

    Attributes:
        compiled_calls: number of runs of graphs compiled by torch.compile.
        places: places of the module's tensors.
    """

    def __init__(self, module: RLModule, *, bfloat16: bool = False, compiled: bool = False) -> None:
        self.compiled_calls = 0
        self._module, self.places, self._bfloat16 = module, TensorSwapper(module), bfloat16
        self._is_checked = False  # after the first pass
        self._compiled: Callable[..., Any] | None = None
        if compiled:
            _check_compiler()
            self._compiled = torch.compile(_call, backend=self._counted)

    def __call__(self, tensors: dict[str, Tensor], batch: Batch) -> dict[str, Any]:
        """Run a pass with these tensors, which may update the buffers.

        Each tensor is listed under all of its names.
        """
        if not self._bfloat16:
            return self._outputs(tensors, batch)
        with torch.autocast(next(iter(tensors.values())).device.type, torch.bfloat16):
            outputs = self._outputs(tensors, batch)
        full: dict[str, Any] = tree_map(
            lambda x: x.float() if x.dtype is torch.bfloat16 else x, outputs
        )
        return full

    def _outputs(self, tensors: dict[str, Tensor], batch: Batch) -> dict[str, Any]:
        outputs: dict[str, Any]
        if self._compiled is not None and self._is_checked:
            # Code compiled for these tensors [B, ...] has to accept every B.
            tree_map(lambda x: torch._dynamo.maybe_mark_dynamic(x, 0), batch)
            outputs = self._compiled(self._module, tensors, (batch,))
        else:
            outputs = self.places.call(self._module, tensors, batch)
            self._is_checked = True
        return outputs

    def _counted(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile with the default backend of torch.compile, and count calls."""
        compiled = torch._dynamo.lookup_backend("inductor")(graph, inputs)

        def call(*inputs: Any) -> Any:
            self.compiled_calls += 1
            return compiled(*inputs)

        return call


def _call(module: RLModule, tensors: dict[str, Tensor], arguments: tuple[Batch]) -> Any:
    # torch.compile traces our functions, but not torch's own.
    return functional_call(module, tensors, arguments, tie_weights=False)


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "compile = true: torch.compile needs a C++ compiler, and this host has none. Install "
            "g++ or clang, name one in the environment variable CXX, or set compile = false"
        ) from error


def _trained(module: RLModule) -> dict[str, nn.Parameter]:
    """Return the parameters that need a gradient.

    Raises:
        ValueError: there are no such parameters, or not all are float32 or all float64.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameters to train")
    dtypes = {p.dtype for p in trained.values()}
    if dtypes not in ({torch.float32}, {torch.float64}):
        raise ValueError(
            f"{type(module).__name__} has parameters in {', '.join(sorted(map(str, dtypes)))}: "
            "trained parameters must be all float32 or all float64; to compute in fewer bits, keep "
            "them so and use torch.autocast in the module"
        )
    return trained


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed torch's CPU generator by seed and name; restore it afterwards."""
    entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))
    try:
        yield
    finally:
        torch.set_rng_state(before)
