"""Operations of torch in NumPy, with torch's parameters."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from juggler.runtime.modules.arrays.live import NotKnown

Array = NDArray[Any]


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), which neither overflows nor warns, and keeps what is close to 0."""
    far = np.exp(-np.abs(x))
    y: Array = np.where(x < 0, far, np.float32(1))
    y /= far + np.float32(1)
    return y


def layer_norm(
    x: Array,
    normalized_shape: Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    y: Array = x - x.mean(axes, keepdims=True)
    y /= np.sqrt(np.square(y).mean(axes, keepdims=True) + np.float32(eps))
    if weight is not None:
        y *= weight
    if bias is not None:
        y += bias
    return y


def _axis(x: Array, dim: int | None) -> int:
    """The axis of a softmax, which torch chooses where none is given."""
    return int(x.ndim not in (0, 1, 3)) if dim is None else dim


def _softmax(x: Array, dim: int | None = None, *_: Any, **__: Any) -> Array:
    dim = _axis(x, dim)
    y: Array = np.exp(x - x.max(dim, keepdims=True))
    y /= y.sum(dim, keepdims=True)
    return y


def _log_softmax(x: Array, dim: int | None = None, *_: Any, **__: Any) -> Array:
    dim = _axis(x, dim)
    y: Array = x - x.max(dim, keepdims=True)
    y -= np.log(np.exp(y).sum(dim, keepdims=True))
    return y


def _softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    y: Array = np.where(x * beta > threshold, x, np.logaddexp(x * beta, np.float32(0)) / beta)
    return y


def _elu(x: Array, alpha: float = 1.0, inplace: bool = False) -> Array:
    y: Array = np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))
    return y


def _leaky_relu(x: Array, negative_slope: float = 0.01, inplace: bool = False) -> Array:
    return np.where(x > 0, x, negative_slope * x)


def _relu(x: Array, inplace: bool = False) -> Array:
    y: Array = np.maximum(x, 0)
    return y


def _dropout(x: Array, p: float = 0.5, training: bool = True, inplace: bool = False) -> Array:
    if training:
        raise ValueError("dropout has noise of its own")
    return x


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y: Array = x @ weight.T
    return y if bias is None else y + bias


def _clamp(x: Array, min: Any = None, max: Any = None) -> Array:  # as in torch
    return np.clip(x, min, max)


def _flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    start, end = start_dim % x.ndim, end_dim % x.ndim + 1
    return x.reshape(*x.shape[:start], math.prod(x.shape[start:end]), *x.shape[end:])


def _unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    at = dim % x.ndim
    return x.reshape(*x.shape[:at], *sizes, *x.shape[at + 1 :])


def _reshape(x: Array, *shape: Any) -> Array:
    return x.reshape(*shape)


def _expand(x: Array, *sizes: Any) -> Array:
    shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    own = (1,) * (len(shape) - x.ndim) + x.shape
    return np.broadcast_to(x, [mine if n == -1 else n for n, mine in zip(shape, own, strict=True)])


def _squeeze(x: Array, dim: int | None = None) -> Array:
    return x if dim is not None and x.shape[dim] != 1 else x.squeeze(dim)


def _cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    return np.concatenate(tensors, dim)


def _chunk(x: Array, chunks: int, dim: int = 0) -> list[Array]:
    size = -(-x.shape[dim] // chunks)
    return _split(x, size, dim)


def _split(x: Array, sizes: Any, dim: int = 0) -> list[Array]:
    if isinstance(sizes, int):
        return np.split(x, range(sizes, x.shape[dim], sizes), dim)
    return np.split(x, np.cumsum(sizes)[:-1], dim)


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Array, dim: Any = None, keepdim: bool = False) -> Any:
        axes = tuple(dim) if isinstance(dim, list | tuple) else dim
        return function(x, axis=axes, keepdims=keepdim)

    return reduced


def _floating(function: Callable[[Array], Any]) -> Callable[[Array], Any]:
    """A function that makes float32 of integers and bools, as in torch."""
    return lambda x: function(x if x.dtype.kind == "f" else x.astype(np.float32))


def _wide(x: Array) -> Any:
    """The dtype of sums: int64 for integers and bools, as in torch."""
    return x.dtype if x.dtype.kind == "f" else np.int64


def _sum(x: Array, **keys: Any) -> Any:
    return x.sum(dtype=_wide(x), **keys)


