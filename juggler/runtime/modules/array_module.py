"""Modules that act on NumPy arrays, which takes a fraction of torch's time for a few rows.

Layers, modules and distributions that ship and are small are written in NumPy here, each looked up
by its exact class: a subclass may do something else. All other code acts in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from juggler.runtime.modules.activations import Tanh
from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTION_MASK,
    ACTIONS,
    OBSERVATIONS,
    STATES,
)
from juggler.runtime.modules.deterministic_actor_critic import (
    _SMALLEST_NOISE,
    DeterministicActorCritic,
)
from juggler.runtime.modules.distributions import (
    BernoulliSpec,
    CategoricalSpec,
    ClippedGaussianSpec,
    CompositeSpec,
    DistributionSpec,
    GaussianSpec,
    MultiCategoricalSpec,
    SquashedGaussianSpec,
)
from juggler.runtime.modules.distributions.base import illegal_logit
from juggler.runtime.modules.distributions.gaussian import LARGEST_LOG_STD
from juggler.runtime.modules.dueling import DuelingHead
from juggler.runtime.modules.encoders import Numbers, OneHot, TreeEncoder
from juggler.runtime.modules.heads import FreeLogStd
from juggler.runtime.modules.layers import MLP, Linear
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.q_network import QNetwork
from juggler.runtime.modules.recurrent_cores import RecurrentCore
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.modules.soft_actor_critic import _LOG_STD, SoftActorCritic
from juggler.runtime.modules.stepping import (
    best_actions,
    initial_states,
    load_weights,
    one_step,
    weights_of,
)
from juggler.runtime.recorder import Recordings
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree

Array = NDArray[Any]
Use = Literal["exploration", "inference"]
_USES: tuple[Use, ...] = get_args(Use)

#: Max distance of results in NumPy from those in torch, relative and absolute.
_TOLERANCE = 1e-4
#: Differences in a row after which torch acts. One rounding may decide between two equal options.
_CHANCES = 2


class ActingStep(NamedTuple):
    """One step of a module for N rows.

    Attributes:
        actions: [N, ...], a tree of arrays.
        inputs: of their distribution [N, D]; None: the module returns none.
        states: after the step, [N, ...]; {}: it has none.
    """

    actions: Any
    inputs: Array | None
    states: Any


class ArrayModule:
    """An `RLModule` that acts on NumPy arrays, one step at a time.

    Modules that ship act in NumPy, unless they have convolutions. The first observations after the
    module was built, and after 1, 2, 4, 8, … changes of its weights, go through torch as well. If
    results differ by more than 1e-4 for two such observations in a row, torch acts from then on.
    Results are those of torch up to rounding.

    Where torch acts, its operations are recorded, if all code is Juggler's, torch's or
    `may_act_in_numpy`: see `Recordings`.

    Weights may be loaded or changed in place. Other attributes of the module have to stay as they
    are, apart from `check_specs`.

    Args:
        module: is put into evaluation mode (no dropout), since its log-probabilities must be those
            of the policy that learns.
        rows: of the blank observations that it is tried with.
        shared: whether the module's weights may be changed in any way, as through `.data`.

    Attributes:
        module: as given.
        draws: whether actions are drawn from the module's distribution; else it returns them.
        distribution: of the actions, if the module returns its inputs; else None.
        blank_inputs: zeros [D], in the shape of its inputs.
        note: for the log, why torch acts since results differed; "": there is nothing to report.
        differed: whether results differed.

    Raises:
        ValueError: the module's outputs do not follow its contract.
    """

    note = ""
    differed = False

    def __init__(self, module: RLModule, rows: int = 1, shared: bool = False) -> None:
        self.module = module.eval()
        self._rows, self._shared = rows, shared
        self._changes = self._differences = 0  # of the weights, and in a row
        self._recordings = Recordings() if _may_record(module) else None
        kept: list[Any] = [x for p in module.modules() for x in (p._parameters, p._buffers)]
        # A scripted part keeps them elsewhere.
        self._places = [(k, n) for k in kept if isinstance(k, dict) for n in k if k[n] is not None]
        self._memory = self._pointers()
        self._named = weights_of(module)
        self._initial = self._initial_state()  # [1, ...]
        blank: Any = zeros(module.observation_space, (rows,))  # [N, ...]
        given = {OBSERVATIONS: tree_map(_as_tensor, blank)}
        if self._initial:
            given[STATES] = initial_states(module, rows)
        with torch.inference_mode():
            outputs = self._forward({"exploration": given})
        self.draws = ACTIONS not in outputs
        self.distribution = None
        self.blank_inputs = np.zeros(0, np.float32)
        if ACTION_DIST_INPUTS in outputs:
            self.distribution = module.action_distribution()
            self._on_arrays = array_distribution(self.distribution)
            self.blank_inputs = np.zeros(outputs[ACTION_DIST_INPUTS].shape[1:], np.float32)  # [D]
        self._take_apart()

    def _take_apart(self) -> None:
        """Make passes in NumPy for the module's tensors of now."""
        self._memory = self._pointers()
        self._named = weights_of(self.module)
        self._live = _Weights(self._shared)
        self._passes = {use: self._pass(use) for use in _USES}
        self._unsure = set(_USES)  # passes that torch makes as well when they are made next

    def _pass(self, use: Use) -> _Pass | None:
        if self.distribution is None or self.module.check_specs:
            return None
        try:
            return _numpy_pass(self.module, use, self._on_arrays, self._live)
        except NotKnown:
            return None

    def _pointers(self) -> list[int]:
        """The addresses of the weights."""
        return [kept[name].data_ptr() for kept, name in self._places]

    def __reduce__(self) -> Any:
        """Build a copy from the start: passes in NumPy belong to one module."""
        return ArrayModule, (self.module, self._rows, self._shared)

    # -- weights and states ---------------------------------------------------------------------

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters and buffers that `load` takes."""
        return self._named.keys()

    def load(self, weights: Tree) -> None:
        """Load weights: arrays by the names of parameters and buffers.

        Raises:
            ValueError: they are another module's.
        """
        load_weights(self._named, weights)
        self._initial = self._initial_state()  # it may be learned

    def initial_states(self, rows: int) -> Any:
        """States at the start of episodes [N, ...]; {}: there are none."""
        if self._shared:
            self._initial = self._initial_state()
        return tree_map(lambda start: np.repeat(start, rows, 0), self._initial)

    def restarted(self, states: Any, first: NDArray[np.bool_]) -> Any:
        """States [N, ...], replaced by the initial ones where an episode starts.

        Args:
            states: a tree of arrays.
            first: [N], where an episode starts.
        """
        return tree_map(
            lambda start, state: np.where(first.reshape(-1, *[1] * (state.ndim - 1)), start, state),
            self._initial,
            states,
        )

    def _initial_state(self) -> Any:
        return tree_map(_as_array, initial_states(self.module, 1))  # [1, ...]

    def weights(self) -> Mapping[str, Array]:
        """The weights by name, as views."""
        return {name: tensor.numpy() for name, tensor in self._named.items()}

    # -- acting ---------------------------------------------------------------------------------

    def explore(
        self, observations: Any, states: Any, noise: NDArray[np.float32] | None = None
    ) -> ActingStep:
        """Act as in training.

        Args:
            observations: a tree of arrays [N, ...].
            states: before the step, [N, ...]; {}: the module has none.
            noise: [N, M] of the distribution; needed if the module `draws`.
        """
        with np.errstate(all="ignore"):  # as in torch: runners look at results
            return self._step("exploration", observations, states, noise)

    def infer(self, observations: Any, states: Any) -> ActingStep:
        """Act as well as the module can, with the most likely actions."""
        with np.errstate(all="ignore"):
            return self._step("inference", observations, states, None)

    def _step(self, use: Use, observations: Any, states: Any, noise: Any) -> ActingStep:
        if self._shared and self._pointers() != self._memory:
            self._take_apart()
        in_numpy = self._passes[use]
        if in_numpy is None or self.differed or self.module.check_specs:
            return self._in_torch(use, observations, states, noise)
        if self._live.follow():
            self._changes += 1
            if not self._changes & (self._changes - 1):  # a power of two
                self._unsure.update(_USES)
        if use in self._unsure:
            return self._compared(use, in_numpy, observations, states, noise)
        try:
            inputs, after = in_numpy(observations, states)  # [N, D]
            return ActingStep(self._actions(use, inputs, noise), inputs, after)
        except Exception as error:
            failure = _failure(error)
        in_torch = self._in_torch(use, observations, states, noise)  # may raise its own error
        self._give_up(failure)
        return in_torch

    def _actions(self, use: Use, inputs: Array, noise: Any) -> Any:
        """Actions [N, ...] for inputs [N, D], in NumPy."""
        if use == "exploration":
            return self._on_arrays.sample(inputs, noise)
        return self._on_arrays.mode(inputs)

    def _in_torch(self, use: Use, observations: Any, states: Any, noise: Any) -> ActingStep:
        """A step in torch, recorded if it may be."""
        given = {OBSERVATIONS: tree_map(_as_tensor, observations)}  # [N, ...]
        if states:
            given[STATES] = tree_map(_as_tensor, states)
        recordings = None if self._passes[use] or self.module.check_specs else self._recordings
        if recordings is None:
            with torch.inference_mode():
                outputs = self._forward({use: given})
        else:
            with torch.no_grad():  # which takes composite operations apart, such as dropout
                outputs = recordings(self._forward, {use: given}, self._memory)
        found = outputs.get(ACTION_DIST_INPUTS)
        inputs = None if found is None else _as_array(found)  # [N, D]
        if recordings is None or inputs is None or ACTIONS in outputs:
            actions = self._torch_actions(use, outputs, noise)
        else:
            actions = self._actions(use, inputs, noise)
        return ActingStep(actions, inputs, tree_map(_as_array, outputs.get(STATES, {})))

    def _forward(self, inputs: Mapping[Use, Any]) -> dict[str, Any]:
        """What a pass of the module returns: tensors [N, ...], and its states after the step."""
        ((use, given),) = inputs.items()
        forward = getattr(self.module, f"forward_{use}")
        if STATES in given:
            outputs, after = one_step(forward, given[OBSERVATIONS], given[STATES])
            return {**outputs, STATES: after}
        outputs = forward(given)
        return {name: outputs[name] for name in (ACTION_DIST_INPUTS, ACTIONS) if name in outputs}

    def _torch_actions(self, use: Use, outputs: Mapping[str, Any], noise: Any) -> Any:
        """The actions that the module or its distribution chooses: arrays [N, ...]."""
        with torch.inference_mode():
            if use == "inference" or ACTIONS in outputs:
                actions = best_actions(self.module, outputs)  # [N, ...]
            else:
                distribution = self.module.action_distribution()(outputs[ACTION_DIST_INPUTS])
                actions = distribution.sample(_as_tensor(noise))  # [N, ...]
            return tree_map(_as_array, actions)

    def _compared(
        self, use: Use, in_numpy: _Pass, observations: Any, states: Any, noise: Any
    ) -> ActingStep:
        """A step in NumPy, or in torch if results differ."""
        expected = self._in_torch(use, observations, states, noise)
        try:
            inputs, after = in_numpy(observations, states)  # [N, D]
            # Actions of the same inputs, since a rounding of inputs may be another action.
            same = {ACTION_DIST_INPUTS: _as_tensor(inputs)}
            actions = self._torch_actions(use, same, noise)
            acted = ActingStep(self._actions(use, inputs, noise), inputs, after)
            differs = _difference(acted, expected._replace(actions=actions))
        except Exception as error:
            differs = _failure(error)
        if not differs:
            self._unsure.discard(use)
            self._differences = 0
            return acted
        self._differences += 1
        if self._differences == _CHANCES:
            self._give_up(differs)
        return expected

    def _give_up(self, why: str) -> None:
        self.differed = True
        self.note = (
            f"{type(self.module).__name__} acts in torch from now on, since NumPy did "
            f"something else: {why}"
        )


def _failure(error: Exception) -> str:
    return f"NumPy fails ({type(error).__name__}: {error})"


def _difference(acted: ActingStep, expected: ActingStep) -> str:
    """In what a step in NumPy differs from the same step in torch; "": in nothing.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    found: list[float] = []

    def compare(one: Array, other: Array) -> None:
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ValueError(f"{one.dtype}{list(one.shape)} for {other.dtype}{list(other.shape)}")
        far = ~np.isclose(one, other, _TOLERANCE, _TOLERANCE, equal_nan=True)
        if far.any():
            distances = np.abs(one[far].astype(np.float64) - other[far])
            found.append(float(np.nan_to_num(distances, nan=np.inf).max()))

    with np.errstate(all="ignore"):
        for name, mine, its in zip(acted._fields, acted, expected, strict=True):
            tree_map(compare, mine, its)
            if found:
                return f"its {name} differ by {max(found):.2g}"
    return ""


