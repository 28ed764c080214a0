"""The acting part of a module: its weights, states and steps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.near_matches import closest, difference
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree


def acting_names(module: RLModule) -> list[str]:
    """Return names of parameters and buffers for acting.

    Names are as in `named_parameters` and `named_buffers`, which name a shared tensor once; parts
    in `training_only` are left out.

    Raises:
        ValueError: `training_only` names a part that does not exist, or one that the acting part
            shares under a name that is training only.
    """
    _check_names(module)
    apart = module.training_only
    once = chain(module.named_parameters(), module.named_buffers())
    names = {id(tensor): name for name, tensor in once}
    everywhere = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    # A tensor is sent under its first name, which must be in the acting part.
    for alias, tensor in everywhere:
        name = names[id(tensor)]
        if _within(name, apart) and not _within(alias, apart):
            raise ValueError(
                f"{type(module).__name__} shares {name!r}, which is training only, with "
                f"{alias!r}, which is not: assign the latter first, so that its name counts"
            )
    return [name for name in names.values() if not _within(name, apart)]


def strip_to_acting(module: RLModule) -> None:
    """Remove `training_only` parts; a pass that uses them raises an error.

    Raises:
        ValueError: as for `acting_names`.
    """
    acting_names(module)
    for path in module.training_only:
        parent_path, _, name = path.rpartition(".")
        parent = module.get_submodule(parent_path)
        delattr(parent, name)
        parent.add_module(name, TrainingOnly(f"{type(module).__name__}.{path}"))


class TrainingOnly(nn.Module):
    """Placeholder for a part that an EnvRunner does not have."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.why = (
            f"{name} is in training_only, so it is missing when the module acts: remove it from "
            "training_only, or use it only in _forward_train"
        )

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self.why)

    def __getitem__(self, _: Any) -> NoReturn:
        raise RuntimeError(self.why)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self.why} (asked for {name!r})")

    @classmethod
    def __torch_function__(cls, *call: Any) -> NoReturn:
        _function, _types, args, *_ = call
        raise RuntimeError(next(each.why for each in args if isinstance(each, cls)))


def _within(name: str, paths: tuple[str, ...]) -> bool:
    return any(name == path or name.startswith(path + ".") for path in paths)


def _check_names(module: RLModule) -> None:
    parts = module.named_modules, module.named_parameters, module.named_buffers
    known = {name for named in parts for name, _ in named(remove_duplicate=False) if name}
    for path in module.training_only:
        if path not in known:
            near = closest(path, known)
            hint = f": did you mean {near!r}?" if near else ""
            raise ValueError(
                f"{type(module).__name__}.training_only has no such part {path!r}{hint}"
            )


def restarted(states: Any, initial: Any, first: Any) -> Any:
    """Replace states [N, ...] by initial ones where an episode starts.

    Args:
        states: a tree of tensors or arrays.
        initial: a tree of the same kind.
        first: [N] bool, where an episode starts.
    """
    where: Any = torch.where if isinstance(first, Tensor) else np.where
    return tree_map(
        lambda start, state: where(first.reshape(-1, *[1] * (state.ndim - 1)), start, state),
        initial,
        states,
    )


def weights_of(module: RLModule) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, by the learner's names."""
    return {
        name: tensor.detach()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def load_weights(into: Mapping[str, Tensor], weights: Tree) -> None:
    """Copy arrays into tensors of the same names, which keep their dtypes.

    Raises:
        ValueError: the weights belong to another module.
    """
    if not isinstance(weights, Mapping):
        raise ValueError("weights are one array, not arrays by name")
    if weights.keys() != into.keys():
        raise ValueError(f"weights are of another module, {difference(weights, into)}")
    for name, mine in into.items():
        tensor = _tensor(weights[name])  # [...]
        if tensor.shape != mine.shape:
            raise ValueError(
                f"weights are of another module: {name!r} has shape {list(tensor.shape)}, "
                f"here {list(mine.shape)}"
            )
        mine.copy_(tensor)


def _tensor(array: Any) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:  # torch cannot convert it from NumPy
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)  # [...]
    return torch.tensor(array)  # [...]
