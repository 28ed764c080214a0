"""Action masks: their checks, and their way from infos into observations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from juggler.envrunner.environments.autoreset import autoreset_mode, last_observation
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.connectors.leaves import OBSERVATION, at, holds_masks, observed_leaves
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import (
    OutsideSpace,
    choices_of,
    find_outside,
    from_tree,
    put,
    space_leaves,
    tree_map,
    zeros,
)
from juggler.runtime.wire.trees import Path, Tree, flatten, path_name


class LegalActions:
    """Checks action masks of Discrete and MultiDiscrete actions.

    Raises:
        ValueError: the masks do not fit the actions.
    """

    def __init__(self, mask_space: Space[Any], action_space: Space[Any]) -> None:
        actions = dict(space_leaves(action_space))
        self._starts: dict[Path, NDArray[np.intp]] = {}  # [choices] where each begins in the mask
        for path, mask in space_leaves(mask_space):
            if path not in actions:
                raise ValueError(
                    f"there is an action mask for {path_name(path)}, and no such action: masks "
                    f"must have the structure of the action space, {action_space}"
                )
            # A mask of an action without choices, such as a Box, is not checked here.
            counts = _choices(actions[path])
            if counts is not None:
                if mask.shape != (sum(counts),):
                    raise ValueError(
                        f"the action mask for {actions[path]} has shape {list(mask.shape or ())}, "
                        f"not [{sum(counts)}]: one number, 0 or 1, for each choice"
                    )
                self._starts[path] = np.cumsum([0, *counts[:-1]])

    @classmethod
    def of(cls, observation_space: Space[Any], action_space: Space[Any]) -> LegalActions | None:
        """Build it from an observation space; None if observations hold no mask."""
        if not holds_masks(observation_space):
            return None
        return cls(at(observation_space, (ACTION_MASK,)), action_space)

    def require(
        self, masks: Any, step: int, during: str, over: NDArray[np.bool_] | None = None
    ) -> None:
        """Check that every environment has a legal action.

        Args:
            masks: [N, n] each.
            during: the period in which it counts, such as "a fragment".
            over: [N] environments whose episode has ended, which need no legal action.

        Raises:
            EnvironmentFailed: a mask has no legal action.
        """
        for path, legal in self.has_legal_action(masks):
            if over is not None:
                legal |= over
            if not legal.all():
                which = f" for {path_name(path)}" if path else ""
                raise EnvironmentFailed(
                    f"environment {int(legal.argmin())}",
                    "step",
                    f"before step {step} of {during} its action mask has no legal action"
                    f"{which}: an episode without legal actions must end",
                )

    def has_legal_action(self, masks: Any) -> Iterator[tuple[Path, NDArray[np.bool_]]]:
        """Yield each discrete action's path, and which environments may act [N].

        Args:
            masks: [N, n] each.
        """
        for path, starts in self._starts.items():
            each = np.logical_or.reduceat(at(masks, path), starts, axis=-1)  # [N, choices]
            legal: NDArray[np.bool_] = np.asarray(each.all(-1))  # [N]
            yield path, legal


def find_non_binary(masks: Any) -> tuple[tuple[int, ...], str] | None:
    """Find the first non-binary number in masks [N, ...].

    Returns its index and the text of an error, or None.
    """
    for path, mask in flatten(masks):
        other = (mask != 0) & (mask != 1)  # [N, ...]
        if other.any():
            place = tuple(np.argwhere(other)[0].tolist())
            which = f" for {path_name(path)}" if path else ""
            return place, f"the action mask{which} has other numbers than 0 and 1: {mask[place]}"
    return None


def _choices(space: Space[Any]) -> list[int] | None:
    """Return the number of choices of each discrete action; None: not discrete."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.ravel()]
    return None


class ObservedChoices:
    """Checks observations against Discrete, MultiDiscrete and MultiBinary spaces.

    Args:
        space: of an observation, as batches hold it. Action masks have their own checks.
        during: the period in which errors count steps, such as "a fragment"; "": they name no step.
        name: names a row in errors.
    """

    def __init__(
        self, space: Space[Any], during: str, name: Callable[[int], str] = "environment {}".format
    ) -> None:
        self._choices = choices_of(observed_leaves(space).items())
        self._during, self._name = during, name

    def __bool__(self) -> bool:
        """Return whether there is anything to check."""
        return bool(self._choices)

    def require(self, observations: Tree, place: Callable[..., tuple[int, int]]) -> None:
        """Check observations.

        Args:
            observations: [*leading, ...]
            place: returns the environment and step for a leading index.

        Raises:
            EnvironmentFailed: a number is outside its space.
        """
        if self._choices and (found := find_outside(self._choices, observations)):
            index, what = found
            raise self._failure(*place(*index), what)

    def through(
        self,
        connectors: Callable[[Any], Tree],
        observations: Any,
        place: Callable[[int], tuple[int, int]],
    ) -> Tree:
        """Apply connectors to observations [B, ...], with places as in `require`.

        Raises:
            EnvironmentFailed: a connector found a number outside its space.
        """
        try:
            return connectors(observations)
        except OutsideSpace as error:
            raise self._failure(*place(error.row), error.what) from None

    def _failure(self, row: int, step: int, what: str) -> EnvironmentFailed:
        when = f"before step {step} of {self._during} " if self._during else ""
        return EnvironmentFailed(self._name(row), "step", f"{when}its observation{what}")


