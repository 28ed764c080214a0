"""Action masks that environments give in their infos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from juggler.envrunner.environments.autoreset import autoreset_mode, final_observation
from juggler.envrunner.environments.legal_actions import LegalActions, other_number
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.connectors.leaves import OBSERVATION, holds_masks
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import from_tree, tree_map, zeros

Space = gymnasium.Space[Any]


def observe_masks(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """A vector of environments whose action masks, if they give any, are in their observations.

    They are reset once, to see whether their infos have some.

    Raises:
        EnvironmentFailed: an environment could not be reset, or its mask does not fit its actions.
    """
    if holds_masks(env.single_observation_space):
        return env
    _, infos = env.reset()
    return ObservedMasks(env, infos) if ACTION_MASK in infos else env


class ObservedMasks(VectorWrapper):
    """Puts the masks in infos["action_mask"] into observations.

    A Dict gets the key "action_mask"; any other observation comes under the key "observation",
    beside it. There must be a mask at every reset, and at every step that does not end an episode.
    The observation after an end has the mask that came with it, or else all ones.

    The mask of a Discrete(n) action is [n]; that of a MultiDiscrete one is [sum(nvec)], or a tuple
    of one for each of its numbers; those of Dict and Tuple actions are dicts and tuples of these,
    where what has no mask is left out, or None.

    Args:
        env: a vector of such environments.
        infos: of a reset of all of them.

    Raises:
        EnvironmentFailed: the masks do not fit the actions.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], infos: dict[str, Any]) -> None:
        super().__init__(env)
        self._plain_space: Space = env.single_observation_space
        self._same_step = autoreset_mode(env) is AutoresetMode.SAME_STEP
        self._everyone = np.ones(env.num_envs, np.bool_)  # [N]
        self._require(infos, self._everyone, "reset")
        try:
            example = masks_of(env.single_action_space, infos[ACTION_MASK], np.arange(1))  # [1, n]
            space = _space_of(example)
            LegalActions(space, env.single_action_space, "")
        except (ValueError, TypeError, LookupError) as error:
            reason = f"the action mask in its info is not one: {error}"
            raise EnvironmentFailed("environment 0", "reset", reason) from error
        self._masks: Any = zeros(space, (env.num_envs,))  # [N, n] each, int8
        self.single_observation_space = spaces.Dict(
            {**self._observed(self._plain_space), ACTION_MASK: space}
        )
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        rows = (options or {}).get("reset_mask", self._everyone)  # [N] taken out by some
        observations, infos = self.env.reset(seed=seed, options=options)
        self._require(infos, rows, "reset")
        self._keep(infos, "reset")
        return self._with(observations, self._masks), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        over = terminated | truncated  # [N]
        self._require(infos, self._everyone if self._same_step else ~over, "step")
        if over.any():
            if self._same_step:
                infos = {**infos, "final_obs": self._finals(infos, truncated & ~terminated)}
            else:
                _fill(self._masks, over, 1)
        self._keep(infos, "step")
        return self._with(observations, self._masks), rewards, terminated, truncated, infos

    def _require(self, infos: dict[str, Any], rows: NDArray[np.bool_], call: str) -> None:
        missing = np.flatnonzero(rows & ~self._given(infos))
        if len(missing):
            reason = "it has given an action mask in its info before, and here it has not"
            raise EnvironmentFailed(f"environment {missing[0]}", call, reason)

    def _given(self, infos: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Which environments gave a mask [N]. A vector that does not say has it of all."""
        given: NDArray[np.bool_] = infos.get(f"_{ACTION_MASK}", self._everyone)
        return given if ACTION_MASK in infos else ~self._everyone

    def _keep(self, infos: dict[str, Any], call: str) -> None:
        """Take over the masks of all environments that gave one."""
        rows = np.flatnonzero(self._given(infos))
        if len(rows):
            _fill(self._masks, rows, self._read(infos, rows, call))

    def _read(self, infos: dict[str, Any], rows: NDArray[np.intp], call: str) -> Any:
        """The masks [k, n] of some environments."""
        masks = masks_of(self.single_action_space, infos[ACTION_MASK], rows)
        if found := other_number(masks):
            (k, *_), what = found
            raise EnvironmentFailed(f"environment {rows[k]}", call, what)
        return masks

    def _finals(self, infos: dict[str, Any], cut: NDArray[np.bool_]) -> NDArray[Any]:
        """The last observations of truncated episodes, each with its mask [N]; else None."""
        finals = np.full(self.num_envs, None, object)
        final_infos = infos.get("final_info", {})
        given = self._given(final_infos)  # [N]
        for row in np.flatnonzero(cut).tolist():
            masks: Any = tree_map(lambda mask: np.ones_like(mask[0]), self._masks)
            if given[row]:
                found = self._read(final_infos, np.array([row]), "step")
                masks = tree_map(lambda mask: mask[0].astype(np.int8), found)
            plain = final_observation(self._plain_space, infos, row)
            finals[row] = self._with(from_tree(self._plain_space, plain), masks)
        return finals

    def _with(self, observations: Any, masks: Any) -> dict[str, Any]:
        return {**self._observed(observations), ACTION_MASK: masks}

    def _observed(self, observations: Any) -> Mapping[str, Any]:
        """Observations, or their space, by keys."""
        if not isinstance(self._plain_space, spaces.Dict):
            return {OBSERVATION: observations}
        by_key: Mapping[str, Any] = getattr(observations, "spaces", observations)
        return by_key


def masks_of(space: Space, given: Any, rows: NDArray[np.intp]) -> Any:
    """What infos say of some rows' actions -> a tree of flat masks [k, n].

    Args:
        space: of one action.
        given: infos["action_mask"] of a vector of environments.
        rows: which of them.
    """
    if isinstance(given, np.ndarray) and given.dtype != object:
        return given[rows].reshape(len(rows), -1)
    each = [_mask(space, given, row) for row in rows]
    return tree_map(lambda *masks: np.stack(masks), *each)


def _mask(space: Space, given: Any, row: int) -> Any:
    """The same of one row; None: no mask.

    Vectors of environments give dicts of arrays [N, ...] where the environments give dicts.
    """
    if not isinstance(given, Mapping):
        return _mask_of(space, given[row])
    children = space.spaces if isinstance(space, spaces.Dict) else {}
    for key in given.keys() - children.keys():
        if not str(key).startswith("_"):  # such keys say who gave what
            raise ValueError(f"there is no action {key!r} in {space}")
    return _branch({key: _mask(children[key], given[key], row) for key in children if key in given})


def _mask_of(space: Space, given: Any) -> Any:
    """What the info of one environment says of its action -> a tree of flat masks [n]; None:
    nothing."""
    if given is None:
        return None
    if isinstance(space, spaces.Dict):
        return _branch({key: _mask_of(space[key], given.get(key)) for key in space.spaces})
    if isinstance(space, spaces.Tuple):
        return _branch({str(i): _mask_of(space[i], given[i]) for i in range(len(space))})
    parts = given if isinstance(given, (tuple, list)) else (given,)
    return np.concatenate([np.ravel(part) for part in parts])  # [n]


def _branch(masks: dict[str, Any]) -> Any:
    return {key: mask for key, mask in masks.items() if mask is not None} or None


def _space_of(masks: Any) -> Space:
    """The space of masks [k, n]."""
    if isinstance(masks, Mapping):
        return spaces.Dict({key: _space_of(branch) for key, branch in masks.items()})
    return spaces.MultiBinary(masks.shape[1])


def _fill(masks: Any, rows: NDArray[Any], new: Any) -> None:
    if isinstance(masks, Mapping):
        for key, branch in masks.items():
            _fill(branch, rows, new[key] if isinstance(new, Mapping) else new)
    else:
        masks[rows] = new
