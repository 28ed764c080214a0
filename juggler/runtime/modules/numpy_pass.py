"""Small built-in layers, modules and distributions in NumPy.

For a few rows they take a fraction of torch's time. They are found by exact class, since a
subclass may differ. TD3's module is missing: nearly all of its runs' time is the learner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.modules.distributions.base import (
    DistributionSpec,
    GaussianSpec,
    SquashedGaussianSpec,
    illegal_logit,
)
from juggler.runtime.modules.distributions.for_space import (
    BernoulliSpec,
    CategoricalSpec,
    CompositeSpec,
    MultiCategoricalSpec,
)
from juggler.runtime.modules.encoders import NumberEncoder, OneHotEncoder, TreeEncoder
from juggler.runtime.modules.layers import MLP, DuelingHead, FreeLogStd, Linear, RecurrentCore, Tanh
from juggler.runtime.modules.models import (
    LOG_STD_LIMITS,
    ActorCritic,
    QNetwork,
    SoftActorCritic,
)
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map

Array = NDArray[Any]
Use = Literal["exploration", "inference"]


def as_array(tensor: Tensor) -> Array:
    """Convert a tensor to an array, bfloat16 to float32.

    In inference mode, tensors that share a weight's memory are copied, since weights change.
    """
    return in_array(tensor if tensor.is_inference() else tensor.detach().clone())


def in_array(tensor: Tensor) -> Array:
    """Convert a tensor to an array that shares no weights' memory."""
    array: Array = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def as_tensor(array: Array) -> Tensor:
    """Convert an array to a tensor, copied only if torch must."""
    usable = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array) if usable else torch.tensor(array)


