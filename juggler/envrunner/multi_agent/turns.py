"""The contract between environments and samplers: turns and actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.runtime.wire.trees import Tree

#: Values of a module's key `critic_sees` other than "observation".
STATE: Final = "state"
ALL_OBSERVATIONS: Final = "all_observations"

#: The name of the only agent of an environment that has no names for agents.
ALONE: Final = ""


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """Agents with equal spaces.

    Attributes:
        agents: their names, in the order of `MultiAgentEnvs.agents`.
        observation_space: of each of them.
        action_space: of each of them.
    """

    agents: tuple[str, ...]
    observation_space: Space[Any]
    action_space: Space[Any]


@dataclass(slots=True)
class GroupTurn:
    """Results of one step for the agents of one group.

    A slot is one agent in one of N environments: its number is environment * A + the agent's index
    in `MultiAgentEnvs.agents`. The reward of an action is the sum of its agent's rewards until the
    agent acts again, or until its episode ends, as in PettingZoo's `last()`. An agent whose episode
    ends before it has acted is in neither list.

    Attributes:
        acting: [B] the slots that act next, in ascending order. An array of another turn is only
            used again for the same slots.
        observations: [B, ...] of these slots; may be the environments' memory, valid until the next
            step.
        first: [B] whether their next action is their first in the episode.
        rewards: [B] float64 of their last actions; where `first`, from before it in the episode,
            which count in returns alone.
        ended: [E] the slots whose episode ended after they had acted, in ascending order. A slot
            may also be among `acting`, in the next episode.
        last_observations: [E, ...] at the end of their episodes.
        last_rewards: [E] float64 of their last actions.
        terminated: [E] their episode terminated; else it was truncated, and the value of the last
            observation counts. An agent with both is terminated.
        idle: [B] the next step only resets their environment: they observe the end of the last
            episode, and their action has no effect. None: no slot is idle.
    """

    acting: NDArray[np.intp]
    observations: Tree
    first: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    ended: NDArray[np.intp]
    last_observations: Tree
    last_rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    idle: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class CriticObservations:
    """What critics see of N environments beyond their agents' observations.

    Attributes:
        now: [N, ...] with the observations of the agents that act next; may be the environments'
            memory, valid until they are stepped.
        at_end: [N, ...] with the last observations of the agents whose episode ended with this
            step, before the next begins. Undefined for other environments.
    """

    now: Tree
    at_end: Tree


@dataclass(slots=True)
class Turn:
    """Results of one step of all environments.

    An environment whose agents are all done begins its next episode in the same step or the next.

    Attributes:
        groups: in the order of `MultiAgentEnvs.groups`.
        began: [K] the environments that begin an episode with this turn, in ascending order.
        over: [L] the environments whose episode ended with this turn, in ascending order.
        env_returns: [L] float64, the sum over all agents of their rewards in that episode.
        env_lengths: [L] its number of environment steps.
        agent_returns: [L, A] float64, the sum of each agent's rewards in that episode; NaN for an
            agent that did not act in it.
        critics: by the keys of `MultiAgentEnvs.critic_spaces`.
        stepped: [M] the environments that made a step; None: all.
        infos: numbers in infos of the step, [N * A] by name, for `InfoWatch`. They count for slots
            that act next in the same episode, and for slots that ended.
        unread: describes the parts of the step's infos that nothing reads; "": all are read.
    """

    groups: tuple[GroupTurn, ...]
    began: NDArray[np.intp]
    over: NDArray[np.intp]
    env_returns: NDArray[np.float64]
    env_lengths: NDArray[np.intp]
    agent_returns: NDArray[np.float64]
    critics: Mapping[str, CriticObservations] = field(default_factory=dict)
    stepped: NDArray[np.intp] | None = None
    infos: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    unread: str = ""


class MultiAgentEnvs(Protocol):
    """N environments with several agents each, which an EnvRunner steps together.

    Attributes:
        num_envs: N.
        agents: the A agents that an environment may ever have.
        groups: the agents by their spaces; each agent is in one group.
        critic_spaces: what critics see of one environment, by the requested values of
            `critic_sees`.
    """

    num_envs: int
    agents: tuple[str, ...]
    groups: tuple[AgentGroup, ...]
    critic_spaces: Mapping[str, Space[Any]]

    def reset(self, seed: int) -> Turn:
        """Begin an episode in every environment; running episodes are dropped.

        Raises:
            EnvironmentFailed: an environment raised, or returned invalid results.
        """

    def step(self, actions: Sequence[Any]) -> Turn:
        """Carry out the actions of the last turn's `acting` slots.

        Args:
            actions: by group, a batch [B, ...] in the order of `acting`, in Gymnasium's form.

        Raises:
            EnvironmentFailed: an environment raised, or returned invalid results.
        """

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return running episodes' returns so far: [N], and [N, A] by agent."""

    def overdue(self, steps: int) -> str:
        """Describe an agent that has not ended for this many steps.

        The agent may not even have acted. The text advises how to end episodes; "": no such agent.
        """

    def close(self) -> None:
        """Close every environment."""
