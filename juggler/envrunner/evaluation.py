"""Plays whole episodes, and evaluates policies on them, without exploration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.agent_returns import AgentReturns, add_returns
from juggler.envrunner.environments.gymnasium_turns import GymnasiumTurns
from juggler.envrunner.environments.legal_actions import LegalActions, ObservedChoices
from juggler.envrunner.finiteness import check_return
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.runtime.acting.actor import Actor
from juggler.runtime.checkpoints.checkpoint import CONNECTORS
from juggler.runtime.checkpoints.weights import WEIGHTS
from juggler.runtime.connectors.mergeable_state import check
from juggler.runtime.connectors.pipelines import EnvToModule
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.trees import Tree

if TYPE_CHECKING:
    from juggler.envrunner.multi_agent.line_up import LineUps
    from juggler.envrunner.multi_agent.module_slots import ModuleSlots


@dataclass(frozen=True, slots=True)
class Goal:
    """The mean return that an evaluation must reach.

    Attributes:
        mean: the goal.
        best: the best return of an episode in training.
    """

    mean: float
    best: float

    def out_of_reach(self, returns: Sequence[float], episodes: int) -> bool:
        """Return whether the mean will stay below the goal in any case."""
        best = max((self.best, *returns))
        return sum(returns) + (episodes - len(returns)) * best < self.mean * episodes


class PlayedEpisodes(NamedTuple):
    """Whole episodes that were played.

    Attributes:
        returns: undiscounted returns, by environment and then by time; with several agents, summed
            over the agents.
        lengths: numbers of environment steps, in the same order.
        agent_returns: returns of each of several agents; {}: there is one agent.
    """

    returns: list[float]
    lengths: list[int]
    agent_returns: AgentReturns


def load_trees(
    trees: Mapping[str, Tree],
    into: Mapping[str, tuple[Actor, EnvToModule]],
    *,
    missing_ok: bool = False,
) -> None:
    """Load a checkpoint of this run into policies and their connectors.

    Args:
        trees: as `playing_trees` returns them.
        into: by module id.
        missing_ok: modules that are not in the checkpoint stay as they are.

        Raises:
            ValueError: a module is missing, or its part does not fit.
    """
    for module_id, (policy, connectors) in into.items():
        tree: Any = trees.get(module_id)
        if tree is None and missing_ok:
            continue
        if tree is None:
            raise ValueError(f"the checkpoint to play has no weights of module {module_id!r}")
        load_tree(module_id, tree, policy, connectors)


def load_tree(module_id: str, tree: Any, policy: Actor, connectors: EnvToModule) -> None:
    """Load a module's part of a checkpoint into policy and connectors.

    Raises:
        ValueError: weights of the module are missing, or do not fit.
    """
    weights = tree[WEIGHTS]
    if missing := [name for name in policy.names if name not in weights]:
        raise ValueError(
            f"the checkpoint of module {module_id!r} is another module's: it has no "
            f"{', '.join(missing)}"
        )
    policy.load({name: weights[name] for name in policy.names})
    if learned := check(tree[CONNECTORS]):
        connectors.set_state(learned)


class Episode(NamedTuple):
    """One whole episode that was played.

    Attributes:
        env: its environment.
        number: of the episode in its environment, or among all if the episodes that begin first
            are played.
        total: undiscounted return, summed over all agents.
        length: number of environment steps.
        returns: [A] undiscounted return of each agent; NaN if it did not act.
        steps: [A] number of actions of each agent.
    """

    env: int
    number: int
    total: float
    length: int
    returns: NDArray[np.float64]
    steps: NDArray[np.intp]


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
        episodes: at least 1.
        seed: of the environments.
        watch: called after each step with the number of finished episodes and of steps so far.
        most_steps: maximum environment steps of an episode; an episode that reaches it counts with
            its rewards so far, and later steps count as another episode. 0: no limit.
        first_that_begin: play the episodes that begin first, instead of shares.

    Raises:
        EnvironmentFailed: an environment failed, or a return was not finite in float32.
    """
    count, agents = envs.num_envs, len(envs.agents)
    limit = np.full(count, episodes) if first_that_begin else shares(episodes, count)  # [N]
    numbers = np.zeros(count, np.intp)  # [N] of the running episodes
    counted = np.zeros(count)  # [N] of the running episode's return
    counted_of = np.zeros((count, agents))  # [N, A] the same, of each agent's
    steps = np.zeros((count, agents), np.intp)  # [N, A] actions that are not counted yet
    of_slots = steps.reshape(-1)  # [N * A] the same memory
    lengths = np.zeros(count, np.intp)  # [N] environment steps that are not counted yet
    running = np.zeros(count, np.bool_)  # [N]
    begun = done = step = 0
    turn = envs.reset(seed)
    while done < episodes:
        if first_that_begin:
            numbers[turn.began] = begun + np.arange(len(turn.began))
            begun += len(turn.began)
        for group in turn.groups:
            of_slots[group.acting] += 1
        running[turn.began] = True
        turn = envs.step(act(turn))
        step += 1
        stepped = slice(None) if turn.stepped is None else turn.stepped
        lengths[stepped] += running[stepped]
        running[turn.over] = False
        rows, so_far, so_far_of = turn.over, turn.env_returns, turn.agent_returns  # [L, ...]
        if most_steps:
            for group in turn.groups:  # an agent that ends may have acted before the last limit
                of_slots[group.ended] = np.maximum(of_slots[group.ended], 1)
            reached = np.setdiff1d(np.flatnonzero(lengths == most_steps), rows)  # [R]
            returns, of_each = envs.returns()  # [N], [N, A]
            returns[rows], of_each[rows] = so_far, so_far_of
            rows = np.union1d(rows, reached)  # [L + R]
            so_far, so_far_of = returns[rows], of_each[rows]
        found: list[Episode] = []
        if len(rows):
            acted = steps[rows] > 0  # [L, A]
            of_agents = np.where(acted, so_far_of - counted_of[rows], np.nan)  # [L, A]
            totals = (so_far - counted[rows]).tolist()
            for k, (row, total) in enumerate(zip(rows.tolist(), totals, strict=True)):
                if numbers[row] < limit[row]:
                    at = row, int(numbers[row])
                    mine, own_steps = of_agents[k], steps[row].copy()  # [A] both
                    found.append(Episode(*at, total, int(lengths[row]), mine, own_steps))
                    for each in (total, *mine[acted[k]].tolist()):
                        check_return(row, each)
            if not first_that_begin:
                numbers[rows] += 1
            continues = ~np.isin(rows, turn.over) if most_steps else False  # [L]
            counted[rows] = np.where(continues, so_far, 0)
            kept = np.where(acted, so_far_of, counted_of[rows])  # [L, A]
            counted_of[rows] = np.where(continues, kept.T, 0).T
            steps[rows], lengths[rows] = 0, 0
        done += len(found)
        if watch is not None:
            watch(done, step)
        if found:
            yield found