def is_altered(part: nn.Module) -> bool:
    """Return whether calling a part runs more than its class's code."""
    return bool("forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks)


# -- weights ------------------------------------------------------------------------------------


class NotKnown(Exception):
    """A part of a module has no NumPy version."""


class LiveWeights:
    """Arrays that follow in-place changes of a module's weights.

    Views share their memory. Transposed copies, with which NumPy multiplies in half the time, are
    refreshed when torch reports that a tensor was written to.

    Args:
        shared: whether copies are refreshed each time, since torch does not report writes through
            `.data`.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._tensors: dict[int, Tensor] = {}  # by id
        self._transposed: list[tuple[Array, Array]] = []  # copy and view
        self._version = 0

    def view(self, tensor: Tensor) -> Array:
        """Return the array [...] of a tensor [...].

        Raises:
            NotKnown: its dtype is not float32 or int64, or it is not on the CPU.
        """
        usual = tensor.dtype in (torch.float32, torch.int64) and tensor.device.type == "cpu"
        if not usual or tensor.is_inference():  # inference tensors have no version
            raise NotKnown(f"a tensor is of {tensor.dtype} on {tensor.device}")
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor
            self._version += tensor._version
        return tensor.detach().numpy()

    def transposed(self, tensor: Tensor) -> Array:
        """Return a matrix [a, b] as a contiguous array [b, a].

        Raises:
            NotKnown: as for `view`.
        """
        view = self.view(tensor).T
        copy = np.ascontiguousarray(view)
        self._transposed.append((copy, view))
        return copy

    def follow(self) -> bool:
        """Refresh copies; return whether a tensor was written since the last call."""
        version = sum(map(_version_of, self._tensors.values()))
        changed: bool = version != self._version
        self._version = version
        if changed or self._shared:
            for copy, view in self._transposed:
                np.copyto(copy, view)
        return changed


_version_of = attrgetter("_version")


# -- layers -------------------------------------------------------------------------------------

#: Maps arrays [N, ...], for an encoder a tree of them, to [N, F].
_Layer = Callable[[Any], Array]


def _layer(part: nn.Module, live: LiveWeights) -> _Layer:
    """Return a layer in NumPy.

    Raises:
        NotKnown: there is no NumPy version.
    """
    make = _LAYERS.get(type(part))
    if make is None or is_altered(part):
        raise NotKnown(type(part).__name__)
    return make(part, live)


def _linear(layer: nn.Linear, live: LiveWeights) -> _Layer:
    weights = live.transposed(layer.weight)  # [F, H]
    bias = 0 if layer.bias is None else live.view(layer.bias)  # [H]

    def run(x: Array) -> Array:
        y: Array = x @ weights  # [N, H]
        y += bias
        return y

    return run


def _layer_norm(layer: nn.LayerNorm, live: LiveWeights) -> _Layer:
    if len(layer.normalized_shape) != 1 or layer.weight is None or layer.bias is None:
        raise NotKnown("a LayerNorm of several dimensions, or without weights")
    weight, bias = live.view(layer.weight), live.view(layer.bias)  # [F] both
    size, epsilon = np.float32(layer.normalized_shape[0]), np.float32(layer.eps)

    def run(x: Array) -> Array:
        y: Array = x - np.add.reduce(x, -1, keepdims=True) / size  # [N, F]
        y /= np.sqrt(np.add.reduce(np.square(y), -1, keepdims=True) / size + epsilon)
        y *= weight
        y += bias
        return y

    return run


#: Activations that overwrite their argument.
_IN_PLACE: dict[type[nn.Module], _Layer] = {
    Tanh: lambda x: np.tanh(x, out=x),
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
}


_KEEPING = (*_IN_PLACE, nn.Dropout)


def _sequence(layers: Iterable[nn.Module], live: LiveWeights) -> _Layer:
    steps: list[_Layer] = []
    own = False  # whether x is new memory, to be overwritten
    for layer in layers:
        step = _layer(layer, live)
        steps.append(_IN_PLACE.get(type(layer), step) if own else step)
        own = isinstance(layer, nn.Linear | nn.LayerNorm) or (own and type(layer) in _KEEPING)

    def run(x: Array) -> Array:
        for step in steps:
            x = step(x)  # [N, F]
        return x

    return run


def _mlp(layers: MLP, live: LiveWeights) -> _Layer:
    size, run = layers.inputs, _sequence(layers, live)
    return lambda x: run(np.asarray(x, np.float32).reshape(-1, size))  # [N, H]


def _numbers(layer: NumberEncoder, live: LiveWeights) -> _Layer:
    size, scale = layer.size, layer.scale

    def run(x: Array) -> Array:
        y = x.reshape(-1, size).astype(np.float32)  # [N, F]
        return y if scale is None else np.multiply(y, np.float32(scale), out=y)  # [N, F]

    return run


def _tree(encoder: TreeEncoder, live: LiveWeights) -> _Layer:
    leaves = [
        (path, _layer(e, live)) for path, e in zip(encoder.paths, encoder.encoders, strict=True)
    ]
    layers = None if encoder.layers is None else _layer(encoder.layers, live)

    def run(observations: Any) -> Array:
        features = []  # [N, F] each
        for path, encode in leaves:
            leaf = observations
            for key in path:
                leaf = leaf[key]
            features.append(encode(leaf))
        joined = np.concatenate(features, -1) if len(features) > 1 else features[0]  # [N, F]
        return joined if layers is None else layers(joined)  # [N, H]

    return run


def _free_log_std(head: FreeLogStd, live: LiveWeights) -> _Layer:
    others, log_std = _layer(head.others, live), live.view(head.log_std)  # [M]
    places = None if head.places is None else live.view(head.places)  # [D]

    def run(features: Array) -> Array:
        found = others(features)  # [N, D - M]
        repeated = np.broadcast_to(log_std, (len(found), len(log_std)))  # [N, M]
        inputs = np.concatenate([found, repeated], -1)  # [N, D]
        return inputs if places is None else inputs[:, places]

    return run


def _dueling(head: DuelingHead, live: LiveWeights) -> _Layer:
    value, advantages = _layer(head.value, live), _layer(head.advantages, live)
    actions, shape = np.float32(head.shape[0]), head.shape

    def run(features: Array) -> Array:
        above = advantages(features).reshape(-1, *shape)  # [N, n, K]
        found = value(features)[:, None] + above  # [N, n, K]
        found -= np.add.reduce(above, 1, keepdims=True) / actions
        return found.reshape(len(found), -1)  # [N, n K]

    return run


_LAYERS: dict[type[nn.Module], Callable[[Any, LiveWeights], _Layer]] = {
    Linear: _linear,
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    Tanh: lambda layer, live: np.tanh,
    nn.Tanh: lambda layer, live: np.tanh,
    nn.ReLU: lambda layer, live: lambda x: np.maximum(x, 0),
    nn.Dropout: lambda layer, live: lambda x: x,  # in evaluation
    nn.Sequential: _sequence,
    MLP: _mlp,
    NumberEncoder: _numbers,
    OneHotEncoder: lambda layer, live: layer.of_arrays,
    TreeEncoder: _tree,
    FreeLogStd: _free_log_std,
    DuelingHead: _dueling,
}


def _sigmoid(x: Array) -> Array:
    """Logistic function that neither overflows nor loses small values."""
    far = np.exp(-np.abs(x))
    y: Array = np.where(x < 0, far, np.float32(1))
    y /= far + np.float32(1)
    return y


# -- modules ------------------------------------------------------------------------------------

#: Maps observations [N, ...] and states [N, ...] to inputs [N, D] and the states after the step.
NumpyPass = Callable[[Any, Any], tuple[Array, Any]]


def numpy_pass(
    module: RLModule, use: Use, distribution: ArrayDistribution, live: LiveWeights
) -> NumpyPass:
    """Return a pass of a module in NumPy.

    Raises:
        NotKnown: there is no NumPy version.
    """
    kind = type(module)
    method = getattr(kind, f"_forward_{use}")
    if method is getattr(RLModule, f"_forward_{use}"):
        method = kind._forward
    # A subclass with its own pass computes something else.
    changed = any(
        getattr(kind, n) is not getattr(RLModule, n) for n in (f"forward_{use}", "_guarded")
    )
    if changed or method not in _PASSES or _overrides(kind, method):
        raise NotKnown(kind.__name__)
    inner = _PASSES[method](module, distribution, live)
    if not module._masked:
        return inner

    def masked(observations: Any, states: Any) -> tuple[Array, Any]:
        inputs, states = inner(observations, states)  # [N, D]
        return distribution.mask(inputs, observations[ACTION_MASK]), states

    return masked


def _overrides(kind: type[RLModule], method: Any) -> bool:
    """Return whether a subclass overrides a pass that shipped code calls."""
    above = next(each for each in kind.__mro__ if method in vars(each).values())
    below = kind.__mro__[: kind.__mro__.index(above)]
    passes = {"_forward", "_forward_exploration", "_forward_inference"}
    return any(passes & {*vars(each)} for each in below)


def _remembered(module: Any, live: LiveWeights) -> NumpyPass:
    """Return a pass to features [N, F] and states after the step."""
    encode, core = _layer(module.encoder, live), getattr(module, "core", None)
    if core is None:
        return lambda observations, states: (encode(observations), states)
    if type(core) is not RecurrentCore or is_altered(core) or is_altered(core.layer):
        raise NotKnown(type(core).__name__)
    step = _recurrent(core.layer, live)
    return lambda observations, states: step(encode(observations), states)


def _recurrent(layer: Any, live: LiveWeights) -> Callable[[Array, Any], tuple[Array, Any]]:
    """Return a step of an LSTM or GRU, from features and states."""
    of_inputs, of_hidden = live.transposed(layer.weight_ih_l0), live.transposed(layer.weight_hh_l0)
    bias, hidden_bias = live.view(layer.bias_ih_l0), live.view(layer.bias_hh_l0)  # [4 H] or [3 H]
    size = layer.hidden_size

    def lstm(features: Array, states: Any) -> tuple[Array, Any]:
        x = features @ of_inputs  # [N, 4 H]
        x += bias
        x += hidden_bias
        # torch orders the gates: input, forget, cell, output.
        gates = states["hidden"] @ of_hidden  # [N, 4 H]
        gates += x
        opens = _sigmoid(gates[:, : 2 * size])  # [N, 2 H] the input gate and the forget gate
        cell = opens[:, size:] * states["cell"]  # [N, H]
        cell += opens[:, :size] * np.tanh(gates[:, 2 * size : 3 * size])
        hidden = _sigmoid(gates[:, 3 * size :])  # [N, H]
        hidden *= np.tanh(cell)
        return hidden, {"hidden": hidden, "cell": cell}

    # Its new gate is the only one that sees the reset hidden state.
    def gru(features: Array, states: Any) -> tuple[Array, Any]:
        x, before = features @ of_inputs, states["hidden"]  # [N, 3 H] and [N, H]
        x += bias
        gates = before @ of_hidden  # [N, 3 H]
        gates += hidden_bias
        opens = _sigmoid(x[:, : 2 * size] + gates[:, : 2 * size])  # [N, 2 H] reset and update
        new = np.tanh(x[:, 2 * size :] + opens[:, :size] * gates[:, 2 * size :])  # [N, H]
        hidden = new + opens[:, size:] * (before - new)  # [N, H]
        return hidden, {"hidden": hidden}

    return gru if isinstance(layer, nn.GRU) else lstm


def _actor_critic(module: Any, _: Any, live: LiveWeights) -> NumpyPass:
    remember, head = _remembered(module, live), _layer(module.policy_head, live)

    def run(observations: Any, states: Any) -> tuple[Array, Any]:
        features, states = remember(observations, states)  # [N, F]
        return head(features), states

    return run


def _soft(module: SoftActorCritic, distribution: Any, live: LiveWeights) -> NumpyPass:
    act: NumpyPass = _actor_critic(module, distribution, live)
    count, (low, high) = module._log_std, LOG_STD_LIMITS

    def run(observations: Any, states: Any) -> tuple[Array, Any]:
        inputs, states = act(observations, states)  # [N, D]
        if count:
            log_std = inputs[:, -count:]  # [N, M]
            np.minimum(np.maximum(log_std, low, out=log_std), high, out=log_std)
        return inputs, states

    return run


def _q_values(module: QNetwork, _: Any, live: LiveWeights) -> NumpyPass:
    remember, normalize = _remembered(module, live), _layer(module.normalize, live)
    head, atoms = _layer(module.value_head, live), module.atoms
    returns = live.view(module.returns) if atoms else None  # [K]

    def run(observations: Any, states: Any) -> tuple[Array, Any]:
        features, states = remember(observations, states)  # [N, F]
        values = head(normalize(features))  # [N, n], or [N, n K]
        if atoms:
            logits = values.reshape(len(values), -1, atoms)  # [N, n, K]
            chances = np.exp(logits - logits.max(-1, keepdims=True))  # [N, n, K]
            chances /= chances.sum(-1, keepdims=True)
            values = (chances * returns).sum(-1)  # [N, n]
        return values, states

    return run


def _epsilon_greedy(
    module: QNetwork, distribution: ArrayDistribution, live: LiveWeights
) -> NumpyPass:
    q_values, masked = _q_values(module, distribution, live), module._masked
    epsilon = live.view(module.epsilon)  # []; or [N, 1], with a state [N, 1, 1]
    epsilon = epsilon.reshape(-1, 1) if epsilon.ndim else epsilon

    def run(observations: Any, states: Any) -> tuple[Array, Any]:
        values, states = q_values(observations, states)  # [N, n]
        any_action: Any = np.float32(1) / np.float32(values.shape[-1])
        # Random actions are drawn among the legal ones only.
        if masked:
            mask = observations[ACTION_MASK]  # [N, n]
            values = distribution.mask(values, mask)
            legal = mask.reshape(values.shape).astype(np.float32)  # [N, n]
            any_action = legal / np.maximum(legal.sum(-1, keepdims=True), 1)  # [N, n]
        shares = np.empty(values.shape)  # [N, n]
        shares[...] = epsilon * any_action
        shares[np.arange(len(shares)), values.argmax(-1)] += (1 - epsilon).reshape(-1)
        return np.log(np.maximum(shares, 1e-8)).astype(np.float32), states

    return run


_PASSES: dict[Any, Callable[[Any, ArrayDistribution, LiveWeights], NumpyPass]] = {
    ActorCritic._forward: _actor_critic,
    QNetwork._forward: _q_values,
    QNetwork._forward_exploration: _epsilon_greedy,
    SoftActorCritic._forward: _soft,
}


# -- distributions ------------------------------------------------------------------------------

_ILLEGAL = np.float32(illegal_logit(torch.float32))


def array_distribution(spec: DistributionSpec) -> ArrayDistribution:
    """Return a distribution on arrays."""
    return _SHIPPED.get(type(spec), ArrayDistribution)(spec)


class ArrayDistribution:
    """The acting part of a distribution on arrays; unknown ones use torch."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec

    def sample(self, inputs: Array, noise: Array) -> Any:
        """Return actions [..., *action shape] for inputs [..., D], noise [..., M]."""
        with torch.inference_mode():
            drawn = self._spec(as_tensor(inputs)).sample(as_tensor(noise))
            return tree_map(as_array, drawn)

    def mode(self, inputs: Array) -> Any:
        """Return the most likely actions [..., *action shape] for inputs [..., D]."""
        with torch.inference_mode():
            return tree_map(as_array, self._spec(as_tensor(inputs)).mode())

    def mask(self, inputs: Array, mask: Any) -> Array:
        """Return inputs [..., D] that give illegal actions no probability."""
        with torch.inference_mode():
            masks = tree_map(as_tensor, mask)
            masked: Array = self._spec.mask(as_tensor(inputs), masks).numpy()
            return masked


class _Discrete(ArrayDistribution):
    def mask(self, inputs: Array, mask: Any) -> Array:
        return np.where(mask.reshape(inputs.shape), inputs, _ILLEGAL)  # [..., D]


class _Categorical(_Discrete):
    def sample(self, inputs: Array, noise: Array) -> Array:
        return self.mode(inputs + noise)  # [...]

    def mode(self, inputs: Array) -> Array:
        best: Array = inputs.argmax(-1)  # [...]
        return best + self._spec.start if self._spec.start else best


class _MultiCategorical(_Discrete):
    def __init__(self, spec: MultiCategoricalSpec) -> None:
        super().__init__(spec)
        start, exists, places = (each.numpy() for each in spec.options_on(torch.device("cpu")))
        self._start, self._exists, self._places = start, exists, places  # [k], [k, n], [k * n]

    def sample(self, inputs: Array, noise: Array) -> Array:
        table = self._table(inputs)  # [..., k, n]
        return self._best(table + noise.reshape(table.shape))  # [..., *action shape]

    def mode(self, inputs: Array) -> Array:
        return self._best(self._table(inputs))  # [..., *action shape]

    def _table(self, inputs: Array) -> Array:
        found = inputs[..., self._places].reshape(*inputs.shape[:-1], *self._exists.shape)
        return np.where(self._exists, found, _ILLEGAL)  # [..., k, n]

    def _best(self, table: Array) -> Array:
        actions: Array = table.argmax(-1) + self._start  # [..., k]
        return actions.reshape(*actions.shape[:-1], *self._spec.action_shape)


class _Bernoulli(_Discrete):
    def sample(self, inputs: Array, noise: Array) -> Array:
        return self._actions(noise < _sigmoid(inputs))  # [..., *action shape]

    def mode(self, inputs: Array) -> Array:
        return self._actions(inputs > 0)  # [..., *action shape]

    def _actions(self, bits: Array) -> Array:
        return bits.astype(np.int8).reshape(*bits.shape[:-1], *self._spec.action_shape)


class _Gaussian(ArrayDistribution):
    def __init__(self, spec: GaussianSpec) -> None:
        super().__init__(spec)
        self._size, self._action_shape = spec.noise_size, spec.action_shape

    def sample(self, inputs: Array, noise: Array) -> Array:
        actions = np.exp(inputs[..., self._size :])  # [..., M]
        actions *= noise
        actions += inputs[..., : self._size]
        return self._fitted(actions)  # [..., *action shape]

    def mode(self, inputs: Array) -> Array:
        return self._fitted(inputs[..., : self._size])  # [..., *action shape]

    def _fitted(self, actions: Array) -> Array:
        return actions.reshape(*actions.shape[:-1], *self._action_shape)


class _SquashedGaussian(_Gaussian):
    def __init__(self, spec: SquashedGaussianSpec) -> None:
        super().__init__(spec)
        self._bounds = [each.numpy() for each in spec.bounds_on(torch.device("cpu"))]  # [M] each

    def _fitted(self, actions: Array) -> Array:
        bounded, low, width, lowest, highest = self._bounds
        squashed = low + width * _sigmoid(2 * actions)  # [..., M]
        np.minimum(np.maximum(squashed, lowest, out=squashed), highest, out=squashed)
        return super()._fitted(np.where(bounded, squashed, actions))


class _Composite(ArrayDistribution):
    def __init__(self, spec: CompositeSpec) -> None:
        super().__init__(spec)
        specs = spec.parts.values()
        inputs = _shares([part.inputs_size for part in specs])
        noise = _shares([part.noise_size for part in specs])
        parts = map(array_distribution, specs)
        self._parts = list(zip(spec.parts, parts, inputs, noise, strict=True))

    def sample(self, inputs: Array, noise: Array) -> dict[str, Any]:
        return {
            key: part.sample(inputs[..., own], noise[..., of_noise])
            for key, part, own, of_noise in self._parts
        }

    def mode(self, inputs: Array) -> dict[str, Any]:
        return {key: part.mode(inputs[..., own]) for key, part, own, _ in self._parts}

    def mask(self, inputs: Array, mask: Any) -> Array:
        masked = inputs.copy()  # [..., D]
        for key, part, own, _ in self._parts:
            if key in mask:
                masked[..., own] = part.mask(inputs[..., own], mask[key])
        return masked


def _shares(sizes: list[int]) -> list[slice]:
    """Return consecutive slices for the parts' numbers."""
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


_SHIPPED: dict[type[DistributionSpec], Callable[[Any], ArrayDistribution]] = {
    CategoricalSpec: _Categorical,
    MultiCategoricalSpec: _MultiCategorical,
    BernoulliSpec: _Bernoulli,
    GaussianSpec: _Gaussian,
    SquashedGaussianSpec: _SquashedGaussian,
    CompositeSpec: _Composite,
}
