"""The interface of games that step N environments as arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from juggler.runtime.wire.trees import Tree


class VectorStep(NamedTuple):
    """Results of one step of N environments with A agents each.

    Attributes:
        observations: [N, A, ...] of all agents; ignored for an agent that neither acts next nor
            ends with this step.
        rewards: [N, A] of this step.
        terminated: [N, A] bool, the agents whose episode terminated.
        truncated: [N, A] bool, the agents whose episode was cut off.
        acting: [N, A] bool, the agents that act next: present and on turn. An environment has ended
            when none of its agents acts next.
        infos: numbers [N, A] of this step by name, for the run's metrics; ignored for the same
            agents as observations, and if NaN. As in Gymnasium's vectors, "_NAME" [N, A] bool may
            mark the agents that have a number.
    """

    observations: Tree
    rewards: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    acting: NDArray[np.bool_]
    infos: Mapping[str, NDArray[Any]] = MappingProxyType({})


class MultiAgentVectorEnv(ABC):
    """Base class of N environments with several agents each, stepped together.

    The constructor takes `num_envs`, and the `env_kwargs` of a run. It sets the attributes below.
    The next call may overwrite returned arrays. Observations of Dict and Tuple spaces are dicts of
    arrays, a Tuple's with the keys "0", "1", ….

    Attributes:
        num_envs: N.
        agents: the A names of the agents of one environment.
        observation_space: of one agent; all agents have the same. A Dict may have the key
            "action_mask".
        action_space: of one agent.
        state_space: of `state`; None: there is no state for critics.
        autoreset_mode: DISABLED: `reset` begins the next episode of an environment that has ended.
            NEXT_STEP: the next `step` does, with any actions, and `reset` is only called for all
            environments.
    """

    num_envs: int
    agents: tuple[str, ...]
    observation_space: Space[Any]
    action_space: Space[Any]
    state_space: Space[Any] | None = None
    autoreset_mode: AutoresetMode = AutoresetMode.DISABLED

    @abstractmethod
    def reset(self, seed: int | None, which: NDArray[np.bool_]) -> tuple[Tree, NDArray[np.bool_]]:
        """Begin an episode in some environments.

        Args:
            seed: of the generator that all later episodes are drawn from; None: continue with it.
            which: [N] bool, the environments.

        Returns:
            The observations [N, A, ...] and the agents that act next [N, A] bool, of all
            environments: of environments outside `which`, as the last step returned them.
        """

    @abstractmethod
    def step(self, actions: Any) -> VectorStep:
        """Step all environments.

        Args:
            actions: [N, A, ...], in Gymnasium's form. They are zeros without meaning for agents
                that were not acting.
        """

    def state(self) -> Tree:
        """Return what value functions may see of each environment in training.

        It is called after `reset` and `step` if the run has `critic_sees = "state"`.

        Returns:
            An array [N, ...], or a tree of arrays, that fits `state_space`.
        """
        raise NotImplementedError(f"{type(self).__name__} has a state_space, and no state()")

    def close(self) -> None:  # noqa: B027  # most games have nothing to close
        """Release the resources of the environments."""
