"""Specs, which describe by key what a module's passes take and return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from juggler.runtime.nearest import one_of
from juggler.runtime.wire.trees import Path, path_name

_KINDS = {
    "floating": ("float16", "bfloat16", "float32", "float64"),
    "integer": ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
}

#: Sizes of named dimensions that one check has found so far, and where it found them.
Sizes: TypeAlias = "dict[str, tuple[int, str]]"


class SpecError(ValueError):
    """A value does not match its spec; says at which key, what was expected and what came."""


class TensorSpec:
    """A tensor, or an array, of a certain shape.

        TensorSpec("b, t, h", h=64)

    has three dimensions. The last has size 64; b and t have the same size as every other b and t in
    the same check, which covers the input and the output of one call. A dimension may also be a
    number, as in "b, 64"; "" is the shape of a single number.
    """

    def __init__(
        self,
        shape: str,
        *,
        dtype: torch.dtype | type | np.dtype[Any] | str | None = None,
        framework: Literal["torch", "numpy"] = "torch",
        **sizes: int,
    ) -> None:
        """
        Args:
            shape: names or sizes of the dimensions, separated by commas.
            dtype: a torch or NumPy dtype, or its name; or "floating" or "integer" for any such
                dtype; None: any.
            framework: whether it is a torch tensor or a NumPy array.
            sizes: sizes of named dimensions.

        Raises:
            ValueError: the shape is malformed, or has no dimension with that name.
        """
        self.names = tuple(name.strip() for name in shape.split(",")) if shape.strip() else ()
        for name in self.names:
            if not (name.isidentifier() or name.isdecimal()):
                raise ValueError(f"TensorSpec({shape!r}): {name!r} is neither a name nor a size")
        if unknown := sizes.keys() - set(self.names):
            raise ValueError(f"TensorSpec({shape!r}) has no dimension {sorted(unknown)[0]!r}")
        self.sizes = {name: int(name) for name in self.names if name.isdecimal()} | sizes
        self.dtype = _dtype_name(dtype)
        self.framework = framework

    def check(self, value: object, where: str, sizes: Sizes) -> None:
        """Check a value.

        Raises:
            SpecError: the value does not match.
        """
        if not isinstance(value, torch.Tensor if self.framework == "torch" else np.ndarray):
            raise SpecError(f"{where} must be {self}, but is {_described(value)}")
        dtype = str(value.dtype).removeprefix("torch.")
        right = self.dtype is None or dtype in _KINDS.get(self.dtype, (self.dtype,))
        # Under autocast, a tensor that should be float32 may be bfloat16.
        if isinstance(value, torch.Tensor) and (dtype, self.dtype) == ("bfloat16", "float32"):
            right = torch.is_autocast_enabled(value.device.type)
        if not right or value.ndim != len(self.names):
            raise SpecError(f"{where} must be {self}, but is {_described(value)}")
        for name, size in zip(self.names, value.shape, strict=True):
            fixed = self.sizes.get(name)
            if fixed is not None and size != fixed:
                raise SpecError(f"{where} must be {self}, but is {_described(value)}")
            expected, there = sizes.setdefault(name, (size, where)) if fixed is None else (size, "")
            if size != expected:
                raise SpecError(
                    f"{where} must be {self}, but is {_described(value)}: "
                    f"{name} is {expected} in {there}"
                )

    def __repr__(self) -> str:
        shape = [
            name if name.isdecimal() or name not in self.sizes else f"{name}={self.sizes[name]}"
            for name in self.names
        ]
        return _tensor(self.framework, ", ".join(shape), self.dtype)


class AnyOf:
    """At least one of these keys must be there; each that is there must match its spec."""

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.specs = dict(specs)


class Maybe:
    """A key that may be missing; if it is there, it must match its spec."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec


#: The form of a value: a tensor, an instance of a class, a map with at least these keys, or
#: anything (None). A list holds specs that must all match, and required keys (or paths of keys
#: through nested maps). `Maybe` may only be the value of a key.
Spec: TypeAlias = (
    "TensorSpec | type | Mapping[str, Spec | Maybe] | AnyOf | list[Spec | str | Path] | None"
)


def check(value: object, spec: Spec, what: str, sizes: Sizes | None = None) -> None:
    """Check that a value matches its spec. Keys that the spec does not name are allowed.

    Args:
        value: nested maps with tensors and other things.
        spec: what it must match.
        what: name of the value for the error: "the output of Mine.forward_train".
        sizes: sizes of named dimensions that are already known; those found here are added.

    Raises:
        SpecError: the value does not match.
    """
    _check(value, spec, what, (), {} if sizes is None else sizes)


def _check(value: object, spec: Any, what: str, path: Path, sizes: Sizes) -> None:
    where = f"{path_name(path)} in {what}" if path else what
    if isinstance(spec, TensorSpec):
        spec.check(value, where, sizes)
    elif isinstance(spec, type):
        if not isinstance(value, spec):
            raise SpecError(f"{where} must be of type {spec.__name__}, but is {_described(value)}")
    elif isinstance(spec, list):
        for each in spec:
            nested = isinstance(each, (str, tuple))
            _check(value, _with_key(each) if nested else each, what, path, sizes)
    elif isinstance(spec, AnyOf):
        there = _map(value, where, spec.specs)
        found = {key: each for key, each in spec.specs.items() if key in there}
        if not found:
            raise SpecError(f"{where} must have {_either(spec.specs)}; it has {_keys(there)}")
        _check(value, found, what, path, sizes)
    elif isinstance(spec, Mapping):
        there = _map(value, where, spec)
        for key, each in spec.items():
            if key in there:
                inner = each.spec if isinstance(each, Maybe) else each
                _check(there[key], inner, what, (*path, key), sizes)
            elif not isinstance(each, Maybe):
                wanted = f", {each}" if isinstance(each, TensorSpec) else ""
                raise SpecError(f"{where} must have {key!r}{wanted}; it has {_keys(there)}")
    elif spec is not None:
        raise TypeError(f"a spec of {where} is of type {type(spec).__name__}: see Spec")


def _with_key(key: str | Path) -> Spec:
    """The spec of a map that has something under this key, or path of keys."""
    spec: Spec = None
    for each in reversed((key,) if isinstance(key, str) else key):
        spec = {each: spec}
    return spec


def _map(value: object, where: str, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a map with {_keys(wanted)}, but is {_described(value)}")
    return value


def _either(specs: Mapping[str, Any]) -> str:
    return one_of(
        f"{key!r}, {spec}" if isinstance(spec, TensorSpec) else repr(key)
        for key, spec in specs.items()
    )


def _keys(there: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in there) or "nothing"


def _dtype_name(dtype: Any) -> str | None:
    if dtype is None:
        return None
    if isinstance(dtype, str) and dtype in _KINDS:
        return dtype
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    return str(np.dtype(dtype))


def _described(value: object) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        framework = "torch" if isinstance(value, torch.Tensor) else "numpy"
        shape = ", ".join(map(str, value.shape))
        return _tensor(framework, shape, str(value.dtype).removeprefix("torch."))
    if isinstance(value, Mapping):
        return f"a map with {_keys(value)}"
    return f"of type {type(value).__name__}"


def _tensor(framework: str, shape: str, dtype: str | None) -> str:
    noun = "tensor" if framework == "torch" else "NumPy array"
    return f"a {noun} [{shape}]" + (f" of dtype {dtype}" if dtype else "")
