"""Parameters and buffers from elsewhere, put into those of a group."""

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
    """The parameters [P] and buffers of a group with others in place of some of them.

    Args:
        group: whose they are.
        parameters: [P]
        buffers: by their names in the group.
        weights: the others, name -> array by module id; parameters of float32 may be rounded to
            bfloat16.
        whole: nothing of the group may be lacking.

    Raises:
        StateMismatch: a module has no such weights, or theirs have another shape or dtype.
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
                    f"weights {name!r} of module {module_id!r} are shared with another module, "
                    "which is given other ones"
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
        StateMismatch: it cannot be in the place of the other one.
    """
    if isinstance(array, np.ndarray) and array.dtype == ml_dtypes.bfloat16:
        array = array.astype(np.float32)  # [...] as a run's weights_dtype may have rounded them
    if not isinstance(array, np.ndarray):
        raise StateMismatch(f"weights {what} are no array but {type(array).__name__}")
    if array.shape != like.shape:
        raise StateMismatch(
            f"weights {what} have shape {array.shape}, and its own have {tuple(like.shape)}"
        )
    tensor = torch.tensor(array)  # [...] a copy
    if tensor.dtype != like.dtype:
        raise StateMismatch(f"weights {what} are {tensor.dtype}, and its own are {like.dtype}")
    return tensor.to(like.device)