def _may_record(module: nn.Module) -> bool:
    """Whether all of a module's code is Juggler's, torch's or `may_act_in_numpy`. What other code
    reads besides its inputs is not known."""
    if getattr(module, "may_act_in_numpy", False):
        return True
    home = type(module).__module__
    own = not home.startswith(("juggler.", "torch.nn.modules.")) or _is_altered(module)
    return not own and all(map(_may_record, module.children()))


def _is_altered(part: nn.Module) -> bool:
    return bool("forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks)


def _as_array(tensor: Tensor) -> Array:
    """The array [...] of a tensor [...], in float32 if it is bfloat16, which NumPy has not.

    In inference mode, what shares the memory of a weight is copied, since weights change.
    """
    if not tensor.is_inference():
        tensor = tensor.detach().clone()  # [...]
    array: Array = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def _as_tensor(array: Array) -> Tensor:
    """The tensor [...] of an array [...], a copy only where torch cannot use its memory."""
    usable = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array) if usable else torch.tensor(array)


# -- weights ------------------------------------------------------------------------------------


class NotKnown(Exception):
    """A part of a module is not written in NumPy."""


class _Weights:
    """Arrays of a module's parameters and buffers, which follow every change of them in place.

    Views share their memory. Transposed copies, which NumPy multiplies with in half the time, are
    refreshed where torch says that a tensor was written to.

    Args:
        shared: whether copies are refreshed each time, since torch does not say what is written
            through `.data`.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._tensors: dict[int, Tensor] = {}  # by id
        self._transposed: list[tuple[Array, Array]] = []  # copy and view
        self._version = 0

    def view(self, tensor: Tensor) -> Array:
        """The array [...] of a tensor [...].

        Raises:
            NotKnown: it is of another dtype than float32 and int64, or not on the CPU.
        """
        if tensor.dtype not in (torch.float32, torch.int64) or tensor.device.type != "cpu":
            raise NotKnown(f"a tensor is of {tensor.dtype} on {tensor.device}")
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor
            self._version += tensor._version
        return tensor.detach().numpy()

    def transposed(self, tensor: Tensor) -> Array:
        """A matrix [a, b] as a contiguous array [b, a].

        Raises:
            NotKnown: as `view`.
        """
        view = self.view(tensor).T
        copy = np.ascontiguousarray(view)
        self._transposed.append((copy, view))
        return copy

    def follow(self) -> bool:
        """Bring copies up to date. True: some tensor was written to since the last call."""
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


def _layer(part: nn.Module, live: _Weights) -> _Layer:
    """A layer in NumPy.

    Raises:
        NotKnown: it is not written here.
    """
    make = _LAYERS.get(type(part))
    if make is None or _is_altered(part):
        raise NotKnown(type(part).__name__)
    return make(part, live)


def _linear(layer: nn.Linear, live: _Weights) -> _Layer:
    weights = live.transposed(layer.weight)  # [F, H]
    bias = 0 if layer.bias is None else live.view(layer.bias)  # [H]

    def run(x: Array) -> Array:
        y: Array = x @ weights  # [N, H]
        y += bias
        return y

    return run


def _layer_norm(layer: nn.LayerNorm, live: _Weights) -> _Layer:
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


#: Activations that write over their argument.
_IN_PLACE: dict[type[nn.Module], _Layer] = {
    Tanh: lambda x: np.tanh(x, out=x),
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
}


_KEEPING = (*_IN_PLACE, nn.Dropout)


def _sequence(layers: Iterable[nn.Module], live: _Weights) -> _Layer:
    steps: list[_Layer] = []
    own = False  # whether there is new memory to write into
    for layer in layers:
        step = _layer(layer, live)
        steps.append(_IN_PLACE.get(type(layer), step) if own else step)
        own = isinstance(layer, nn.Linear | nn.LayerNorm) or (own and type(layer) in _KEEPING)

    def run(x: Array) -> Array:
        for step in steps:
            x = step(x)  # [N, F]
        return x

    return run


def _mlp(layers: MLP, live: _Weights) -> _Layer:
    size, run = layers.inputs, _sequence(layers, live)
    return lambda x: run(np.asarray(x, np.float32).reshape(-1, size))  # [N, H]


def _numbers(layer: Numbers, live: _Weights) -> _Layer:
    size, scale = layer.size, layer.scale

    def run(x: Array) -> Array:
        y = x.reshape(-1, size).astype(np.float32)  # [N, F]
        return y if scale is None else np.multiply(y, np.float32(scale), out=y)  # [N, F]

    return run


def _one_hot(layer: OneHot, live: _Weights) -> _Layer:
    first, size, choices = live.view(layer.first), layer.size, layer.choices

    def run(x: Array) -> Array:
        places = x.reshape(-1, choices).astype(np.int64) + first  # [N, k]
        if places.size and places.min() < 0:  # which NumPy counts from the end
            raise ValueError(f"observations hold what is not in {layer.space}")
        ones = np.zeros((len(places), size), np.float32)  # [N, F]
        ones[np.arange(len(places))[:, None], places] = 1
        return ones

    return run


def _tree(encoder: TreeEncoder, live: _Weights) -> _Layer:
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


def _free_log_std(head: FreeLogStd, live: _Weights) -> _Layer:
    others, log_std = _layer(head.others, live), live.view(head.log_std)  # [M]
    places = None if head.places is None else live.view(head.places)  # [D]

    def run(features: Array) -> Array:
        found = others(features)  # [N, D - M]
        repeated = np.broadcast_to(log_std, (len(found), len(log_std)))  # [N, M]
        inputs = np.concatenate([found, repeated], -1)  # [N, D]
        return inputs if places is None else inputs[:, places]

    return run


def _dueling(head: DuelingHead, live: _Weights) -> _Layer:
    value, advantages = _layer(head.value, live), _layer(head.advantages, live)
    actions, shape = np.float32(head.shape[0]), head.shape

    def run(features: Array) -> Array:
        above = advantages(features).reshape(-1, *shape)  # [N, n, K]
        found = value(features)[:, None] + above  # [N, n, K]
        found -= np.add.reduce(above, 1, keepdims=True) / actions
        return found.reshape(len(found), -1)  # [N, n K]

    return run


_LAYERS: dict[type[nn.Module], Callable[[Any, _Weights], _Layer]] = {
    Linear: _linear,
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    Tanh: lambda layer, live: np.tanh,
    nn.Tanh: lambda layer, live: np.tanh,
    nn.ReLU: lambda layer, live: lambda x: np.maximum(x, 0),
    nn.Dropout: lambda layer, live: lambda x: x,  # in evaluation
    nn.Sequential: _sequence,
    MLP: _mlp,
    Numbers: _numbers,
    OneHot: _one_hot,
    TreeEncoder: _tree,
    FreeLogStd: _free_log_std,
    DuelingHead: _dueling,
}


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), which neither overflows nor warns, and keeps what is close to 0."""
    far = np.exp(-np.abs(x))
    y: Array = np.where(x < 0, far, np.float32(1))
    y /= far + np.float32(1)
    return y


