"""Replaces parameters and buffers of a parameter group by weights from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from juggler.learner.core.state import StateMismatch
from juggler.learner.optim.parameter_group import ParameterGroup
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.trees import Tree


def with_weights(
    group: ParameterGroup,
    parameters: Tensor,
    buffers: Mapping[str, Tensor],
    weights: Mapping[str, Tree],
    *,
    whole: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The parameters [P] and buffers of a group, with some of them replaced.

    Args:
        group: the parameter group.
        parameters: [P]
        buffers: by their names in the group.
        weights: the new ones, name -> array by module id; float32 parameters may be rounded to
            bfloat16.
        whole: whether all parameters and buffers of the group must be given.

    Raises:
        StateMismatch: a module has no weights of such a name, shape or dtype.
    """
    tensors = {**group.named(parameters), **buffers}
    found: dict[str, Tensor] = {}
    for module_id, arrays in weights.items():
        names = group.names(module_id)
        if not isinstance(arrays, Mapping):
            raise StateMismatch(f"weights of module {module_id!r} must be arrays by name")
        for name, array in arrays.items():
            if name not in names:
                raise StateMismatch(
                    f"module {module_id!r} has no weights {name!r}{nearest(name, names)}"
                )
            tensor = _tensor(f"{name!r} of module {module_id!r}", array, tensors[names[name]])
            if not torch.equal(found.setdefault(names[name], tensor), tensor):
                raise StateMismatch(
                    f"weights {name!r} of module {module_id!r} are shared with another module, for "
                    "which other values are given"
                )
    lacking = [name for name in tensors if name not in found]
    if whole and lacking:
        raise StateMismatch(f"weights are missing for {', '.join(map(repr, lacking))}")
    tensors.update(found)
    flat = torch.cat([tensors.pop(name).reshape(-1) for name in group.sizes])  # [P]
    return flat, tensors


def _tensor(what: str, array: object, like: Tensor) -> Tensor:
    """
    Raises:
        StateMismatch: the array does not fit.
    """
    if isinstance(array, np.ndarray) and array.dtype == ml_dtypes.bfloat16:
        array = array.astype(np.float32)  # [...] a run with weights_dtype = "bfloat16" rounds them
    if not isinstance(array, np.ndarray):
        raise StateMismatch(f"weights {what} are a {type(array).__name__}, not an array")
    if array.shape != like.shape:
        raise StateMismatch(
            f"weights {what} have shape {array.shape}; expected {tuple(like.shape)}"
        )
    tensor = torch.tensor(array)  # [...] a copy
    if tensor.dtype != like.dtype:
        raise StateMismatch(f"weights {what} are {tensor.dtype}; expected {like.dtype}")
    return tensor.to(like.device)
