"""Accounts of rewards, first actions and ends of agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.intp]
Floats = NDArray[np.float64]

#: Maximum number of steps without ends that are kept until they are booked.
_MOST_QUIET = 256


@dataclass(eq=False)
class BrokenRule(Exception):
    """An environment broke PettingZoo's rules."""

    env: int
    reason: str


class SlotResults(NamedTuple):
    """Results of a step for agents that act next or ended."""

    last: NDArray[np.bool_]  # [E] bool, whether an agent that ended had acted in its episode
    last_rewards: Floats  # [E] float64 of the last actions of the agents that ended
    # [B] bool, whether the next action of an agent is its first in the episode.
    first: NDArray[np.bool_]
    # [B] float64 of the last actions of the agents that act next; where `first`, from before the
    # first action.
    rewards: Floats
    env_returns: Floats  # [L] float64 of the episodes that ended
    env_lengths: Slots  # [L] their environment steps
    # [L, A] float64, each agent's return in these episodes; NaN if it did not act.
    agent_returns: Floats


class SlotBooks:
    """The state of N * A slots: acted, ended, and open rewards.

    `step` books one step of all environments. It sums the rewards of an agent until the agent acts
    again or ends, and checks that agents neither come back nor vanish.

    Args:
        come_back: whether agents may act again after their end, as new agents.

    Attributes:
        ended: [N * A] bool, the slots that ended before the episode of their environment.
    """

    def __init__(self, num_envs: int, agents: Sequence[str], come_back: bool = False) -> None:
        self._agents, self._come_back = agents, come_back
        slots = num_envs * len(agents)
        self._acted = np.zeros(slots, np.bool_)
        self.ended = np.zeros(slots, np.bool_)
        self._rewards = np.zeros(slots)
        self._returns = np.zeros(num_envs)
        self._agent_returns = np.zeros(slots)
        self._steps = 0
        self._began = np.zeros(num_envs, np.intp)  # the step with which the episode began
        self._longest = 0  # steps of the longest ended episode
        self._acted_at = np.zeros(slots, np.intp)  # the step of the last action
        self._acting = np.zeros(0, np.intp)  # [B] the slots that act next
        # [N * A] rewards of steps that the books above do not have yet.
        self._quiet: list[Floats] = []

    def reset(self, acting: Slots) -> SlotResults:
        """Begin an episode in every environment.

        Args:
            acting: [B] the slots that act first.
        """
        books = (self._acted, self.ended, self._rewards, self._returns, self._began)
        for each in (*books, self._agent_returns, self._acted_at):
            each.fill(0)
        self._steps = 0
        self._quiet.clear()
        none = np.zeros(0)
        agent_returns = np.zeros((0, len(self._agents)))
        over = none, none.astype(np.intp), agent_returns
        return self._booked(acting, none.astype(np.bool_), none, *over)

    def step(
        self, rewards: Floats, ended: Slots, over: Slots, began: Slots, acting: Slots
    ) -> SlotResults:
        """Book a step in which all slots that were `acting` have acted.

        Args:
            rewards: [N * A] float64 of this step; 0 where a slot got no reward.
            ended: [E] slots whose episode ended.
            over: [L] environments that have no agents left.
            began: [K] environments that have begun an episode.
            acting: [B] the slots that act next.

        Raises:
            BrokenRule: an agent got a reward after its end, ended twice, came back after its end,
                or had no end when the episode of its environment ended.
        """
        self._catch_up()
        self._steps += 1
        self._forbid_late(rewards)
        # Of each action: rewards count until its agent acts again.
        self._rewards += rewards
        self._returns += np.add.reduce(rewards.reshape(-1, len(self._agents)), 1)
        self._agent_returns += rewards
        last = self._acted[ended]  # [E]
        if len(ended):
            already = self.ended[ended]  # [E]
            if self._come_back:
                last &= ~already  # a new agent that ended before it acted
            else:
                self._forbid(ended[already], "ended, and it had ended already in this episode")
            self.ended[ended] = True
        last_rewards = self._rewards[ended]  # [E]
        self._rewards[ended] = 0  # a new agent may come in the place of one that ended
        over_with = self._end_environments(over)
        self._began[began] = self._steps
        # An agent that acts after its end is a new one, or a mistake.
        if np.count_nonzero(self.ended):
            back = acting[self.ended[acting]]
            if self._come_back:
                self.ended[back] = self._acted[back] = False
            else:
                self._forbid(
                    back,
                    "came back after its episode ended: remove it from `agents` when it ends, and "
                    "do not let it act again in the episode",
                )
        return self._booked(acting, last, last_rewards, *over_with)

    def _end_environments(self, over: Slots) -> tuple[Floats, Slots, Floats]:
        """End episodes [L] -> returns, lengths, and agents' returns."""
        env_returns, env_lengths = self._returns[over], self._steps - self._began[over]  # [L]
        if not len(over):
            return env_returns, env_lengths, np.zeros((0, len(self._agents)))
        self._longest = max(self._longest, int(env_lengths.max()))
        of_env = over[:, None] * len(self._agents) + np.arange(len(self._agents))  # [L, A]
        agent_returns = np.where(self._acted[of_env], self._agent_returns[of_env], np.nan)
        self._forbid(
            of_env[self._acted[of_env] & ~self.ended[of_env]],
            "is gone, and was neither terminated nor truncated: an agent must be told its end",
        )
        self._acted[of_env] = self.ended[of_env] = False
        self._rewards[of_env] = self._agent_returns[of_env] = 0
        self._returns[over] = 0
        return env_returns, env_lengths, agent_returns

    def step_without_ends(self, rewards: Floats) -> Floats:
        """Book a step without ends, after which the same slots act.

        Args:
            rewards: as in `step`; the array is kept.

        Returns:
            [B] float64 of the last actions of the slots that act next.

        Raises:
            BrokenRule: an agent got a reward after its end.
        """
        if len(self._quiet) == _MOST_QUIET:
            self._catch_up()
        self._steps += 1
        self._forbid_late(rewards)
        self._quiet.append(rewards)
        return rewards if len(self._acting) == len(rewards) else rewards[self._acting]

    def _catch_up(self) -> None:
        """Book the kept steps, in order."""
        if not self._quiet:
            return
        steps = np.stack(self._quiet)  # [T, N * A]
        self._quiet.clear()
        of_envs = np.add.reduce(steps.reshape(len(steps), -1, len(self._agents)), 2)  # [T, N]
        self._returns = _added(self._returns, of_envs)
        self._agent_returns = _added(self._agent_returns, steps)
        self._rewards = _added(self._rewards, steps)
        self._rewards[self._acting] = 0
        self._acted_at[self._acting] = self._steps + 1

    def returns(self) -> tuple[Floats, Floats]:
        """Return running episodes' returns so far: [N], and [N, A] by agent."""
        self._catch_up()
        return self._returns.copy(), self._agent_returns.reshape(-1, len(self._agents)).copy()

    def overdue(self, steps: int, name: str, remedy: str) -> str:
        """Describe an agent whose episode does not end; "": none.

        It has neither acted nor ended for long. If there is none, it may be one that has only not
        ended. The limit is at least twice the longest episode.

        Args:
            steps: minimum of the limit.
            remedy: advice that ends episodes.
        """
        self._catch_up()
        steps = max(steps, 2 * self._longest)
        waiting = self._acted & ~self.ended  # [N * A]
        idle = np.flatnonzero(waiting & (self._steps - self._acted_at >= steps))
        lengths = np.repeat(self._steps - self._began, len(self._agents))  # [N * A]
        endless = np.flatnonzero(waiting & (lengths >= steps))
        for slots in (idle, endless):
            if len(slots):
                env, agent = divmod(int(slots[0]), len(self._agents))
                whose = self._agents[agent], env, name
                return overdue_message(*whose, steps, remedy, idle=slots is idle)
        return ""

    def _booked(
        self,
        acting: Slots,
        last: NDArray[np.bool_],
        last_rewards: Floats,
        returns: Floats,
        lengths: Slots,
        agent_returns: Floats,
    ) -> SlotResults:
        first = ~self._acted[acting]  # [B]
        rewards = self._rewards[acting]  # [B]
        if np.count_nonzero(first):
            self._acted[acting] = True
        self._rewards[acting] = 0
        self._acted_at[acting] = self._steps + 1
        self._acting = acting
        return SlotResults(last, last_rewards, first, rewards, returns, lengths, agent_returns)

    def _forbid_late(self, rewards: Floats) -> None:
        if not self._come_back and np.count_nonzero(self.ended):
            late = np.flatnonzero(self.ended & (rewards != 0))
            self._forbid(late, "got a reward after its episode ended")

    def _forbid(self, slots: Slots, reason: str) -> None:
        if len(slots):
            env, agent = divmod(int(slots[0]), len(self._agents))
            raise BrokenRule(env, f"agent {self._agents[agent]!r} {reason}")


def _added(sums: Floats, steps: Floats) -> Floats:
    """Add rewards of each step [T, S] to sums [S], in order."""
    every: Floats = np.add.reduce(np.concatenate((sums[None], steps)), 0)
    return every


def overdue_message(agent: str, env: int, name: str, steps: int, remedy: str, *, idle: bool) -> str:
    """Warn of an agent whose episode has been running for very long.

    Args:
        steps: limit that it has exceeded.
        idle: it has not acted for as long; otherwise it acts without an end.
    """
    did = "has neither acted nor ended in the last" if idle else "has not ended within"
    return (
        f"waits for agent {agent!r} of environment {env} ({name}), which {did} {steps:,} steps of "
        f"one episode: {remedy}"
    )
