"""A Gymnasium environment as a world of dm_env_rpc."""

from __future__ import annotations

from typing import Any, Final

import gymnasium
import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.dm_env_rpc.layout import Layout
from juggler.envrunner.dm_env_rpc.tensors import (
    Spec,
    TensorError,
    decode,
    encode,
    in_bounds,
    nearest_to_zero,
)
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from juggler.runtime.wire.flags import as_flag
from juggler.runtime.wire.structures import from_tree, space_leaves, to_tree, tree_map
from juggler.runtime.wire.trees import Path, Tree, unflatten

REWARD: Final = "reward"


class Offer:
    """What an environment offers: the specs of its spaces, and the reward.

    Args:
        env: an environment.

    Raises:
        TensorError, UnsupportedSpace: its spaces cannot be sent.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.actions = Layout.of_space(env.action_space, "action")
        self.observations = Layout.of_space(env.observation_space, "observation")
        layout = self.observations
        reward = Spec.make(len(layout.specs) + 1, REWARD, (), np.dtype(np.float64))
        #: By unique id: where it is in observations, or None for the reward.
        self.shown: dict[int, tuple[Path | None, Spec]] = {reward.uid: (None, reward)}
        for path, spec in zip(layout.paths, layout.specs, strict=True):
            self.shown[spec.uid] = (path, spec)
        if any(spec.name == REWARD for spec in self.observations.specs):
            raise TensorError(f"the observation has a key {REWARD!r}, which is the reward's name")
        self.message = pb.ActionObservationSpecs()
        for spec in self.actions.specs:
            spec.write(self.message.actions[spec.uid])
        for _, spec in self.shown.values():
            spec.write(self.message.observations[spec.uid])


class World:
    """One environment, for one agent at a time.

    Args:
        env: of its own; closed with it.
        offer: of an environment like that.
        seed: for the first reset; None: the environment's own.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], offer: Offer, seed: int | None = None) -> None:
        self._env, self._offer, self._seed = env, offer, seed
        self._over = True  # the next step begins a sequence
        self._interrupted = False  # the next step says so
        self._shown: Tree = {}
        self._reward = 0.0

    def restart(self, seed: int | None = None) -> None:
        """The next step begins a sequence, whatever goes on."""
        self._over, self._interrupted = True, False
        self._seed = self._seed if seed is None else seed

    def interrupt(self, seed: int | None = None) -> None:
        """The next step ends the sequence as interrupted, if one goes on."""
        self._interrupted = not self._over
        self._seed = self._seed if seed is None else seed

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        """
        Raises:
            TensorError: the actions are not what their specs say, or an unknown observation is
                requested. Nothing has happened then.
            Exception: the environment's own. The next step begins a sequence.
        """
        requested = self._requested(request)
        action = None if self._over or self._interrupted else self._action(request)
        state = self._advance(action)
        response = pb.StepResponse(state=state)
        for uid, (path, spec) in requested.items():
            if path is None:
                encode(response.observations[uid], spec, self._reward)
            else:
                encode(response.observations[uid], spec, _at(self._shown, path))
        return response

    def close(self) -> None:
        self._env.close()

    def _advance(self, action: Any) -> pb.EnvironmentStateType:
        if self._interrupted:
            self._interrupted, self._over, self._reward = False, True, 0.0
            return pb.INTERRUPTED
        beginning, self._over = self._over, True  # should the environment raise
        if beginning:
            seed, self._seed = self._seed, None
            shown, _ = self._env.reset(seed=seed)
            terminated = truncated = False
            self._reward = 0.0
        else:
            shown, reward, terminated, truncated, _ = self._env.step(action)
            terminated = as_flag("terminated", terminated)
            truncated = as_flag("truncated", truncated)
            self._reward = float(reward)
        self._shown = to_tree(self._env.observation_space, shown)
        self._over = terminated or truncated
        if terminated:
            return pb.TERMINATED
        return pb.INTERRUPTED if truncated else pb.RUNNING

    def _requested(self, request: pb.StepRequest) -> dict[int, tuple[Path | None, Spec]]:
        """What to show, of all that there is."""
        known = self._offer.shown
        try:
            return {uid: known[uid] for uid in request.requested_observations}
        except KeyError as error:
            raise TensorError(
                f"there is no observation {error}; those of this world are 1 to {len(known)}"
            ) from None

    def _action(self, request: pb.StepRequest) -> Any:
        layout = self._offer.actions
        if unknown := set(request.actions) - {spec.uid for spec in layout.specs}:
            raise TensorError(
                f"there is no action {min(unknown)}; those of this world are 1 to "
                f"{len(layout.specs)}"
            )
        arrays: list[tuple[Path, NDArray[Any]]] = []
        for (path, leaf), spec in zip(space_leaves(layout.space), layout.specs, strict=True):
            array = nearest_to_zero(spec)  # where it is missing: actions are a sparse set
            if spec.uid in request.actions:
                array = decode(request.actions[spec.uid], spec)
                if not in_bounds(array, spec):
                    raise TensorError(f"the action {spec.name!r} is out of its bounds")
            arrays.append((path, array.astype(leaf.dtype)))
        # What is Discrete is a number.
        tree = tree_map(lambda leaf: leaf[()], unflatten(arrays))
        return from_tree(self._env.action_space, tree)


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree
