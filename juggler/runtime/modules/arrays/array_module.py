"""A module that acts on arrays: in NumPy where it can, else in torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from juggler.runtime.modules.arrays.comparing import difference
from juggler.runtime.modules.arrays.distributions import array_distribution
from juggler.runtime.modules.arrays.live import LiveArrays, NotKnown, as_array, as_tensor
from juggler.runtime.modules.arrays.tracing import ArrayPass, array_pass, may_act_in_numpy
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, OBSERVATIONS, STATES
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.modules.stepping import (
    best_actions,
    initial_states,
    load_weights,
    one_step,
    weights_of,
)
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree

Use = Literal["exploration", "inference"]
_USES: tuple[Use, ...] = get_args(Use)

# Roundings may decide between two options that are equally good, but not twice in a row.
_CHANCES = 2


class ActingStep(NamedTuple):
    """One step of a module for N rows.

    Attributes:
        actions: [N, ...], a tree of arrays.
        inputs: of their distribution [N, D]; None: the module does not say.
        states: after the step, [N, ...]; {}: it has none.
    """

    actions: Any
    inputs: NDArray[Any] | None
    states: Any


class ArrayModule:
    """An `RLModule` that acts on NumPy arrays, one step at a time.

    For a few hundred rows, the overhead of torch takes longer than the arithmetic. So what the
    module does is done in NumPy, if all of its code is Juggler's, torch's or `may_act_in_numpy`,
    each part of it is known there, and there are no convolutions.
    The first observations after the module was built, and after 1, 2, 4, 8, … changes of its
    weights, go through torch as well. If results differ by more than 1e-4 for two such observations
    in a row, torch acts from then on. Results are those of torch up to rounding.

    Weights may be loaded or changed in place. Other attributes of the module have to stay as they
    are, apart from `check_specs`.

    Args:
        module: is put into evaluation mode (no dropout), since its log-probabilities must be those
            of the policy that learns.
        rows: of the blank observations that it is tried with.
        shared: whether others may change the module's weights in any way, as through `.data`.

    Attributes:
        module: as given.
        draws: whether actions are drawn from the module's distribution; else it returns them.
        distribution: of the actions, where the module returns its inputs; else None.
        blank_inputs: zeros [D], in the shape of its inputs.
        note: for people, why torch acts where NumPy was tried; "": it acts, or was not tried.
        differed: whether that is since results differed.

    Raises:
        ValueError: the module's outputs do not follow its contract.
    """

    def __init__(self, module: RLModule, rows: int = 1, shared: bool = False) -> None:
        self.module = module.eval()
        self.note, self.differed = "", False
        self._rows, self._shared = rows, shared
        self._weights = weights_of(module)
        self._differences = 0  # in a row
        self._changes = 0  # of the weights
        self._initial = self._initial_state()  # [1, ...]
        blank: Any = zeros(module.observation_space, (rows,))  # [N, ...]
        outputs = self._torch_outputs("exploration", blank, self.initial_states(rows))
        self._dtypes = {
            name: tree_map(lambda leaf: as_array(leaf).dtype, each)
            for name, each in outputs.items()
        }
        self.draws = ACTIONS not in outputs
        self.distribution = None
        self.blank_inputs = np.zeros(0, np.float32)
        if ACTION_DIST_INPUTS in outputs:
            self.distribution = module.action_distribution()
            self._on_arrays = array_distribution(self.distribution)
            self.blank_inputs = np.zeros(outputs[ACTION_DIST_INPUTS].shape[1:], np.float32)  # [D]
        self._why_torch: dict[Use, str] = {}  # to be said when it acts
        kept = [each for part in module.modules() for each in (part._parameters, part._buffers)]
        # What is scripted keeps them elsewhere, and acts in torch.
        kept = [each for each in kept if isinstance(each, dict)]
        self._places = [(k, name) for k in kept for name in k if k[name] is not None]
        self._take_apart()

    def _take_apart(self) -> None:
        """Make passes in NumPy."""
        self._memory = self._pointers()
        self._weights = weights_of(self.module)
        self._live = LiveArrays(self._shared)
        self._passes = {use: self._pass_in_numpy(use) for use in _USES}
        # Passes that torch makes as well when they are made next.
        self._unsure = set(_USES)

    def _pointers(self) -> list[int]:
        """Where the weights lie."""
        return [kept[name].data_ptr() for kept, name in self._places]  # type: ignore[union-attr]

    def __reduce__(self) -> Any:
        """A copy is built anew: passes in NumPy belong to this very module."""
        return ArrayModule, (self.module, self._rows, self._shared)

    # -- weights and states ---------------------------------------------------------------------

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters and buffers that `load` takes."""
        return self._weights.keys()

    def load(self, weights: Tree) -> None:
        """Load weights: arrays by the names of parameters and buffers.

        Raises:
            ValueError: they are another module's.
        """
        load_weights(self._weights, weights)
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

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """The weights by name, as views."""
        return {name: tensor.numpy() for name, tensor in self._weights.items()}

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
        return self._step("exploration", observations, states, noise)

    def infer(self, observations: Any, states: Any) -> ActingStep:
        """Act as well as the module can, with the most likely actions.

        Args:
            observations: as in `explore`.
            states: as in `explore`.
        """
        return self._step("inference", observations, states, None)

    def _step(self, use: Use, observations: Any, states: Any, noise: Any) -> ActingStep:
        if self._shared and not self.differed and self._pointers() != self._memory:
            self._take_apart()
        in_numpy = self._passes[use]
        if in_numpy is None or self.module.check_specs:
            self.note = self._why_torch.pop(use, self.note)
            return self._in_torch(use, observations, states, noise)
        if self._live.follow():
            self._changes += 1
            if not self._changes & (self._changes - 1):  # a power of two
                self._unsure.update(_USES)
        if use in self._unsure:
            return self._compared(use, in_numpy, observations, states, noise)
        try:
            with np.errstate(all="ignore"):  # torch says nothing, and runners look at results
                return self._in_numpy(use, in_numpy, observations, states, noise)
        except Exception as error:
            failure = _failure(error)
        in_torch = self._in_torch(use, observations, states, noise)  # may raise words of its own
        self._give_up(failure)
        return in_torch

    def _pass_in_numpy(self, use: Use) -> ArrayPass | None:
        """A pass in NumPy, if that is worth it and possible."""
        module = self.module
        convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
        # Torch is to see every batch where specs are checked.
        if convolves or module.check_specs or not may_act_in_numpy(module):
            return None
        try:
            mine = None if self.distribution is None else self._on_arrays
            return array_pass(module, use, self._live, mine)
        except NotKnown as unknown:
            self._why_torch[use] = (
                f"{type(module).__name__} acts in torch, which takes longer than NumPy for small "
                f"networks: {unknown}"
            )
            return None

    def _in_numpy(
        self, use: Use, in_numpy: ArrayPass, observations: Any, states: Any, noise: Any
    ) -> ActingStep:
        if states:
            sequences = tree_map(lambda leaf: leaf[:, None], observations)  # [N, 1, ...]
            outputs = in_numpy.run({OBSERVATIONS: sequences, STATES: states})
            states = self._cast(outputs, STATES)  # [N, ...]
        else:
            outputs = in_numpy.run({OBSERVATIONS: observations})
        inputs: Any = None
        if ACTION_DIST_INPUTS in outputs:
            inputs = self._cast(outputs, ACTION_DIST_INPUTS)  # [N, D] or [N, 1, D]
            inputs = inputs[:, 0] if states else inputs  # [N, D]
        if ACTIONS in outputs:
            actions = self._cast(outputs, ACTIONS)  # [N, ...] or [N, 1, ...]
            actions = tree_map(lambda leaf: leaf[:, 0], actions) if states else actions
        elif use == "exploration":
            actions = self._on_arrays.sample(inputs, noise)  # [N, ...]
        else:
            actions = self._on_arrays.mode(inputs)  # [N, ...]
        return ActingStep(actions, inputs, states)

    def _cast(self, outputs: Mapping[str, Any], name: str) -> Any:
        """An output in the dtypes that torch gives it."""
        value, dtypes = outputs[name], self._dtypes.get(name)
        if dtypes is None:
            return value
        if isinstance(value, np.ndarray):
            return value if value.dtype == dtypes else value.astype(dtypes)
        return tree_map(lambda leaf, dtype: leaf.astype(dtype, copy=False), value, dtypes)

    def _in_torch(self, use: Use, observations: Any, states: Any, noise: Any) -> ActingStep:
        outputs = self._torch_outputs(use, observations, states)
        inputs = outputs.get(ACTION_DIST_INPUTS)  # [N, D]
        return ActingStep(
            self._torch_actions(use, outputs, noise),
            None if inputs is None else as_array(inputs),
            tree_map(as_array, outputs.get(STATES, {})),
        )

    def _torch_actions(self, use: Use, outputs: Mapping[str, Any], noise: Any) -> Any:
        """What the module chooses, or its distribution: arrays [N, ...]."""
        with torch.inference_mode():
            if use == "inference" or ACTIONS in outputs:
                actions = best_actions(self.module, outputs)  # [N, ...]
            else:
                distribution = self.module.action_distribution()(outputs[ACTION_DIST_INPUTS])
                actions = distribution.sample(as_tensor(noise))  # [N, ...]
            return tree_map(as_array, actions)

    def _torch_outputs(self, use: Use, observations: Any, states: Any) -> dict[str, Any]:
        """What the module itself returns: tensors [N, ...], and its states after the step."""
        forward = getattr(self.module, f"forward_{use}")
        with torch.inference_mode():
            tensors = tree_map(as_tensor, observations)  # [N, ...]
            if not states:
                outputs: dict[str, Any] = forward({OBSERVATIONS: tensors})
                return outputs
            outputs, after = one_step(forward, tensors, tree_map(as_tensor, states))
            return {**outputs, STATES: after}

    # -- comparing ------------------------------------------------------------------------------

    def _compared(
        self, use: Use, in_numpy: ArrayPass, observations: Any, states: Any, noise: Any
    ) -> ActingStep:
        """A step in NumPy, or in torch if results differ."""
        expected = self._in_torch(use, observations, states, noise)
        try:
            with np.errstate(all="ignore"):
                acted = self._in_numpy(use, in_numpy, observations, states, noise)
            actions = expected.actions
            if acted.inputs is not None and ACTIONS not in in_numpy.outputs:
                # Those of the same inputs, since a rounding of inputs may be another action.
                inputs = {ACTION_DIST_INPUTS: as_tensor(acted.inputs)}
                actions = self._torch_actions(use, inputs, noise)
            differs = difference(acted._asdict(), {**expected._asdict(), "actions": actions})
            leaves: list[Any] = []
            tree_map(leaves.append, {k: v for k, v in acted._asdict().items() if v is not None})
            if any(map(self._live.lent, leaves)):
                differs = "it returns weights themselves, which change later"
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
        self._passes = dict.fromkeys(self._passes)
        self.differed = True
        self.note = (
            f"{type(self.module).__name__} acts in torch from now on, since NumPy did "
            f"something else: {why}"
        )


def _failure(error: Exception) -> str:
    return f"NumPy fails ({type(error).__name__}: {error})"
