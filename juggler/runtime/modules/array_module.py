"""Modules that act on NumPy arrays: in NumPy where it is written, else in torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, OBSERVATIONS, STATES
from juggler.runtime.modules.numpy_pass import (
    Array,
    LiveWeights,
    NotKnown,
    NumpyPass,
    Use,
    array_distribution,
    as_array,
    as_tensor,
    is_altered,
    numpy_pass,
)
from juggler.runtime.modules.rl_module import RLModule
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
        given = {OBSERVATIONS: tree_map(as_tensor, blank)}
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
        self._live = LiveWeights(self._shared)
        self._passes = {use: self._pass(use) for use in _USES}
        self._unsure = set(_USES)  # passes that torch makes as well when they are made next

    def _pass(self, use: Use) -> NumpyPass | None:
        if self.distribution is None or self.module.check_specs:
            return None
        try:
            return numpy_pass(self.module, use, self._on_arrays, self._live)
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
        return tree_map(as_array, initial_states(self.module, 1))  # [1, ...]

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
        given = {OBSERVATIONS: tree_map(as_tensor, observations)}  # [N, ...]
        if states:
            given[STATES] = tree_map(as_tensor, states)
        recordings = None if self._passes[use] or self.module.check_specs else self._recordings
        if recordings is None:
            with torch.inference_mode():
                outputs = self._forward({use: given})
        else:
            with torch.no_grad():  # which takes composite operations apart, such as dropout
                outputs = recordings(self._forward, {use: given}, self._memory)
        found = outputs.get(ACTION_DIST_INPUTS)
        inputs = None if found is None else as_array(found)  # [N, D]
        if recordings is None or inputs is None or ACTIONS in outputs:
            actions = self._torch_actions(use, outputs, noise)
        else:
            actions = self._actions(use, inputs, noise)
        return ActingStep(actions, inputs, tree_map(as_array, outputs.get(STATES, {})))

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
                actions = distribution.sample(as_tensor(noise))  # [N, ...]
            return tree_map(as_array, actions)

    def _compared(
        self, use: Use, in_numpy: NumpyPass, observations: Any, states: Any, noise: Any
    ) -> ActingStep:
        """A step in NumPy, or in torch if results differ."""
        expected = self._in_torch(use, observations, states, noise)
        try:
            inputs, after = in_numpy(observations, states)  # [N, D]
            # Actions of the same inputs, since a rounding of inputs may be another action.
            same = {ACTION_DIST_INPUTS: as_tensor(inputs)}
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
    own = not home.startswith(("juggler.", "torch.nn.modules.")) or is_altered(module)
    return not own and all(map(_may_record, module.children()))
