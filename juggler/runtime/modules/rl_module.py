"""RLModule: the interface of a policy and its value function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch

from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTION_MASK,
    ACTIONS,
    CRITIC_OBSERVATIONS,
    OBSERVATIONS,
    STATES,
    VALUES,
)
from juggler.runtime.modules.distributions.base import DistributionSpec
from juggler.runtime.modules.distributions.for_space import distribution_for
from juggler.runtime.modules.import_by_name import found
from juggler.runtime.near_matches import one_of
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.structures import space_leaves, tree_map
from juggler.runtime.wire.trees import Path, path_name, unflatten

_KINDS = {
    "floating": ("float16", "bfloat16", "float32", "float64"),
    "integer": ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
}

#: Sizes of named dimensions found so far in one check, and where.
Sizes: TypeAlias = "dict[str, tuple[int, str]]"


class SpecError(ValueError):
    """A value does not match its spec; the message names its key."""


class TensorSpec:
    """A tensor of a certain shape.

        TensorSpec("b, t, h", h=64)

    has three dimensions. The last has size 64; b and t have the same size as every other b and t in
    the same check, which covers the input and the output of one call. A dimension may also be a
    number, as in "b, 64"; "" is the shape of a single number.

    Args:
        shape: names or sizes of the dimensions, separated by commas.
        dtype: a torch or NumPy dtype, or its name; or "floating" or "integer"; None: any.
        sizes: sizes of named dimensions.

    Raises:
        ValueError: the shape is malformed, or has no dimension with that name.
    """

    def __init__(
        self,
        shape: str,
        *,
        dtype: torch.dtype | type | np.dtype[Any] | str | None = None,
        **sizes: int,
    ) -> None:
        self.names = tuple(name.strip() for name in shape.split(",")) if shape.strip() else ()
        for name in self.names:
            if not (name.isidentifier() or name.isdecimal()):
                raise ValueError(f"TensorSpec({shape!r}): {name!r} is neither a name nor a size")
        if unknown := sizes.keys() - set(self.names):
            raise ValueError(f"TensorSpec({shape!r}) has no dimension {sorted(unknown)[0]!r}")
        self.sizes = {name: int(name) for name in self.names if name.isdecimal()} | sizes
        self.dtype = _dtype_name(dtype)

    def check(self, value: object, where: str, sizes: Sizes) -> None:
        """Check a value.

        Raises:
            SpecError: the value does not match.
        """

        # A function, because most calls need no text.
        def wrong(also: str = "") -> SpecError:
            return SpecError(f"{where} must be {self}, but is {_described(value)}{also}")

        if not isinstance(value, torch.Tensor):
            raise wrong()
        dtype = str(value.dtype).removeprefix("torch.")
        right = self.dtype is None or dtype in _KINDS.get(self.dtype, (self.dtype,))
        # Under autocast, a tensor that should be float32 may be bfloat16.
        if (dtype, self.dtype) == ("bfloat16", "float32"):
            right = torch.is_autocast_enabled(value.device.type)
        if not right or value.ndim != len(self.names):
            raise wrong()
        for name, size in zip(self.names, value.shape, strict=True):
            if size != self.sizes.get(name, size):
                raise wrong()
            if name not in self.sizes:
                expected, there = sizes.setdefault(name, (size, where))
                if size != expected:
                    raise wrong(f": {name} is {expected} in {there}")

    def __repr__(self) -> str:
        shape = [
            name if name.isdecimal() or name not in self.sizes else f"{name}={self.sizes[name]}"
            for name in self.names
        ]
        return _tensor("tensor", ", ".join(shape), self.dtype)


class AnyOf:
    """At least one of several keys, each matching its spec."""

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.specs = dict(specs)


class Maybe:
    """An optional key, whose value must match its spec."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec


#: The form of a value: a tensor, an instance of a class, a map with at least these keys, or
#: anything (None). A list has specs that must all match, and required keys (or paths of keys
#: through nested maps). `Maybe` may only be the value of a key.
Spec: TypeAlias = (
    "TensorSpec | type | Mapping[str, Spec | Maybe] | AnyOf | list[Spec | str | Path] | None"
)


