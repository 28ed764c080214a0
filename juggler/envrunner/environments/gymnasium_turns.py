"""A vector of Gymnasium's environments as turns of one agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.environments.autoreset import autoreset_mode, last_observation
from juggler.envrunner.environments.vector import reset_environments
from juggler.envrunner.multi_agent.turns import ALONE, AgentGroup, GroupTurn, Turn
from juggler.runtime.wire.structures import put, take, to_tree, zeros
from juggler.runtime.wire.trees import Tree


class GymnasiumTurns:
    """N environments with one agent each, as `MultiAgentEnvs`.

    All slots are `acting` at every turn. Under NEXT_STEP autoreset, slots whose next step only
    resets are `idle`.

    Args:
        env: N environments, with any autoreset mode.

    Raises:
        ValueError: the vector's metadata has no autoreset mode.
    """

    agents: tuple[str, ...] = (ALONE,)
    critic_spaces: Mapping[str, Space[Any]]

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self.env, self.num_envs = env, env.num_envs
        self._space = env.single_observation_space
        self.groups: tuple[AgentGroup, ...] = (
            AgentGroup(self.agents, self._space, env.single_action_space),
        )
        self.critic_spaces = {}
        self._autoreset = autoreset_mode(env)
        self._all = np.arange(self.num_envs)  # [N]
        self._none = np.zeros(0, np.intp)
        self._no_flags = np.zeros(0, np.bool_)
        self._no_returns = np.zeros((0, 1))
        self._no_observations = zeros(self._space, (0,))  # [0, ...]
        self._not_first = np.zeros(self.num_envs, np.bool_)  # [N]
        self._begin()

    def _begin(self) -> None:
        self._idle: NDArray[np.bool_] | None = None  # [N] environments whose next step only resets
        self._returns = np.zeros(self.num_envs)  # [N] of the running episodes
        self._steps = 0  # since the reset
        self._began = np.zeros(self.num_envs, np.intp)  # [N] the step with which they began

    def reset(self, seed: int) -> Turn:
        shown = reset_environments(self.env, seed)  # [N, ...]
        self._begin()
        first = np.ones(self.num_envs, np.bool_)  # [N]
        return self._turn(shown, np.zeros(self.num_envs), first, began=self._all)

    def step(self, actions: Sequence[Any]) -> Turn:
        shown, rewards, terminated, truncated, infos = self.env.step(actions[0])
        rewards = np.array(rewards, np.float64)  # [N] a copy
        done = np.logical_or(terminated, truncated)  # [N]
        began, idle = self._none, self._idle
        self._steps += 1
        if idle is not None:  # their episodes have begun, and the step's results do not count
            rewards[idle] = 0
            done &= ~idle
            began = idle.nonzero()[0]  # [K]
            self._began[began], self._returns[began] = self._steps, 0
            self._idle = None
        self._returns += rewards
        if not np.count_nonzero(done):
            first = self._not_first if idle is None else idle
            return self._turn(shown, rewards, first, began=began)
        over = done.nonzero()[0]  # [L]
        terminated = np.asarray(terminated)[over]  # [L]
        last = self._last_observations(shown, infos, over, terminated)  # [L, ...]
        if self._autoreset is AutoresetMode.DISABLED:
            shown, _ = self.env.reset(options={"reset_mask": done})
        ended = (
            last,
            rewards[over],
            terminated,
            self._returns[over],
            self._steps - self._began[over],
        )
        rewards[over] = 0
        if self._autoreset is AutoresetMode.NEXT_STEP:
            first, self._idle = self._not_first if idle is None else idle, done
        else:
            first, began = done, over
            self._began[over], self._returns[over] = self._steps, 0
        return self._turn(shown, rewards, first, began=began, over=over, ended=ended)

    def _turn(
        self,
        shown: Any,
        rewards: NDArray[np.float64],
        first: NDArray[np.bool_],
        *,
        began: NDArray[np.intp],
        over: NDArray[np.intp] | None = None,
        ended: tuple[Any, ...] = (),
    ) -> Turn:
        """Assemble a turn.

        Args:
            shown: observations [N, ...], in Gymnasium's form.
            rewards: [N] float64, 0 where an episode has just ended or begun.
            first: [N]
            began: [K]
            over: [L]; None: no episode ended.
            ended: last observations [L, ...], last rewards, terminated, returns and lengths [L].
        """
        none = self._none
        if over is None:
            over, no_rewards = none, self._no_returns[:, 0]
            ended = self._no_observations, no_rewards, self._no_flags, no_rewards, none
        last_observations, last_rewards, terminated, returns, lengths = ended
        group = GroupTurn(
            self._all,
            to_tree(self._space, shown),
            first,
            rewards,
            over,
            last_observations,
            last_rewards,
            terminated,
            self._idle,
        )
        return Turn((group,), began, over, returns, lengths, returns[:, None])

    def _last_observations(
        self,
        shown: Any,
        infos: Any,
        over: NDArray[np.intp],
        terminated: NDArray[np.bool_],
    ) -> Tree:
        """Copy the last observations [L, ...] of ended episodes.

        Under SAME_STEP autoreset, a terminated episode may have no last observation: it is zeros.

        Raises:
            EnvironmentFailed: a truncated episode's observation is missing, or does not fit.
        """
        if self._autoreset is not AutoresetMode.SAME_STEP:
            found: Tree = take(to_tree(self._space, shown), over)
            return found
        found = zeros(self._space, (len(over),))
        for k, (row, ends) in enumerate(zip(over.tolist(), terminated.tolist(), strict=True)):
            last = last_observation(self._space, infos, row, terminated=ends)
            if last is not None:
                put(found, k, last)
        return found

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._returns.copy(), self._returns[:, None].copy()

    def overdue(self, steps: int) -> str:
        return ""  # an environment may have one episode without end

    def close(self) -> None:
        self.env.close()
