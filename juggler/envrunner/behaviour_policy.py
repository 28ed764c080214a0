"""The policy that acts in a runner's environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, OBSERVATIONS
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.trees import Tree


class BehaviourPolicy:
    """A module, its action distribution, and the bounds of the action space.

    For every fragment: `begin`, then `act` once for each step, then `finish`. All noise of a
    fragment is drawn at once, and log-probabilities are computed at once at its end.

    A module that returns "actions" has them used as they are; with "action_dist_inputs" beside
    them, these give their log-probabilities, and without, the log-probability is 0: the policy is
    taken as deterministic. Actions outside a Box's bounds go to the environment clipped, and into
    the episodes as they were chosen: their log-probabilities belong to those.

    Args:
        module: acts in evaluation mode (no dropout), as its log-probabilities must be those of
            the policy that learns.
        rows: N, environments.
        steps: T, steps of a fragment.
        seed: of the noise.

    Raises:
        ValueError: the module's outputs do not fit its spaces.
    """

    def __init__(self, module: RLModule, rows: int, steps: int, seed: int) -> None:
        self._module = module.eval()
        # The module's own memory, under the names that a learner gives: shared ones once.
        self._weights = {
            name: tensor.detach()
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        self._rows, self._steps = rows, steps
        self._generator = torch.Generator()
        self._bounds = _bounds(module.action_space)
        inputs, actions = self._first_outputs()
        if inputs is not None:
            self._distribution = module.action_distribution()
            _expect(ACTION_DIST_INPUTS, inputs, (rows, self._distribution.inputs_size))
        action_shape = module.action_space.shape or ()
        if actions is None:
            action_dtype = self._distribution.action_dtype
        else:
            _expect(ACTIONS, actions, (rows, *action_shape))
            action_dtype = actions.dtype
        self._draws = actions is None
        self._noise: tuple[Tensor, ...] = ()
        # Steps come first here, so that each of them writes one stretch of memory.
        self._actions = torch.zeros((steps, rows, *action_shape), dtype=action_dtype)  # [T, N, ...]
        self._inputs = None if inputs is None else torch.zeros((steps, *inputs.shape))  # [T, N, D]
        self._action_rows = self._actions.unbind(0)  # T x [N, ...]
        self._input_rows = () if self._inputs is None else self._inputs.unbind(0)  # T x [N, D]
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the noise anew."""
        self._generator.manual_seed(seed)

    def load(self, weights: Tree) -> None:
        """Take weights from the network: arrays by the names of the module's parameters and buffers.

        Raises:
            ValueError: they are another module's.
        """
        if not isinstance(weights, Mapping):
            raise ValueError("weights are one array, not arrays by name")
        if odd := weights.keys() ^ self._weights.keys():
            raise ValueError(f"weights are another module's: only one side has {sorted(odd)}")
        for name, mine in self._weights.items():
            tensor = torch.tensor(weights[name])
            if tensor.shape != mine.shape:
                raise ValueError(
                    f"weights are another module's: {name!r} has shape {list(tensor.shape)}, "
                    f"here {list(mine.shape)}"
                )
            mine.copy_(tensor)

    def begin(self) -> None:
        """Start a fragment: draw its noise."""
        if self._draws:
            noise = self._distribution.draw_noise((self._steps, self._rows), self._generator)
            self._noise = noise.unbind(0)  # T x [N, M]

    def act(self, observations: Tensor, step: int) -> NDArray[Any]:
        """Choose the actions of one step of the fragment.

        Args:
            observations: [N, ...].
            step: from 0, in order.

        Returns:
            What the environments get [N, ...]: an array of its own, which they may keep.
        """
        with torch.inference_mode():
            outputs = self._module.forward_exploration({OBSERVATIONS: observations})
            if self._inputs is not None:
                inputs = outputs[ACTION_DIST_INPUTS]  # [N, D]
                self._input_rows[step].copy_(inputs)
            if self._draws:
                actions = self._distribution(inputs).sample(self._noise[step])  # [N, ...]
            else:
                actions = outputs[ACTIONS].clone()  # [N, ...]
            self._action_rows[step].copy_(actions)
            return self._clipped(actions.numpy())

    def finish(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The fragment's actions [N, T, ...] as chosen, and their log-probabilities [N, T]."""
        actions = self._actions.transpose(0, 1).contiguous()  # [N, T, ...]
        if self._inputs is None:
            return actions.numpy(), np.zeros((self._rows, self._steps), np.float32)
        with torch.inference_mode():
            logp = self._distribution(self._inputs).log_prob(self._actions)  # [T, N]
            return actions.numpy(), logp.float().T.contiguous().numpy()

    def act_deterministically(self, observations: NDArray[Any]) -> NDArray[Any]:
        """What the module thinks best [N, ...] for observations [N, ...]; clipped."""
        with torch.inference_mode():
            batch = {OBSERVATIONS: torch.tensor(observations)}  # [N, ...]
            outputs = self._module.forward_inference(batch)
            if ACTIONS in outputs:
                actions = outputs[ACTIONS].clone()  # [N, ...]
            else:
                distribution = self._module.action_distribution()
                actions = distribution(outputs[ACTION_DIST_INPUTS]).mode()  # [N, ...]
            return self._clipped(actions.numpy())

    def _clipped(self, actions: NDArray[Any]) -> NDArray[Any]:
        if self._bounds is None:
            return actions
        low, high = self._bounds
        # In the dtype of the bounds: a float64 bound, rounded to float32, may lie outside itself.
        clipped: NDArray[Any] = np.maximum(actions, low, dtype=low.dtype)  # [N, ...]
        np.minimum(clipped, high, out=clipped)  # [N, ...]
        return clipped

    def _first_outputs(self) -> tuple[Tensor | None, Tensor | None]:
        """What the module returns, from a pass over zeros."""
        space = self._module.observation_space
        zeros = torch.from_numpy(np.zeros((self._rows, *(space.shape or ())), space.dtype))
        with torch.inference_mode():
            outputs = self._module.forward_exploration({OBSERVATIONS: zeros})
        inputs, actions = outputs.get(ACTION_DIST_INPUTS), outputs.get(ACTIONS)
        if inputs is None and actions is None:
            raise ValueError(
                f'{type(self._module).__name__}.forward_exploration must return "{ACTIONS}", '
                f'"{ACTION_DIST_INPUTS}" or both; it returned {sorted(outputs)}'
            )
        return inputs, actions


def _expect(name: str, output: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(output.shape) != shape:
        raise ValueError(f'the module returned "{name}" {list(output.shape)}, not {list(shape)}')


def _bounds(space: gymnasium.Space[Any]) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """What actions are clipped to; None where nothing bounds them."""
    if not isinstance(space, gymnasium.spaces.Box):
        return None
    if not (space.bounded_below.any() or space.bounded_above.any()):
        return None
    return space.low, space.high