def observe_masks(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """Put a vector's action masks, if any, into its observations.

    The environments are reset once to find out whether they have masks, and their device.

    Raises:
        EnvironmentFailed: a reset failed, or a mask does not fit the actions.
    """
    _, infos = env.reset()
    if holds_masks(env.single_observation_space) or ACTION_MASK not in infos:
        return env
    return ObservedMasks(env, infos)


class ObservedMasks(VectorWrapper):
    """Puts the masks in infos["action_mask"] into observations.

    A Dict observation gets the key "action_mask". Any other becomes a Dict with the keys
    "observation" and "action_mask". Every reset must give a mask, and so must every step that does
    not end an episode. The last observation of a truncated episode has the mask that came with it,
    or else all ones. The last observation of a terminated episode has all ones: no action
    follows it, and its mask may be anything.

    The mask of a Discrete(n) action has the shape [n]. The mask of a MultiDiscrete action has the
    shape [sum(nvec)], or is a tuple of one mask for each number. The masks of Dict and Tuple
    actions are dicts and tuples of these; an action without a mask is left out, or None.

    Raises:
        EnvironmentFailed: the masks do not fit the actions.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], infos: dict[str, Any]) -> None:
        super().__init__(env)
        self._plain_space: Space[Any] = env.single_observation_space
        self._same_step = autoreset_mode(env) is AutoresetMode.SAME_STEP
        self._all_rows = np.ones(env.num_envs, np.bool_)  # [N]
        self._require(infos, self._all_rows, "reset")
        try:
            actions = env.single_action_space
            space = mask_space(read_masks(actions, infos[ACTION_MASK], np.arange(1)))  # of [1, n]
            LegalActions(space, actions)
        except (ValueError, TypeError, LookupError) as error:
            reason = f"info['action_mask'] does not fit the action space: {error}"
            raise EnvironmentFailed("environment 0", "reset", reason) from error
        # Filled in each step: a mask is kept until the next one.
        self._masks: Any = zeros(space, (env.num_envs,))  # [N, n] each, int8
        self.single_observation_space = space_with_masks(self._plain_space, space)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        rows = (options or {}).get("reset_mask", self._all_rows)  # [N]; the vector may pop it
        observations, infos = self.env.reset(seed=seed, options=options)
        self._require(infos, rows, "reset")
        self._keep(infos, self._given(infos), "reset")
        return self._with(observations, self._masks), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        over = terminated | truncated  # [N]
        read = self._given(infos)  # [N]
        self._require(infos, self._all_rows if self._same_step else ~over, "step")
        if over.any():
            if self._same_step:
                infos = {**infos, "final_obs": self._finals(infos, over, terminated)}
            else:
                ended = np.flatnonzero(over)  # [E]
                ones = tree_map(lambda mask: np.ones_like(mask[ended]), self._masks)
                put(self._masks, ended, ones)
                read = read & ~terminated
        self._keep(infos, read, "step")
        return self._with(observations, self._masks), rewards, terminated, truncated, infos

    def _require(self, infos: dict[str, Any], rows: NDArray[np.bool_], call: str) -> None:
        missing = np.flatnonzero(rows & ~self._given(infos))
        if len(missing):
            reason = "its info had an action mask before, and here it has none"
            raise EnvironmentFailed(f"environment {missing[0]}", call, reason)

    def _given(self, infos: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Mask of environments that gave action masks [N]; all if unmarked."""
        given: NDArray[np.bool_] = infos.get(f"_{ACTION_MASK}", self._all_rows)
        return given if ACTION_MASK in infos else ~self._all_rows

    def _keep(self, infos: dict[str, Any], given: NDArray[np.bool_], call: str) -> None:
        """Store the masks of the environments in `given` [N]."""
        rows = np.flatnonzero(given)
        if len(rows):
            put(self._masks, rows, self._read(infos, rows, call))

    def _read(self, infos: dict[str, Any], rows: NDArray[np.intp], call: str) -> Any:
        """Read and check the masks [k, n] of some environments."""
        try:
            masks = read_masks(self.single_action_space, infos[ACTION_MASK], rows)
            form: Any = _form(masks)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            form = f"{type(error).__name__}: {error}"
        if form != (due := _form(self._masks)):
            for row in rows if len(rows) > 1 else ():
                self._read(infos, np.array([row]), call)  # names the environment at fault
            reason = f"the action mask in its info has the form {form}, and had {due} before"
            raise EnvironmentFailed(f"environment {rows[0]}", call, reason)
        if found := find_non_binary(masks):
            (k, *_), what = found
            raise EnvironmentFailed(f"environment {rows[k]}", call, what)
        return masks

    def _finals(
        self, infos: dict[str, Any], over: NDArray[np.bool_], terminated: NDArray[np.bool_]
    ) -> NDArray[Any]:
        """Return the last observations of ended episodes [N], with masks.

        None where no episode ended, or where one has terminated and the vector gives no last
        observation that fits.
        """
        finals = np.full(self.num_envs, None, object)
        final_infos = infos.get("final_info", {})
        given = self._given(final_infos)  # [N]
        for row in np.flatnonzero(over).tolist():
            ended = bool(terminated[row])
            plain = last_observation(self._plain_space, infos, row, terminated=ended)
            if plain is None:
                continue
            masks: Any = tree_map(lambda mask: np.ones_like(mask[0]), self._masks)
            if given[row] and not ended:
                found = self._read(final_infos, np.array([row]), "step")
                masks = tree_map(lambda mask: mask[0].astype(np.int8), found)
            finals[row] = self._with(from_tree(self._plain_space, plain), masks)
        return finals

    def _with(self, observations: Any, masks: Any) -> dict[str, Any]:
        return with_masks(self._plain_space, observations, masks)


def space_with_masks(space: Space[Any], masks: Space[Any]) -> spaces.Dict:
    """Return the space of observations with action masks."""
    parts = space.spaces if isinstance(space, spaces.Dict) else {OBSERVATION: space}
    return spaces.Dict({**parts, ACTION_MASK: masks})


def with_masks(space: Space[Any], observations: Any, masks: Any) -> dict[str, Any]:
    """Put action masks into observations of a space without them."""
    # A Tuple's values are dicts in trees, too.
    parts = observations if isinstance(space, spaces.Dict) else {OBSERVATION: observations}
    return {**parts, ACTION_MASK: masks}


def read_masks(space: Space[Any], given: Any, rows: NDArray[np.intp]) -> Any:
    """Read a tree of flat masks [k, n] from infos["action_mask"].

    Args:
        rows: [k] indices of environments.
    """
    if isinstance(given, np.ndarray) and given.dtype != object:
        return given[rows].reshape(len(rows), -1)
    each = [_mask(space, given, row) for row in rows]
    return tree_map(lambda *masks: np.stack(masks), *each)


def _mask(space: Space[Any], given: Any, row: int) -> Any:
    """Read the masks of one environment; None: no mask.

    If environments give dicts, their vector gives dicts of arrays [N, ...].
    """
    if not isinstance(given, Mapping):
        return flat_mask(space, given[row])
    children = space.spaces if isinstance(space, spaces.Dict) else {}
    for key in given.keys() - children.keys():
        if not str(key).startswith("_"):  # keys with "_" mark the environments that gave one
            raise ValueError(f"there is no action {key!r} in {space}")
    return _branch({key: _mask(children[key], given[key], row) for key in children if key in given})


def flat_mask(space: Space[Any], given: Any) -> Any:
    """Flatten the mask in an info.

    Returns:
        A tree of masks [n]; None: no mask.
    """
    if given is None:
        return None
    if isinstance(space, spaces.Dict):
        return _branch({key: flat_mask(space[key], given.get(key)) for key in space.spaces})
    if isinstance(space, spaces.Tuple):
        return _branch({str(i): flat_mask(space[i], given[i]) for i in range(len(space))})
    parts = given if isinstance(given, (tuple, list)) else (given,)
    return np.concatenate([np.ravel(part) for part in parts])  # [n]


def _branch(masks: dict[str, Any]) -> Any:
    return {key: mask for key, mask in masks.items() if mask is not None} or None


def mask_space(masks: Any) -> Space[Any]:
    """Return the space of flat masks [..., n] in a tree."""
    if isinstance(masks, Mapping):
        return spaces.Dict({key: mask_space(branch) for key, branch in masks.items()})
    return spaces.MultiBinary(masks.shape[-1])


def _form(masks: Any) -> Any:
    """Return the shape of one mask: (n,), or a dict of these."""
    return tree_map(lambda mask: mask.shape[1:], masks)