# -- modules ------------------------------------------------------------------------------------

#: Maps observations [N, ...] and states [N, ...] to inputs [N, D] and the states after the step.
_Pass = Callable[[Any, Any], tuple[Array, Any]]


def _numpy_pass(
    module: RLModule, use: Use, distribution: ArrayDistribution, live: _Weights
) -> _Pass:
    """A pass of a module in NumPy.

    Raises:
        NotKnown: it is not written here.
    """
    kind = type(module)
    method = getattr(kind, f"_forward_{use}")
    if method is getattr(RLModule, f"_forward_{use}"):
        method = kind._forward
    changed = any(
        getattr(kind, n) is not getattr(RLModule, n) for n in (f"forward_{use}", "_guarded")
    )
    if changed or method not in _PASSES:
        raise NotKnown(kind.__name__)
    inner = _PASSES[method](module, distribution, live)
    if not module._masked:
        return inner

    def masked(observations: Any, states: Any) -> tuple[Array, Any]:
        inputs, states = inner(observations, states)  # [N, D]
        return distribution.mask(inputs, observations[ACTION_MASK]), states

    return masked


def _remembered(module: Any, live: _Weights) -> _Pass:
    """Features [N, F] of observations, and states after the step."""
    encode, core = _layer(module.encoder, live), getattr(module, "core", None)
    if core is None:
        return lambda observations, states: (encode(observations), states)
    if type(core) is not RecurrentCore or _is_altered(core) or _is_altered(core.layer):
        raise NotKnown(type(core).__name__)
    step = (_gru if isinstance(core.layer, nn.GRU) else _lstm)(core.layer, live)
    return lambda observations, states: step(encode(observations), states)