def check(value: object, spec: Any, what: str, sizes: Sizes | None = None, path: Path = ()) -> None:
    """Check that a value matches its spec; unnamed keys are allowed.

    Args:
        value: nested maps with tensors and other things.
        spec: the expected form.
        what: name of the value for the error: "the output of Mine.forward_train".
        sizes: sizes of named dimensions that are already known; those found here are added.
        path: of the value in what is named.

    Raises:
        SpecError: the value does not match.
    """
    sizes = {} if sizes is None else sizes
    where = f"{path_name(path)} in {what}" if path else what
    if isinstance(spec, TensorSpec):
        spec.check(value, where, sizes)
    elif isinstance(spec, type):
        if not isinstance(value, spec):
            raise SpecError(f"{where} must be of type {spec.__name__}, but is {_described(value)}")
    elif isinstance(spec, list):
        for each in spec:
            nested = isinstance(each, (str, tuple))
            check(value, _with_key(each) if nested else each, what, sizes, path)
    elif isinstance(spec, AnyOf):
        # All keys that are present must match, even if one of them would do.
        there = _map(value, where, lambda: one_of(map(repr, spec.specs)))
        found = {key: each for key, each in spec.specs.items() if key in there}
        if not found:
            raise SpecError(f"{where} must have {_either(spec.specs)}; it has {_keys(there)}")
        check(value, found, what, sizes, path)
    elif isinstance(spec, Mapping):
        there = _map(value, where, lambda: _keys(spec))
        # Named sizes are shared by the whole tree, and by input and output of a call.
        for key, each in spec.items():
            if key in there:
                inner = each.spec if isinstance(each, Maybe) else each
                check(there[key], inner, what, sizes, (*path, key))
            elif not isinstance(each, Maybe):
                wanted = f", {each}" if isinstance(each, TensorSpec) else ""
                raise SpecError(f"{where} must have {key!r}{wanted}; it has {_keys(there)}")
    elif spec is not None:
        raise TypeError(f"a spec of {where} is of type {type(spec).__name__}: see Spec")


def _with_key(key: str | Path) -> Spec:
    """Return a map's spec with a spec under this key path."""
    spec: Spec = None
    for each in reversed((key,) if isinstance(key, str) else key):
        spec = {each: spec}
    return spec


