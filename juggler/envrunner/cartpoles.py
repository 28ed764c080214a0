"""CartPole with several agents: "juggler:CartPoles"."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from numpy.typing import NDArray

from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv, VectorStep

Bools = NDArray[np.bool_]


class CartPoles(MultiAgentVectorEnv):
    """Each agent balances its own pole, as in Gymnasium's CartPole-v1.

    An agent gets 1 for each step. It is terminated when its pole falls or its cart leaves the
    track, and truncated after `max_episode_steps`. The episode ends when no agent is left.

    Args:
        num_envs: N.
        num_agents: A, the number of agents: "cart_0", "cart_1", ….
        max_episode_steps: of one episode.

    Raises:
        ValueError: one of these is less than 1.
    """

    def __init__(
        self, num_envs: int = 1, num_agents: int = 4, max_episode_steps: int = 500
    ) -> None:
        if min(num_envs, num_agents, max_episode_steps) < 1:
            raise ValueError("num_envs, num_agents and max_episode_steps must be at least 1")
        self.num_envs = num_envs
        self.agents = tuple(f"cart_{i}" for i in range(num_agents))
        self._physics = CartPoleEnv()
        self.observation_space: spaces.Space[Any] = self._physics.observation_space
        self.action_space: spaces.Space[Any] = self._physics.action_space
        self._most_steps = max_episode_steps
        self._generator = np.random.default_rng()
        # [4, N, A]: position, velocity, angle and angular velocity
        self._state = np.zeros((4, num_envs, num_agents))
        self._change = np.zeros_like(self._state)
        p = self._physics
        self._pushes = np.array([-p.force_mag, p.force_mag]) / p.total_mass  # [2] by action
        limits = [p.x_threshold, p.theta_threshold_radians]
        self._limits = np.array(limits)[:, None, None]  # [2, 1, 1]
        self._there = np.zeros((num_envs, num_agents), np.bool_)
        self._steps = np.zeros(num_envs, np.intp)

    def reset(self, seed: int | None, which: Bools) -> tuple[NDArray[np.float32], Bools]:
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        size = (4, int(which.sum()), len(self.agents))
        self._state[:, which] = self._generator.uniform(-0.05, 0.05, size)
        self._there[which] = True
        self._steps[which] = 0
        return self._observations(), self._there

    def step(self, actions: Any) -> VectorStep:
        p, there, change = self._physics, self._there, self._change
        _, x_acc, _, theta_acc = change  # [N, A] each, written below
        _, _, theta, theta_dot = self._state
        cos, sin = np.cos(theta), np.sin(theta)
        weight = p.polemass_length / p.total_mass
        push = theta_dot * theta_dot  # [N, A]
        push *= sin
        push *= weight
        push += self._pushes.take(actions)
        # The equations of Barto, Sutton and Anderson (1983), in place: N * A numbers each.
        inertia = cos * cos  # [N, A]
        inertia *= -p.length * p.masspole / p.total_mass
        inertia += p.length * 4.0 / 3.0
        np.multiply(sin, p.gravity, out=theta_acc)
        theta_acc -= cos * push
        theta_acc /= inertia
        np.multiply(theta_acc, cos, out=x_acc)
        x_acc *= -weight
        x_acc += push
        # Euler steps, as in Gymnasium.
        change[::2] = self._state[1::2]
        change *= np.multiply(there, p.tau)  # carts of agents that are done stand still
        self._state += change
        self._steps += 1

        beyond = np.abs(self._state[::2]) > self._limits  # [2, N, A]
        rewards = there.astype(np.float64)  # [N, A]
        terminated = there & (beyond[0] | beyond[1])
        balanced = there ^ terminated
        truncated = balanced & (self._steps >= self._most_steps)[:, None]
        self._there = balanced ^ truncated
        return VectorStep(self._observations(), rewards, terminated, truncated, self._there)

    def _observations(self) -> NDArray[np.float32]:
        """Return the observations of all agents: [N, A, 4]."""
        return self._state.transpose(1, 2, 0).astype(np.float32, order="C")