def _lstm(layer: Any, live: _Weights) -> _Pass:
    of_inputs, of_hidden = live.transposed(layer.weight_ih_l0), live.transposed(layer.weight_hh_l0)
    bias, hidden_bias = live.view(layer.bias_ih_l0), live.view(layer.bias_hh_l0)  # [4 H] both
    size = layer.hidden_size

    def run(features: Array, states: Any) -> tuple[Array, Any]:
        x = features @ of_inputs  # [N, 4 H]
        x += bias
        x += hidden_bias
        gates = states["hidden"] @ of_hidden  # [N, 4 H]
        gates += x
        opens = _sigmoid(gates[:, : 2 * size])  # [N, 2 H] the input gate and the forget gate
        cell = opens[:, size:] * states["cell"]  # [N, H]
        cell += opens[:, :size] * np.tanh(gates[:, 2 * size : 3 * size])
        hidden = _sigmoid(gates[:, 3 * size :])  # [N, H]
        hidden *= np.tanh(cell)
        return hidden, {"hidden": hidden, "cell": cell}

    return run


def _gru(layer: Any, live: _Weights) -> _Pass:
    of_inputs, of_hidden = live.transposed(layer.weight_ih_l0), live.transposed(layer.weight_hh_l0)
    bias, hidden_bias = live.view(layer.bias_ih_l0), live.view(layer.bias_hh_l0)  # [3 H] both
    size = layer.hidden_size

    def run(features: Array, states: Any) -> tuple[Array, Any]:
        x, before = features @ of_inputs, states["hidden"]  # [N, 3 H] and [N, H]
        x += bias
        gates = before @ of_hidden  # [N, 3 H]
        gates += hidden_bias
        opens = _sigmoid(x[:, : 2 * size] + gates[:, : 2 * size])  # [N, 2 H] reset and update
        new = np.tanh(x[:, 2 * size :] + opens[:, :size] * gates[:, 2 * size :])  # [N, H]
        hidden = new + opens[:, size:] * (before - new)  # [N, H]
        return hidden, {"hidden": hidden}

    return run


