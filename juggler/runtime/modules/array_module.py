"""Modules that act on tensors, or on arrays by NumPy or torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from juggler.runtime.modules.acting_part import load_weights, restarted, weights_of
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, OBSERVATIONS, STATES
from juggler.runtime.modules.distributions.base import DistributionSpec
from juggler.runtime.modules.numpy_pass import (
    Array,
    ArrayDistribution,
    LiveWeights,
    NotKnown,
    NumpyPass,
    Use,
    array_distribution,
    as_array,
    as_tensor,
    in_array,
    is_altered,
    numpy_pass,
)
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.tracing import TraceCache
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree

_USES: tuple[Use, ...] = get_args(Use)

#: Maximum difference between results of NumPy and torch, relative and absolute.
_TOLERANCE = 1e-4
#: Consecutive differences after which torch acts. A single rounding may decide between two equal
#: options.
_CHANCES = 2


class ActingStep(NamedTuple):
    """One step of a module for N rows.

    Attributes:
        actions: [N, ...], a tree of arrays.
        inputs: of their distribution [N, D]; None: the module returns no inputs.
        states: after the step, [N, ...]; {}: no states.
    """

    actions: Any
    inputs: Array | None
    states: Any


class TensorModule:
    """A module that acts on tensors, without waiting for their device.

    Args:
        module: put into evaluation mode (no dropout), since its log-probabilities must match the
            learner's.
        rows: number of blank observations with which it is tried.
        device: of the tensors.

    Attributes:
        module: as given.
        draws: whether actions are drawn from the module's distribution; otherwise the module
            returns them.
        distribution: of the actions, if the module returns its inputs; otherwise None.
        blank_inputs: zeros [D], in the shape of its inputs.
        note: a warning for the log; "": none.

    Raises:
        ValueError: the module's outputs do not follow its contract.
    """

    note = ""

    def __init__(self, module: RLModule, rows: int = 1, device: torch.device | None = None) -> None:
        self.module, self.note = module.eval(), module.note
        self.observation_space, self.action_space = module.observation_space, module.action_space
        self._device = device
        self._named = weights_of(module)
        self.begin()
        # The outputs of a pass show what the module returns, and its specs are checked.
        blank: Any = zeros(module.observation_space, (rows,))  # [N, ...]
        observations = tree_map(lambda leaf: as_tensor(leaf).to(device), blank)
        states = tree_map(
            lambda x: x.detach().expand(rows, *x.shape).to(device, copy=True),
            module.get_initial_state(),
        )  # [N, ...]
        with torch.no_grad():
            outputs, _ = self._outputs("exploration", observations, states)
        self.draws = ACTIONS not in outputs
        self.distribution: DistributionSpec | None = None
        self.blank_inputs = np.zeros(0, np.float32)
        if ACTION_DIST_INPUTS in outputs:
            self.distribution = module.action_distribution()
            self.blank_inputs = np.zeros(outputs[ACTION_DIST_INPUTS].shape[1:], np.float32)  # [D]

    def begin(self) -> None:
        """Read the states [1, ...] at episodes' starts, possibly learned."""
        self._initial = tree_map(
            lambda x: x.detach()[None].to(self._device, copy=True), self.module.get_initial_state()
        )

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters and buffers that `load` takes."""
        return self._named.keys()

    def load(self, weights: Tree) -> None:
        """Load weights: arrays by the names of parameters and buffers.

        Raises:
            ValueError: they are for another module.
        """
        load_weights(self._named, weights)
        self.begin()

    def weights(self) -> Mapping[str, Array]:
        """Return the weights by name; views if they are on the host."""
        return {name: tensor.cpu().numpy() for name, tensor in self._named.items()}

    def initial_states(self, rows: int) -> Any:
        """Return states [N, ...] at the start of episodes; {}: no states."""
        return tree_map(lambda start: start.expand(rows, *start.shape[1:]).clone(), self._initial)

    def restarted(self, states: Any, first: Any) -> Any:
        """Replace states [N, ...] by initial ones where an episode starts.

        Args:
            states: a tree.
            first: [N], where an episode starts.
        """
        return restarted(states, self._initial, first)

    def explore(self, observations: Any, states: Any, noise: Any = None) -> ActingStep:
        """Act as in training.

        Args:
            observations: a tree [N, ...].
            states: before the step, [N, ...]; {}: no states.
            noise: [N, M] of the distribution; needed if the module `draws`.
        """
        return self._step("exploration", observations, states, noise)

    def infer(self, observations: Any, states: Any) -> ActingStep:
        """Take the most likely actions."""
        return self._step("inference", observations, states, None)

    def _step(self, use: Use, observations: Any, states: Any, noise: Any) -> ActingStep:
        outputs, after = self._outputs(use, observations, states)
        actions = self._chosen(use, outputs, noise)
        return ActingStep(actions, outputs.get(ACTION_DIST_INPUTS), after)

    def _outputs(self, use: Use, observations: Any, states: Any) -> tuple[dict[str, Any], Any]:
        """Return a pass's outputs [N, ...], and the states after the step."""
        forward = getattr(self.module, f"forward_{use}")
        if not states:
            return forward({OBSERVATIONS: observations}), {}
        # With a state, a pass takes and returns sequences, here of length 1.
        sequences = tree_map(lambda leaf: leaf.unsqueeze(1), observations)  # [N, 1, ...]
        outputs = forward({OBSERVATIONS: sequences, STATES: states})
        acting = {
            name: tree_map(lambda leaf: leaf.squeeze(1), outputs[name])  # [N, ...]
            for name in (ACTIONS, ACTION_DIST_INPUTS)
            if name in outputs
        }
        return acting, outputs[STATES]

    def _chosen(self, use: Use, outputs: Mapping[str, Any], noise: Any) -> Any:
        """Return the actions [N, ...] of the module or its distribution."""
        if ACTIONS in outputs:
            return outputs[ACTIONS]
        spec = self.distribution or self.module.action_distribution()
        distribution = spec(outputs[ACTION_DIST_INPUTS])
        return distribution.mode() if use == "inference" else distribution.sample(noise)


class ArrayModule(TensorModule):
    """An `RLModule` that acts on NumPy arrays, one step at a time.

    Built-in modules act in NumPy, unless they have convolutions. The first observations after the
    module was built, and after 1, 2, 4, 8, … changes of its weights, also go through torch. If two
    consecutive comparisons differ by more than 1e-4, torch acts from then on. Results equal
    torch's up to rounding.

    Other modules act in torch. Its operations are traced, if all code is Juggler's, torch's or
    `may_act_in_numpy`: see `TraceCache`.

    Weights may be loaded or changed in place. Other attributes of the module must not change,
    except `check_specs`.

    Args:
        module: as for `TensorModule`.
        rows: as for `TensorModule`.
        shared: whether the module's weights may be changed in any way, as through `.data`.
    """

    def __init__(self, module: RLModule, rows: int = 1, shared: bool = False) -> None:
        self._shared = shared
        self._changes = self._differences = 0  # changes of weights, consecutive differences
        self._traces = TraceCache() if _may_trace(module) else None
        super().__init__(module, rows)
        if self.distribution is not None:
            self._on_arrays = array_distribution(self.distribution)
        kept: list[Any] = [x for p in module.modules() for x in (p._parameters, p._buffers)]
        # A scripted part stores its tensors elsewhere.
        self._places = [(k, n) for k in kept if isinstance(k, dict) for n in k if k[n] is not None]
        self._make_passes()

    def _make_passes(self) -> None:
        """Make NumPy passes for the module's current tensors."""
        self._memory = self._pointers()
        self._storages = {kept[n].untyped_storage().data_ptr() for kept, n in self._places}
        self._named = weights_of(self.module)
        self._live = LiveWeights(self._shared)
        self._in_numpy: dict[Use, NumpyPass] = {}
        self._unsure = set(_USES)  # passes to compare with torch at the next call
        for use in _USES if self.distribution is not None and not self.module.check_specs else ():
            with suppress(NotKnown):
                self._in_numpy[use] = numpy_pass(self.module, use, self._on_arrays, self._live)

    def _pointers(self) -> list[int]:
        """Return the addresses of the weights."""
        return [kept[name].data_ptr() for kept, name in self._places]

    def begin(self) -> None:
        super().begin()
        self._initial = tree_map(as_array, self._initial)  # [1, ...]

    def initial_states(self, rows: int) -> Any:
        if self._shared:
            self.begin()
        return tree_map(lambda start: np.repeat(start, rows, 0), self._initial)

    @np.errstate(all="ignore")  # as in torch: runners check results
    def _step(self, use: Use, observations: Any, states: Any, noise: Any) -> ActingStep:
        if self._shared and self._pointers() != self._memory:
            self._make_passes()
        in_numpy = self._in_numpy.get(use)
        if in_numpy is None or self.module.check_specs:
            return self._in_torch(use, observations, states, noise)
        # A comparison costs a pass in torch, so comparisons become rarer.
        if self._live.follow():
            self._changes += 1
            if not self._changes & (self._changes - 1):  # a power of two
                self._unsure.update(_USES)
        compares = use in self._unsure
        expected = self._in_torch(use, observations, states, noise) if compares else None
        try:
            inputs, after = in_numpy(observations, states)  # [N, D]
            acted = ActingStep(self._actions(use, inputs, noise), inputs, after)
            if expected is None:
                return acted
            # Actions for the same inputs, since rounding the inputs may change the action.
            same = {ACTION_DIST_INPUTS: as_tensor(inputs)}
            actions = self._torch_actions(use, same, noise)
            differs = _difference(acted, expected._replace(actions=actions))
        except Exception as error:
            differs = f"NumPy fails ({type(error).__name__}: {error})"
        # A failure counts at once, and a difference only if it recurs.
        if expected is None:
            expected = self._in_torch(use, observations, states, noise)  # may raise its own error
        elif not differs:
            self._unsure.discard(use)
            self._differences = 0
            return acted
        self._differences += 1
        if self._differences == _CHANCES or not compares:
            assert self.distribution is not None
            self._in_numpy, self._on_arrays = {}, ArrayDistribution(self.distribution)
            self.note = (
                f"{type(self.module).__name__} acts in torch from now on, since NumPy gave "
                f"other results: {differs}"
            )
        return expected

    def _actions(self, use: Use, inputs: Array, noise: Any) -> Any:
        """Return actions [N, ...] for inputs [N, D], in NumPy."""
        if use == "exploration":
            return self._on_arrays.sample(inputs, noise)
        return self._on_arrays.mode(inputs)

    def _in_torch(self, use: Use, observations: Any, states: Any, noise: Any) -> ActingStep:
        """Make a step in torch, traced if allowed."""
        seen, before = tree_map(as_tensor, observations), tree_map(as_tensor, states)  # [N, ...]
        # Names of inputs tell the traces of both passes apart.
        given = {use: {OBSERVATIONS: seen, STATES: before} if before else {OBSERVATIONS: seen}}
        # Comparisons with NumPy are rare, and checks of specs are no operations.
        if use in self._in_numpy or self.module.check_specs or self._traces is None:
            outputs = self._forward(given)
        else:
            outputs = self._traces(self._forward, given, self._memory)
        found = outputs.get(ACTION_DIST_INPUTS)
        inputs = None if found is None else in_array(found)  # [N, D]
        if use in self._in_numpy or inputs is None or ACTIONS in outputs:
            actions = self._torch_actions(use, outputs, noise)
        else:
            actions = self._actions(use, inputs, noise)
        return ActingStep(actions, inputs, tree_map(in_array, outputs.get(STATES, {})))

    @torch.no_grad()  # which splits composite operations such as dropout
    def _forward(self, inputs: Mapping[Use, Any]) -> dict[str, Any]:
        """Return a pass's outputs as one tree."""
        ((use, given),) = inputs.items()
        outputs, after = self._outputs(use, given[OBSERVATIONS], given.get(STATES))
        names = [name for name in (ACTION_DIST_INPUTS, ACTIONS) if name in outputs]
        found: dict[str, Any] = {name: outputs[name] for name in names}
        if after:
            found[STATES] = after
        apart: dict[str, Any] = tree_map(self._apart_from_weights, found)
        return apart

    def _apart_from_weights(self, x: Tensor) -> Tensor:
        """Return a tensor [...] whose memory does not change with the weights."""
        return x.clone() if x.untyped_storage().data_ptr() in self._storages else x

    def _torch_actions(self, use: Use, outputs: Mapping[str, Any], noise: Any) -> Any:
        """Return the actions of the module or its distribution: arrays [N, ...]."""
        with torch.inference_mode():
            noise = None if noise is None else as_tensor(noise)  # [N, M]
            return tree_map(as_array, self._chosen(use, outputs, noise))


def _difference(acted: ActingStep, expected: ActingStep) -> str:
    """Describe the difference of a NumPy step from torch's; "": none.

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


def _may_trace(module: nn.Module) -> bool:
    """Return whether all code is Juggler's, torch's or `may_act_in_numpy`.

    Other code may read more than its inputs.
    """
    if getattr(module, "may_act_in_numpy", False):
        return True
    home = type(module).__module__
    own = not home.startswith(("juggler.", "torch.nn.modules.")) or is_altered(module)
    return not own and all(map(_may_trace, module.children()))