def _map(value: object, where: str, wanted: Callable[[], str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a map with {wanted()}, but is {_described(value)}")
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
        noun = "tensor" if isinstance(value, torch.Tensor) else "NumPy array"
        shape = ", ".join(map(str, value.shape))
        return _tensor(noun, shape, str(value.dtype).removeprefix("torch."))
    if isinstance(value, Mapping):
        return f"a map with {_keys(value)}"
    return f"of type {type(value).__name__}"


def _tensor(noun: str, shape: str, dtype: str | None) -> str:
    return f"a {noun} [{shape}]" + (f" of dtype {dtype}" if dtype else "")


def _of_space(
    space: gymnasium.Space[Any], leading: str, dtype: Callable[[gymnasium.Space[Any]], Any]
) -> Any:
    """Return the specs of the leaves of a space, as a tree."""
    leaves = space_leaves(space)
    return unflatten((path, _spec(leading, x.shape or (), dtype(x))) for path, x in leaves)


def _states(state: Mapping[str, Any]) -> dict[str, Spec]:
    if not state:
        return {}
    return {STATES: tree_map(lambda leaf: _spec("b", leaf.shape, leaf.dtype), state)}


def _spec(leading: str, shape: tuple[int, ...], dtype: Any) -> TensorSpec:
    return TensorSpec(", ".join([leading, *map(str, shape)]), dtype=dtype)


#: Columns by name (see `columns`): tensors, or trees of tensors.
Batch = Mapping[str, Any]


class RLModule(torch.nn.Module):
    """A policy as a torch module, with three forward passes.

    Every pass takes a batch with "observations" [B, ...] in the dtype of the observation space.
    For a Dict or Tuple space they are a map, with the keys "0", "1", … for a Tuple. The module
    casts them itself, because bytes are smaller to send than floats. A pass returns
    "action_dist_inputs" [B, D], "actions" [B, ...], or both. A subclass overrides `_forward`, or
    any of the three passes:

        class Linear(RLModule):
            def __init__(self, observation_space, action_space, model_config):
                super().__init__(observation_space, action_space, model_config)
                inputs = observation_space.shape[0]
                self.policy = torch.nn.Linear(inputs, self.action_distribution().inputs_size)
                self.value = torch.nn.Linear(inputs, 1)

            def _forward(self, batch):
                observations = batch["observations"].float()
                return {
                    "action_dist_inputs": self.policy(observations),
                    "values": self.value(observations).squeeze(-1),
                }

    A module with a state (`get_initial_state`) gets and returns a second dimension, time, in every
    pass: "observations" [B, T, ...], with one unbroken stretch of an episode in each row. It also
    gets "states" [B, ...] from before the first step, and returns the states after the last step.

    If the observation space is a Dict with the key "action_mask" (1: legal), illegal actions get no
    probability: "action_dist_inputs" are masked after `_forward`, in all passes.

    Six specs describe inputs and outputs of the passes, and may be overridden. They are checked in
    the first call of each pass, and in every call if `check_specs` is true.

    Two keys of `model_config` apply to every module: "distribution", which makes the
    `DistributionSpec` for the action space, and "squash", which is passed to it if true.

    If a run's key `critic_sees` gives the value function more inputs, `model_config` has the key
    "critic_space", and the batches of `forward_train` also have "critic_observations" [B, ...] of
    that space. A module that computes "values" from them sets `takes_critic_observations`, and
    lists the parts for it in `training_only`: for acting, it has neither the key nor the column.

    Set `may_act_in_numpy` if acting depends only on inputs, parameters and buffers of the module
    and its parts: no Python state, and no random numbers except its distribution's. Then the
    operations of its passes may be traced and repeated. Shipped modules and torch's layers do
    not need it.

    Attributes:
        may_act_in_numpy: see above. A part of a catalog may also have it, for itself and its
            parts.
        takes_critic_observations: whether `forward_train` can compute values from
            "critic_observations".
        critic_space: of "critic_observations"; None: there are none.
        training_only: names of submodules and parameters that only `forward_train` needs. They are
            not sent to EnvRunners.
        note: a warning for the run's log; "": none.
    """

    note: str = ""
    may_act_in_numpy: bool = False
    training_only: tuple[str, ...] = ()
    takes_critic_observations: bool = False

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.model_config = dict(model_config)
        self.critic_space: gymnasium.Space[Any] | None = model_config.get("critic_space")
        spaces = getattr(observation_space, "spaces", {})
        self._masked = isinstance(spaces, Mapping) and ACTION_MASK in spaces
        self._check_specs = False
        self._checked: set[str] = set()
        # Passes that need no wrapper: their specs were checked, and nothing is masked.
        self._bare: set[str] = set()

    @property
    def check_specs(self) -> bool:
        """Whether every call checks specs, not only the first."""
        return self._check_specs

    @check_specs.setter
    def check_specs(self, always: bool) -> None:
        self._check_specs = always
        self._bare.clear()

    def action_distribution(self) -> DistributionSpec:
        """The meaning of "action_dist_inputs"; by default the action space decides."""
        return self._action_distribution

    def get_initial_state(self) -> dict[str, Any]:
        """Return the state at an episode's start, a tree of tensors [...].

        Empty: no state.
        """
        return {}

    def forward_inference(self, batch: Batch) -> dict[str, Any]:
        """Act without exploration, in evaluation and in production."""
        if "inference" in self._bare:
            return self._forward_inference(batch)
        return self._guarded("inference", batch)

    def forward_exploration(self, batch: Batch) -> dict[str, Any]:
        """Act in training, with exploration."""
        if "exploration" in self._bare:
            return self._forward_exploration(batch)
        return self._guarded("exploration", batch)

    def forward_train(self, batch: Batch) -> dict[str, Any]:
        """Compute the inputs of the loss; an actor-critic adds "values" [B]."""
        if "train" in self._bare:
            return self._forward_train(batch)
        return self._guarded("train", batch)

    def forward(self, batch: Batch) -> dict[str, Any]:
        """Call `forward_train`: the name that `torch.func.functional_call` needs."""
        return self.forward_train(batch)

    def input_specs_inference(self) -> Spec:
        """Spec of the input of `forward_inference`; see `specs`."""
        return self._input_spec({OBSERVATIONS: self.observation_space})

    def output_specs_inference(self) -> Spec:
        """Spec of the output of `forward_inference`."""
        return [AnyOf(self._acting_spec()), _states(self.get_initial_state())]

    def input_specs_exploration(self) -> Spec:
        """Spec of the input of `forward_exploration`."""
        return self._input_spec({OBSERVATIONS: self.observation_space})

    def output_specs_exploration(self) -> Spec:
        """Spec of the output of `forward_exploration`."""
        return [AnyOf(self._acting_spec()), _states(self.get_initial_state())]

    def input_specs_train(self) -> Spec:
        """Spec of the input of `forward_train`."""
        observed = {OBSERVATIONS: self.observation_space}
        if self.critic_space is not None:
            observed[CRITIC_OBSERVATIONS] = self.critic_space
        return self._input_spec(observed)

    def output_specs_train(self) -> Spec:
        """Spec of the output of `forward_train`; algorithms check their own needs."""
        outputs = self._acting_spec()
        outputs[VALUES] = _spec(self._leading(), (), "floating")
        optional = {name: Maybe(spec) for name, spec in outputs.items()}
        return {**optional, **_states(self.get_initial_state())}

    def _leading(self) -> str:
        """Return the dimensions in front of every input and output."""
        return "b, t" if self.get_initial_state() else "b"

    def _input_spec(self, observed: Mapping[str, gymnasium.Space[Any]]) -> dict[str, Spec]:
        specs = {
            name: _of_space(each, self._leading(), lambda leaf: leaf.dtype)
            for name, each in observed.items()
        }
        return {**specs, **_states(self.get_initial_state())}

    def _acting_spec(self) -> dict[str, Spec]:
        specs = {ACTIONS: _of_space(self.action_space, self._leading(), lambda _: None)}
        try:
            size = self.action_distribution().inputs_size
        except UnsupportedSpace:
            return specs  # no distribution: the module must choose actions itself
        return {ACTION_DIST_INPUTS: _spec(self._leading(), (size,), "floating"), **specs}

    def _forward_inference(self, batch: Batch) -> dict[str, Any]:
        return self._forward(batch)

    def _forward_exploration(self, batch: Batch) -> dict[str, Any]:
        return self._forward(batch)

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        return self._forward(batch)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        raise NotImplementedError(
            f"{type(self).__name__} must define _forward, or _forward_inference, "
            "_forward_exploration and _forward_train"
        )

    def _guarded(self, use: str, batch: Batch) -> dict[str, Any]:
        """Run a pass with specs checked and actions masked, as needed."""
        checking = self._check_specs or use not in self._checked
        name = f"forward_{use}"
        sizes: Sizes = {}  # shared between input and output
        if checking:
            spec = getattr(self, f"input_specs_{use}")()
            check(batch, spec, f"the input of {type(self).__name__}.{name}", sizes)
        outputs: dict[str, Any] = getattr(self, f"_{name}")(batch)
        if checking:
            spec = getattr(self, f"output_specs_{use}")()
            check(outputs, spec, f"the output of {type(self).__name__}.{name}", sizes)
            self._checked.add(use)
        # After the check, since specs describe what `_forward` returns.
        if self._masked and ACTION_DIST_INPUTS in outputs:
            inputs = outputs[ACTION_DIST_INPUTS]  # [B, D]
            masked = self.action_distribution().mask(inputs, batch[OBSERVATIONS][ACTION_MASK])
            return {**outputs, ACTION_DIST_INPUTS: masked}
        if not (self._masked or self._check_specs):
            self._bare.add(use)
        return outputs

    @cached_property
    def _action_distribution(self) -> DistributionSpec:
        make: Any = self.model_config.get("distribution")
        if isinstance(make, str):
            make = found(make, "distribution")
        options = {"squash": True} if self.model_config.get("squash") else {}
        spec: object = (make or distribution_for)(self.action_space, **options)
        if not isinstance(spec, DistributionSpec):
            raise TypeError(
                f"distribution {self.model_config['distribution']!r} made a "
                f"{type(spec).__name__}: it must make a DistributionSpec"
            )
        return spec