def _actor_critic(module: ActorCritic, _: ArrayDistribution, live: _Weights) -> _Pass:
    remember, head = _remembered(module, live), _layer(module.policy_head, live)

    def run(observations: Any, states: Any) -> tuple[Array, Any]:
        features, states = remember(observations, states)  # [N, F]
        return head(features), states

    return run


def _soft(module: SoftActorCritic, _: ArrayDistribution, live: _Weights) -> _Pass:
    encode, head = _layer(module.encoder, live), _layer(module.policy_head, live)
    count, (low, high) = module._log_std, _LOG_STD

    def run(observations: Any, states: Any) -> tuple[Array, Any]:
        inputs = head(encode(observations))  # [N, D]
        if count:
            log_std = inputs[:, -count:]  # [N, M]
            np.minimum(np.maximum(log_std, low, out=log_std), high, out=log_std)
        return inputs, states

    return run


def _deterministic(module: DeterministicActorCritic, _: ArrayDistribution, live: _Weights) -> _Pass:
    encode, head = _layer(module.encoder, live), _layer(module.policy_head, live)
    noise = live.view(module.exploration_noise)  # [], or [N, 1]

    def run(observations: Any, states: Any) -> tuple[Array, Any]:
        chosen = head(encode(observations))  # [N, M]
        log_noise = np.log(np.maximum(noise, _SMALLEST_NOISE))  # [], or [N, 1]
        return np.concatenate([chosen, np.broadcast_to(log_noise, chosen.shape)], -1), states

    return run


