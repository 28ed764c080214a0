"""EnvPool's environments at their own pace: each turn has those that were ready first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.envpool import (
    AT_OWN_PACE,
    SCHEME,
    check_options,
    given_numbers,
    make_pool,
    number_of_agents,
)
from juggler.envrunner.environments.extras import check_extra
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.failures import failures_of
from juggler.envrunner.multi_agent.slot_books import Overdue, told_overdue
from juggler.envrunner.multi_agent.turns import AgentGroup, GroupTurn, Turn
from juggler.runtime.wire.structures import from_tree, take, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Tree

#: The only agent of each environment.
AGENT: Final = "agent"


def make_envpool_rows(
    config: EnvRunnerConfig, num_envs: int, critics_see: Collection[str]
) -> EnvPoolRows:
    """Make the environments of a configuration whose `env_kwargs` have EnvPool's batch_size.

    Raises:
        ValueError: an option is one that Juggler sets, or does not suit.
        EnvironmentFailed: EnvPool cannot make them.
    """
    check_extra(config.env)
    name, options = config.env.removeprefix(SCHEME), dict(config.env_kwargs)
    ready = options.pop(AT_OWN_PACE)
    check_options(options)
    if type(ready) is not int or not 0 < ready < config.envs_per_runner:
        raise ValueError(
            f"env_kwargs.{AT_OWN_PACE} = {ready!r}: with this option, EnvPool hands over so many "
            f"environments as soon as they are ready; give an integer from 1 to below "
            f"envs_per_runner = {config.envs_per_runner}, or leave it out"
        )
    if number_of_agents(name) > 1:
        raise ValueError(
            f"env_kwargs.{AT_OWN_PACE}: the players of {name} act together; leave it out"
        )
    if critics_see:
        raise ValueError(
            f"critic_sees = {sorted(critics_see)[0]!r}: the environment has one agent, whose value "
            "function sees its observation; leave it out"
        )
    return EnvPoolRows(name, num_envs, min(ready, num_envs), options)


class EnvPoolRows:
    """N environments of EnvPool, of which each step carries on those M that are ready first.

    So slow ones hold nobody up. They are `MultiAgentEnvs` with one agent each, whose rows fill at
    their own pace.

    Args:
        name: of the environment, such as "Pong-v5".
        num_envs: N.
        ready: M.
        options: of `envpool.make`.

    Raises:
        ValueError: EnvPool has no such environment.
        EnvironmentFailed: it cannot make them.
    """

    agents: tuple[str, ...] = (AGENT,)
    critic_spaces: Mapping[str, Space[Any]]

    def __init__(self, name: str, num_envs: int, ready: int, options: dict[str, Any]) -> None:
        self._name, self.num_envs = name, num_envs
        self._options = {**options, AT_OWN_PACE: ready}
        self._where = f"one of {num_envs} environments ({SCHEME}{name})"
        self._pool = make_pool(name, num_envs, self._options)
        self._space: Space[Any] = self._pool.observation_space
        self._actions: Space[Any] = self._pool.action_space
        self.groups: tuple[AgentGroup, ...] = (AgentGroup(self.agents, self._space, self._actions),)
        self.critic_spaces = {}
        self._longest = 0  # of the episodes that are over
        self._begin()

    def _begin(self) -> None:
        self._acting = np.zeros(0, np.intp)  # [B] environments
        self._over = np.zeros(0, np.intp)  # [E] those whose next step begins an episode
        self._begins = np.ones(self.num_envs, np.bool_)  # [N] likewise
        self._returns = np.zeros(self.num_envs)  # [N] of the running episodes
        self._lengths = np.zeros(self.num_envs, np.intp)  # [N]

    def reset(self, seed: int) -> Turn:
        # EnvPool takes a seed only when it makes environments.
        self._pool.close()
        own = {"seed": environment_seeds(seed, 1)[0] % 2**31}
        self._pool = make_pool(self._name, self.num_envs, {**self._options, **own})
        self._begin()
        with failures_of(self._where, "reset"):
            self._pool.async_reset()
            return self._turn(*self._pool.recv())

    def step(self, actions: Sequence[Any]) -> Turn:
        (batch,) = actions
        envs = np.concatenate((self._acting, self._over)).astype(np.int32)  # [M]
        chosen = to_tree(self._actions, batch)  # [B, ...]
        if len(self._over):  # whatever their actions are
            any_actions = zeros(self._actions, (len(self._over),))  # [E, ...]
            chosen = tree_map(lambda *each: np.concatenate(each), chosen, any_actions)
        with failures_of(self._where, "step"):
            self._pool.send(from_tree(self._actions, chosen), envs)
            return self._turn(*self._pool.recv())

    def _turn(
        self,
        observations: Any,
        rewards: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        info: dict[str, Any],
    ) -> Turn:
        """What M environments say, in the order in which they were ready."""
        order = info["env_id"].argsort()  # [M]
        envs = info["env_id"][order].astype(np.intp)  # [M]
        seen: Tree = take(to_tree(self._space, observations), order)  # [M, ...]
        rewards, terminated = rewards[order].astype(np.float64), terminated[order]  # [M] both
        first = self._begins[envs]  # [M]
        rewards[first] = 0
        done = (terminated | truncated[order]) & ~first  # [M]
        self._returns[envs] = np.where(first, 0, self._returns[envs] + rewards)
        self._lengths[envs] = np.where(first, 0, self._lengths[envs] + 1)
        self._begins[envs] = done
        acts = ~done  # [M]
        self._acting, self._over = envs[acts], envs[done]
        returns, lengths = self._returns[self._over], self._lengths[self._over]  # [E] both
        if len(lengths):
            self._longest = max(self._longest, int(lengths.max()))
        group = GroupTurn(
            acting=self._acting,
            observations=take(seen, acts),
            first=first[acts],
            rewards=rewards[acts],
            ended=self._over,
            last_observations=take(seen, done),
            last_rewards=rewards[done],
            terminated=terminated[done],
        )
        ended_with = returns, lengths, returns[:, None]
        infos = {}
        for number, given in given_numbers(info, len(envs)).items():
            infos[number] = np.zeros(self.num_envs, given.dtype)  # [N]
            infos[number][envs] = given[order]
        return Turn((group,), envs[first], self._over, *ended_with, stepped=envs, infos=infos)

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._returns.copy(), self._returns[:, None].copy()

    def overdue(self, steps: int) -> str:
        steps = max(steps, 2 * self._longest)
        env = int(self._lengths.argmax())
        if self._lengths[env] < steps:
            return ""
        remedy = "it has to truncate its episodes, perhaps with max_episode_steps in env_kwargs"
        return told_overdue(Overdue(env, AGENT, steps, idle=False), SCHEME + self._name, remedy)

    def close(self) -> None:
        self._pool.close()