def _played(
    ended: Iterator[list[Episode]],
    episodes: int,
    goal: Goal | None,
    see: Callable[[Episode], None] = lambda _: None,
) -> PlayedEpisodes:
    """Collect an evaluation's episodes, until its goal is out of reach."""
    every: list[Episode] = []
    for found in ended:
        every += found
        for episode in found:
            see(episode)
        if goal is not None and goal.out_of_reach([each.total for each in every], episodes):
            break
    every.sort(key=lambda each: each.env)  # stable, so by time in each environment
    return PlayedEpisodes([each.total for each in every], [each.length for each in every], {})


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
        goal: stop as soon as it is out of reach.
        explore: draw actions as in training, instead of taking the most likely ones.

        Raises:
        EnvironmentFailed: as `whole_episodes`.
    """
    connectors = policy.connectors or EnvToModule({}, {}, env.single_observation_space)
    seen = connectors.observation_space
    legal = LegalActions.of(seen, env.single_action_space, "an evaluation")
    choices = ObservedChoices(seen, "an evaluation")
    step = -1

    def place(row: int, *_: int) -> tuple[int, int]:
        return row, step

    def act(turn: Turn) -> list[Any]:
        nonlocal step
        step += 1
        (group,) = turn.groups
        if step:
            policy.rewarded(group.rewards)
        tree: Any = choices.through(connectors, group.observations, place)  # [N, ...]
        choices.require(tree, place)
        if legal is not None:
            legal.require(tree[ACTION_MASK], step, over=group.idle)
        return [policy.act(tree, first=group.first, explore=explore, keep=False).sent]

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
        modules: play all agents.
        episodes, seed, watch, most_steps: as in `whole_episodes`.
        goal: stop as soon as it is out of reach.
        line_ups: decides which modules play each episode, from the same seed; None: each module
            always plays its agents. A sampler that uses it must be reset afterwards.

    Raises:
        EnvironmentFailed: as `whole_episodes`.
    """
    from juggler.envrunner.multi_agent.line_up import Players
    from juggler.envrunner.multi_agent.module_slots import merged_actions

    agent_returns: AgentReturns = {}
    played_by = {agent: each.role.module_id for each in modules for agent in each.role.agents}
    players = Players(envs.num_envs, envs.agents, played_by)
    if line_ups is not None:
        line_ups.reset(seed)

    def act(turn: Turn) -> list[Any]:
        if line_ups is not None and len(turn.began):
            line_up = line_ups.begin(turn.began)
            players.line_up(line_up)
            for slots in modules:
                slots.line_up(line_up)
        parts: list[list[tuple[ModuleSlots, Any]]] = [[] for _ in turn.groups]
        for slots in modules:
            group = slots.role.group
            parts[group].append((slots, slots.act_deterministically(turn.groups[group])))
        groups = zip(turn.groups, envs.groups, parts, strict=True)
        return [merged_actions(turn, group.action_space, part) for turn, group, part in groups]

    def see(episode: Episode) -> None:
        here = players.of(np.array([episode.env]))  # [1, A]
        add_returns(agent_returns, envs.agents, episode.returns[None], here)

    ended = whole_episodes(envs, act, episodes, seed, watch, most_steps=most_steps)
    return _played(ended, episodes, goal, see)._replace(agent_returns=agent_returns)