def _q_values(module: QNetwork, _: ArrayDistribution, live: _Weights) -> _Pass:
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


def _epsilon_greedy(module: QNetwork, distribution: ArrayDistribution, live: _Weights) -> _Pass:
    q_values, masked = _q_values(module, distribution, live), module._masked
    epsilon = live.view(module.epsilon)  # []; or [N, 1], with a state [N, 1, 1]
    epsilon = epsilon.reshape(-1, 1) if epsilon.ndim else epsilon

    def run(observations: Any, states: Any) -> tuple[Array, Any]:
        values, states = q_values(observations, states)  # [N, n]
        any_action: Any = np.float32(1) / np.float32(values.shape[-1])
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


_PASSES: dict[Any, Callable[[Any, ArrayDistribution, _Weights], _Pass]] = {
    ActorCritic._forward: _actor_critic,
    QNetwork._forward: _q_values,
    QNetwork._forward_exploration: _epsilon_greedy,
    SoftActorCritic._forward: _soft,
    DeterministicActorCritic._forward: _deterministic,
}


# -- distributions ------------------------------------------------------------------------------

_ILLEGAL = np.float32(illegal_logit(torch.float32))


def array_distribution(spec: DistributionSpec) -> ArrayDistribution:
    """A distribution on arrays."""
    return _SHIPPED.get(type(spec), ArrayDistribution)(spec)