def _to(x: Array, *given: Any, **keys: Any) -> Array:
    for each in (*given, *keys.values()):
        if isinstance(each, torch.dtype):
            each = torch.empty((), dtype=each).numpy().dtype
        if isinstance(each, np.ndarray):
            each = each.dtype
        if isinstance(each, np.dtype):
            return x.astype(each, copy=False)
    return x


def _one_hot(x: Array, num_classes: int) -> Array:
    if x.size and x.min() < 0:
        raise ValueError("one_hot takes no negative numbers")
    return np.eye(num_classes, dtype=np.int64)[x]


def _cast(dtype: Any) -> Callable[[Array], Array]:
    return lambda x: np.asarray(x, dtype)


def attribute(x: Any, name: str) -> Any:
    """`x.name`, of a tensor's attributes that an array has as well."""
    return x.dtype if name == "dtype" else getattr(x, name)


ATTRIBUTES = ("shape", "ndim", "dtype", "T")

# Functions of torch, methods of tensors, or both, by their name in torch.
_BY_NAME: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(np, name)
        for name in (
            *("abs", "floor", "logaddexp", "matmul", "maximum", "minimum", "ones_like", "sign"),
            *("square", "where", "zeros_like"),
        )
    },
    **{
        name: _floating(getattr(np, name))
        for name in ("cos", "exp", "expm1", "log", "log1p", "sin", "sqrt", "tanh")
    },
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "pow": np.power,
    "relu": _relu,
    "sigmoid": _floating(sigmoid),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "clamp": _clamp,
    "clip": _clamp,
    "sum": _reduced(_sum),
    "mean": _reduced(np.mean),
    "amax": _reduced(np.max),
    "amin": _reduced(np.min),
    "argmax": _reduced(np.argmax),
    "cumsum": lambda x, dim: x.cumsum(dim, dtype=_wide(x)),
    "flatten": _flatten,
    "unflatten": _unflatten,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "unsqueeze": np.expand_dims,
    "cat": _cat,
    "concat": _cat,
    "stack": lambda tensors, dim=0: np.stack(tensors, dim),
    "chunk": _chunk,
    "split": _split,
    "tensor_split": lambda x, at, dim=0: np.array_split(x, at, dim),
}

_METHODS: dict[str, Callable[..., Any]] = {
    "view": _reshape,
    "view_as": lambda x, other: x.reshape(other.shape),
    "reshape_as": lambda x, other: x.reshape(other.shape),
    "expand": _expand,
    "expand_as": lambda x, other: np.broadcast_to(x, other.shape),
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
    "dim": lambda x: x.ndim,
    "contiguous": np.ascontiguousarray,
    "detach": lambda x: x,
    "to": _to,
    "float": _cast(np.float32),
    "double": _cast(np.float64),
    "int": _cast(np.int32),
    "long": _cast(np.int64),
    "bool": _cast(np.bool_),
}

_FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "layer_norm": layer_norm,
    "dropout": _dropout,
    "relu": _relu,
    "tanh": _floating(np.tanh),
    "sigmoid": _floating(sigmoid),
    "silu": lambda x, inplace=False: x * sigmoid(x),
    "elu": _elu,
    "leaky_relu": _leaky_relu,
    "softplus": _softplus,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "one_hot": _one_hot,
}

_OPERATORS = (
    *("abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "inv", "invert", "le", "lt"),
    *("matmul", "mod", "mul", "ne", "neg", "or_", "pow", "sub", "truediv"),
)

METHODS = {**{name: each for name, each in _BY_NAME.items() if hasattr(Tensor, name)}, **_METHODS}
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(operator, name): getattr(operator, name) for name in _OPERATORS},
    **{getattr(torch, name): each for name, each in _BY_NAME.items() if hasattr(torch, name)},
    **{getattr(functional, name): each for name, each in _FUNCTIONAL.items()},
    getattr: attribute,
}


def found(kind: str, target: Any) -> Callable[..., Any]:
    """The operation in NumPy that a node of a graph stands for.

    Args:
        kind: "call_function" or "call_method".
        target: a function of torch, or the name of a method of tensors.

    Raises:
        NotKnown: there is none.
    """
    if kind == "call_method" and target in METHODS:
        return METHODS[target]
    if kind == "call_function" and target in FUNCTIONS:
        return FUNCTIONS[target]
    raise NotKnown(f"it calls {target if kind == 'call_method' else _name(target)}")


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))
