"""Plays whole episodes, and evaluates policies on them, without exploration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.agent_returns import AgentReturns, add_returns, to_messages
from juggler.envrunner.environments.accepted_vector import on_device, on_host
from juggler.envrunner.environments.action_masks import LegalActions, ObservedChoices
from juggler.envrunner.environments.autoreset import autoreset_mode, last_observation
from juggler.envrunner.environments.vector import reset_environments
from juggler.envrunner.finiteness import check_return
from juggler.envrunner.multi_agent.turns import ALONE, AgentGroup, GroupTurn, MultiAgentEnvs, Turn
from juggler.runtime.acting.actor import Actor
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import put, take, to_tree, zeros
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.envrunner.multi_agent.line_up import LineUps
    from juggler.envrunner.multi_agent.module_slots import ModuleSlots


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
        none, no_rewards = np.zeros(0, np.intp), np.zeros(0)
        # For turns with which no episode ends, as in `_turn`.
        no_flags = np.zeros(0, np.bool_)
        nothing = zeros(self._space, (0,)), no_rewards, no_flags, no_rewards, none
        self._none, self._nothing = none, nothing
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
        none, nothing = self._none, self._nothing
        return self._turn(shown, np.zeros(self.num_envs), first, self._all, none, nothing)

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
        # 0 where an episode has only begun.
        self._returns += rewards
        if not np.count_nonzero(done):
            first = self._not_first if idle is None else idle
            return self._turn(shown, rewards, first, began, self._none, self._nothing)
        over = done.nonzero()[0]  # [L]
        terminated = np.asarray(terminated)[over]  # [L]
        last = last_observations(self.env, shown, infos, over, terminated)  # [L, ...]
        # In this mode, nothing else resets them.
        if self._autoreset is AutoresetMode.DISABLED:
            shown, _ = self.env.reset(options={"reset_mask": done})
        lengths = self._steps - self._began[over]  # [L]
        ended = last, rewards[over], terminated, self._returns[over], lengths
        # A last reward belongs to the ended episode, not to the next action.
        rewards[over] = 0
        if self._autoreset is AutoresetMode.NEXT_STEP:
            first, self._idle = self._not_first if idle is None else idle, done
        else:
            first, began = done, over
            self._began[over], self._returns[over] = self._steps, 0
        return self._turn(shown, rewards, first, began, over, ended)

    def _turn(
        self,
        shown: Any,
        rewards: NDArray[np.float64],
        first: NDArray[np.bool_],
        began: NDArray[np.intp],
        over: NDArray[np.intp],
        ended: tuple[Any, ...],
    ) -> Turn:
        """Assemble a turn.

        Args:
            shown: observations [N, ...], in Gymnasium's form.
            rewards: [N] float64, 0 where an episode has just ended or begun.
            first: [N]
            began: [K]
            over: [L]
            ended: last observations [L, ...], last rewards, terminated, returns and lengths [L].
        """
        last_observations, last_rewards, terminated, returns, lengths = ended
        # Rows that only reset are in it, because the vector needs all actions.
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

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._returns.copy(), self._returns[:, None].copy()

    def overdue(self, steps: int) -> str:
        return ""  # an environment may have one episode without end

    def close(self) -> None:
        self.env.close()


def last_observations(
    env: VectorEnv[Any, Any, Any],
    shown: Any,
    infos: Any,
    over: NDArray[np.intp],
    terminated: NDArray[np.bool_] | None = None,
) -> Tree:
    """Copy the last observations [L, ...] of ended episodes.

    Under SAME_STEP autoreset, a terminated episode may have no last observation: it is zeros.

    Args:
        shown: results [N, ...] of the step, in Gymnasium's form.
        over: [L] their environments.
        terminated: [L]; None: they were truncated.
    """
    space = env.single_observation_space
    if autoreset_mode(env) is not AutoresetMode.SAME_STEP:
        found: Tree = take(to_tree(space, shown), over)
        return found
    found = zeros(space, (len(over),))
    for k, row in enumerate(over.tolist()):
        ends = terminated is not None and bool(terminated[k])
        last = last_observation(space, infos, row, terminated=ends)
        if last is not None:
            put(found, k, last)
    return found


@dataclass(frozen=True, slots=True)
class Goal:
    """The mean return that an evaluation must reach."""

    mean: float
    best: float  # the best return of an episode in training

    def out_of_reach(self, returns: Sequence[float], episodes: int) -> bool:
        """Return whether the mean will stay below the goal in any case."""
        best = max((self.best, *returns))
        return sum(returns) + (episodes - len(returns)) * best < self.mean * episodes


class PlayedEpisodes(NamedTuple):
    """Whole episodes that were played."""

    # Undiscounted returns, by environment and then by time; with several agents, summed over the
    # agents.
    returns: list[float]
    lengths: list[int]  # numbers of environment steps, in the same order
    agent_returns: AgentReturns  # returns of each of several agents; {}: there is one agent

    def message(self, version: training_pb2.WeightsVersion) -> training_pb2.Evaluation:
        """Report them to the driver, with the weights that played."""
        of_agents = to_messages(self.agent_returns)
        return training_pb2.Evaluation(
            version=version,
            episode_returns=self.returns,
            episode_lengths=self.lengths,
            agent_returns=of_agents,
        )


class Episode(NamedTuple):
    """One whole episode that was played."""

    env: int
    # Of the episode in its environment, or among all if the episodes that begin first are played.
    number: int
    total: float  # undiscounted return, summed over all agents
    length: int  # number of environment steps
    returns: NDArray[np.float64]  # [A] undiscounted return of each agent; NaN if it did not act
    steps: NDArray[np.intp]  # [A] number of actions of each agent


def shares(episodes: int, num_envs: int) -> NDArray[np.intp]:
    """Return the number of episodes that each environment plays [N]."""
    return np.array([len(range(i, episodes, num_envs)) for i in range(num_envs)])


def whole_episodes(
    envs: MultiAgentEnvs,
    act: Callable[[Turn], Sequence[Any]],
    episodes: int,
    seed: int,
    watch: Callable[[int, int], None] | None = None,
    *,
    most_steps: int = 0,
    first_that_begin: bool = False,
) -> Iterator[list[Episode]]:
    """Play episodes from fresh seeds, and yield the ended ones by step.

    Each environment plays a fixed share of the episodes, or the episodes that begin first are
    played. To take the episodes that end first would favour short ones.

    Args:
        envs: N environments. A sampler that uses them must be reset afterwards.
        act: chooses the actions of a turn, for `MultiAgentEnvs.step`.
        watch: called after each step with the number of finished episodes and of steps so far.
        most_steps: maximum environment steps of an episode; an episode that reaches it counts with
            its rewards so far, and later steps count as another episode. 0: no limit.
        first_that_begin: play the episodes that begin first, instead of shares.

    Raises:
        EnvironmentFailed: an environment failed, or a return was not finite in float32.
    """
    count = envs.num_envs
    limit = np.full(count, episodes) if first_that_begin else shares(episodes, count)  # [N]
    books = _EpisodeBooks(envs, limit, most_steps, first_that_begin)
    done = step = 0
    turn = envs.reset(seed)
    while done < episodes:
        books.act(turn)
        turn = envs.step(act(turn))
        step += 1
        found = books.ended(turn)
        done += len(found)
        if watch is not None:
            watch(done, step)
        if found:
            yield found


class _EpisodeBooks:
    """Accounts of the running episodes of N environments with A agents.

    Args:
        limit: [N] number of the episode from which on episodes are not counted.
    """

    def __init__(
        self,
        envs: MultiAgentEnvs,
        limit: NDArray[np.intp],
        most_steps: int,
        first_that_begin: bool,
    ) -> None:
        self._envs, self._limit = envs, limit
        self._most_steps, self._first_that_begin = most_steps, first_that_begin
        count, agents = envs.num_envs, len(envs.agents)
        self._numbers = np.zeros(count, np.intp)  # [N] of the running episodes
        self._begun = 0
        # What earlier counts, at the limit of steps, had of the running episodes.
        self._counted = np.zeros(count)  # [N]
        self._counted_of = np.zeros((count, agents))  # [N, A] each agent's
        self._steps = np.zeros((count, agents), np.intp)  # [N, A] actions that are not counted yet
        self._of_slots = self._steps.reshape(-1)  # [N * A] the same memory
        self._lengths = np.zeros(count, np.intp)  # [N] environment steps that are not counted yet
        self._running = np.zeros(count, np.bool_)  # [N]

    def act(self, turn: Turn) -> None:
        """Count the actions and the new episodes of a turn."""
        if self._first_that_begin:
            self._numbers[turn.began] = self._begun + np.arange(len(turn.began))
            self._begun += len(turn.began)
        for group in turn.groups:
            self._of_slots[group.acting] += 1
        self._running[turn.began] = True

    def ended(self, turn: Turn) -> list[Episode]:
        """Return the episodes that ended or reached the limit."""
        stepped = slice(None) if turn.stepped is None else turn.stepped
        self._lengths[stepped] += self._running[stepped]
        self._running[turn.over] = False
        rows, so_far, so_far_of = turn.over, turn.env_returns, turn.agent_returns  # [L, ...]
        if self._most_steps:
            rows, so_far, so_far_of = self._with_limit(turn)
        if not len(rows):
            return []
        steps = self._steps[rows]  # [L, A]
        acted = steps > 0  # [L, A]
        # An agent without an action has no return.
        of_agents = np.where(acted, so_far_of - self._counted_of[rows], np.nan)  # [L, A]
        totals = (so_far - self._counted[rows]).tolist()
        found = []
        for k, (row, total) in enumerate(zip(rows.tolist(), totals, strict=True)):
            if self._numbers[row] < self._limit[row]:
                at = row, int(self._numbers[row]), total, int(self._lengths[row])
                found.append(Episode(*at, of_agents[k], steps[k]))
                for each in (total, *of_agents[k][acted[k]].tolist()):
                    check_return(row, each)
        if not self._first_that_begin:
            self._numbers[rows] += 1
        # An episode that has only reached the limit continues as another one.
        continues = ~np.isin(rows, turn.over) if self._most_steps else False  # [L]
        self._counted[rows] = np.where(continues, so_far, 0)
        kept = np.where(acted, so_far_of, self._counted_of[rows])  # [L, A]
        self._counted_of[rows] = np.where(continues, kept.T, 0).T
        self._steps[rows], self._lengths[rows] = 0, 0
        return found

    def _with_limit(
        self, turn: Turn
    ) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float64]]:
        """Add environments at the limit: rows [R], returns [R], [R, A]."""
        for group in turn.groups:  # an agent that ends may have acted before the last limit
            self._of_slots[group.ended] = np.maximum(self._of_slots[group.ended], 1)
        reached = np.setdiff1d(np.flatnonzero(self._lengths == self._most_steps), turn.over)
        returns, of_each = self._envs.returns()  # [N], [N, A]
        returns[turn.over], of_each[turn.over] = turn.env_returns, turn.agent_returns
        rows = np.union1d(turn.over, reached)  # [R]
        return rows, returns[rows], of_each[rows]


def _played(
    ended: Iterator[list[Episode]],
    episodes: int,
    goal: Goal | None,
    agents: Sequence[str] = (),
    players: NDArray[np.object_] | None = None,
) -> PlayedEpisodes:
    """Collect an evaluation's episodes, until its goal is out of reach.

    Args:
        ended: episodes by time.
        players: [N, A] the modules that play now.
    """
    every: list[tuple[Episode, Any]] = []  # with the modules [1, A]
    for found in ended:
        # Later episodes of an environment may have other players.
        for episode in found:
            here = None if players is None else players[[episode.env]]
            every.append((episode, here))
        if goal is not None and goal.out_of_reach([each.total for each, _ in every], episodes):
            break
    every.sort(key=lambda each: each[0].env)  # stable, so by time in each environment
    of_agents: AgentReturns = {}
    for episode, here in every:
        if here is not None:
            add_returns(of_agents, agents, episode.returns[None], here)
    totals, lengths = ([getattr(each, of) for each, _ in every] for of in ("total", "length"))
    return PlayedEpisodes(totals, lengths, of_agents)


def evaluate(
    env: VectorEnv[Any, Any, Any],
    policy: Actor,
    episodes: int,
    seed: int,
    watch: Callable[[int, int], None] | None = None,
    *,
    most_steps: int = 0,
    goal: Goal | None = None,
    explore: bool = False,
) -> PlayedEpisodes:
    """Play episodes of environments with one agent, as `whole_episodes` does.

    Args:
        env: with any autoreset mode. A sampler that uses it must be reset afterwards.
        policy: has as many rows as `env`; its connectors learn nothing here.
        episodes, seed, watch, most_steps: as in `whole_episodes`.
        explore: draw actions as in training, instead of taking the most likely ones.

    Raises:
        EnvironmentFailed: as `whole_episodes`.
    """
    seen = policy.connectors.observation_space
    legal = LegalActions.of(seen, env.single_action_space)
    choices = ObservedChoices(seen, "an evaluation")
    step = -1

    def place(row: int, *_: int) -> tuple[int, int]:
        return row, step

    def act(turn: Turn) -> list[Any]:
        nonlocal step
        step += 1
        (group,) = turn.groups
        # Nothing has acted before the first turn.
        if step:
            policy.rewarded(group.rewards)
        tree: Any = choices.through(policy.connectors, group.observations, place)  # [N, ...]
        choices.require(tree, place)
        if legal is not None:
            legal.require(tree[ACTION_MASK], step, "an evaluation", group.idle)
        first, device = group.first, policy.device
        if device is not None:
            tree, first = on_device(tree, device), on_device(first, device)
        with torch.no_grad():
            sent = policy.act(tree, first=first, explore=explore, keep=False).sent  # [N, ...]
        return [on_host(sent)]

    envs = GymnasiumTurns(env)
    ended = whole_episodes(envs, act, episodes, seed, watch, most_steps=most_steps)
    return _played(ended, episodes, goal)


def play_whole_episodes(
    envs: MultiAgentEnvs,
    modules: Sequence[ModuleSlots],
    episodes: int,
    seed: int,
    watch: Callable[[int, int], None] | None = None,
    *,
    most_steps: int = 0,
    goal: Goal | None = None,
    line_ups: LineUps | None = None,
) -> PlayedEpisodes:
    """Play whole episodes of environments with several agents.

    Args:
        envs: N environments. A sampler that uses them must be reset afterwards.
        episodes, seed, watch, most_steps: as in `whole_episodes`.
        line_ups: decides which modules play each episode, from the same seed; None: each module
            always plays its agents. A sampler that uses it must be reset afterwards.

    Raises:
        EnvironmentFailed: as `whole_episodes`.
    """
    played_by = {agent: each.role.module_id for each in modules for agent in each.role.agents}
    ids = np.array([played_by[agent] for agent in envs.agents], np.object_)
    players = np.tile(ids, (envs.num_envs, 1))  # [N, A]
    if line_ups is not None:
        line_ups.reset(seed)

    def act(turn: Turn) -> list[Any]:
        if line_ups is not None and len(turn.began):
            line_up = line_ups.begin(turn.began)
            players.flat[line_up.slots] = line_up.players
            for slots in modules:
                slots.line_up(line_up)
        return actions_of(envs, modules, turn)

    ended = whole_episodes(envs, act, episodes, seed, watch, most_steps=most_steps)
    return _played(ended, episodes, goal, envs.agents, players)


def actions_of(
    envs: MultiAgentEnvs, modules: Sequence[ModuleSlots], turn: Turn, *, explore: bool = False
) -> list[Any]:
    """Choose a turn's actions, for `MultiAgentEnvs.step`; nothing is collected."""
    from juggler.envrunner.multi_agent.module_slots import merged_actions

    # All modules act on the same turn.
    acted = ((slots, slots.act_only(turn.groups[slots.role.group], explore)) for slots in modules)
    return merged_actions(turn, envs.groups, acted)