class ArrayDistribution:
    """What acting needs of a distribution, on arrays. One that does not ship goes through torch."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec

    def sample(self, inputs: Array, noise: Array) -> Any:
        """Actions [..., *action shape] for inputs [..., D] and noise [..., M]."""
        with torch.inference_mode():
            drawn = self._spec(_as_tensor(inputs)).sample(_as_tensor(noise))
            return tree_map(_as_array, drawn)

    def mode(self, inputs: Array) -> Any:
        """The most likely actions [..., *action shape] for inputs [..., D]."""
        with torch.inference_mode():
            return tree_map(_as_array, self._spec(_as_tensor(inputs)).mode())

    def mask(self, inputs: Array, mask: Any) -> Array:
        """Inputs [..., D] that give illegal actions no probability."""
        with torch.inference_mode():
            masks = tree_map(_as_tensor, mask)
            masked: Array = self._spec.mask(_as_tensor(inputs), masks).numpy()
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


class _ClippedGaussian(_SquashedGaussian):
    def sample(self, inputs: Array, noise: Array) -> Array:
        _, low, width, lowest, highest = self._bounds
        log_std = inputs[..., self._size :]  # [..., M]
        anywhere = log_std > LARGEST_LOG_STD  # [..., M]
        actions = np.exp(log_std)  # [..., M]
        actions *= noise
        actions *= np.float32(0.5) * width
        actions += self.mode(inputs).reshape(actions.shape)
        if anywhere.any():  # as it is until learning begins
            actions = np.where(anywhere, low + width * _below(noise), actions)
        np.minimum(np.maximum(actions, lowest, out=actions), highest, out=actions)
        return actions.reshape(*actions.shape[:-1], *self._action_shape)


def _below(z: Array) -> Array:
    """P(x < z) for standard normal x, elementwise. NumPy has no error function."""
    chances = [0.5 * math.erfc(each) for each in (z * -math.sqrt(0.5)).ravel().tolist()]
    return np.array(chances, z.dtype).reshape(z.shape)


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
    """Where the numbers of each part are, one part after the other."""
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


_SHIPPED: dict[type[DistributionSpec], Callable[[Any], ArrayDistribution]] = {
    CategoricalSpec: _Categorical,
    MultiCategoricalSpec: _MultiCategorical,
    BernoulliSpec: _Bernoulli,
    GaussianSpec: _Gaussian,
    SquashedGaussianSpec: _SquashedGaussian,
    ClippedGaussianSpec: _ClippedGaussian,
    CompositeSpec: _Composite,
}
