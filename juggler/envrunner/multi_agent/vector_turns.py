"""Adapts games that step N environments as arrays to `MultiAgentEnvs`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from juggler.envrunner.environments.action_masks import LegalActions
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.failures import EnvironmentFailed, failures_of
from juggler.envrunner.info_numbers import arrays_in
from juggler.envrunner.multi_agent.critics import (
    joined,
    joint_space,
    no_state,
)
from juggler.envrunner.multi_agent.slot_books import BrokenRule, SlotBooks, SlotResults
from juggler.envrunner.multi_agent.turns import (
    ALL_OBSERVATIONS,
    STATE,
    AgentGroup,
    CriticObservations,
    GroupTurn,
    Turn,
)
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv, VectorStep
from juggler.runtime.modules.columns import without_mask
from juggler.runtime.wire.structures import (
    from_tree,
    put,
    space_leaves,
    take,
    to_tree,
    tree_map,
    zeros,
)
from juggler.runtime.wire.trees import Tree, flatten, path_name, unflatten

Bools = NDArray[np.bool_]


class VectorTurns:
    """A `MultiAgentVectorEnv` as `MultiAgentEnvs`, without a loop over environments or agents.

    Args:
        critics_see: values of `critic_sees` that turns must have.

    Raises:
        ValueError: the action mask in its observations does not fit the actions, or the game
            has no state for a critic.
        UnsupportedSpace: a space has no encoding.
    """

    def __init__(
        self, env: MultiAgentVectorEnv, name: str, critics_see: Collection[str] = ()
    ) -> None:
        self._env = env
        self._name = name
        self._all_of_them = f"one of {env.num_envs} environments ({name})"
        self.num_envs = env.num_envs
        self.agents = tuple(env.agents)
        self._shape = (self.num_envs, len(self.agents))  # [N, A]
        self._slots = self.num_envs * len(self.agents)
        self.groups: tuple[AgentGroup, ...] = (
            AgentGroup(self.agents, env.observation_space, env.action_space),
        )
        LegalActions.of(env.observation_space, env.action_space)
        self._leaves = space_leaves(env.observation_space)
        # Of observations that are one array [N, A, ...].
        self._plain = [
            (leaf.dtype, (*self._shape, *(leaf.shape or ())))
            for path, leaf in self._leaves
            if not path
        ]
        # Critics that no module has cost nothing.
        spaces: dict[str, Space[Any]] = {}
        if ALL_OBSERVATIONS in critics_see:
            self._observed = without_mask(env.observation_space)
            joint = joint_space(self._observed, len(self.agents))
            spaces[ALL_OBSERVATIONS] = joint
        if STATE in critics_see:
            if env.state_space is None:
                raise ValueError(no_state(name))
            space_leaves(env.state_space)  # raises if it has no encoding
            spaces[STATE] = env.state_space
        self.critic_spaces: Mapping[str, Space[Any]] = spaces
        self._books = SlotBooks(self.num_envs, self.agents)
        self._acting = np.zeros(0, np.intp)  # [B] slots
        self._acts = b""  # flags of the agents that act next
        # Flags of steps in which no agent ends: not set, or only set for ended agents.
        self._no_ends = [bytes(2 * self._slots), b""]
        self._not_first = np.zeros(0, np.bool_)  # [B]
        self._running = np.ones(self.num_envs, np.bool_)  # [N]

    def reset(self, seed: int) -> Turn:
        # Like other vectors, it takes one seed and derives the rest from it.
        observations, acting = self._begin(
            environment_seeds(seed, 1)[0], np.ones(self.num_envs, np.bool_)
        )
        self._acting = np.flatnonzero(acting)  # [B]
        self._running[:] = True
        self._not_first = np.zeros(len(self._acting), np.bool_)
        booked = self._books.reset(self._acting)
        none = np.zeros(0, np.intp)
        seen = self._seen_by_critics(observations, np.ravel(acting))
        everywhere = np.arange(self.num_envs)
        # This turn is also the form of turns without ends: see `_same_act`.
        self._first = self._turn(
            observations, booked, none, booked.last, _rows(observations, none), everywhere, none
        )
        self._first.critics = {kind: CriticObservations(now, now) for kind, now in seen.items()}
        self._acts, self._no_ends[1] = acting.tobytes(), b""
        return self._first

    def step(self, actions: Sequence[Any]) -> Turn:
        (batch,) = actions
        every = self._spread(batch)
        with failures_of(self._all_of_them, "step"):
            step = VectorStep(*self._env.step(every))
        shown, rewards, terminated, truncated, acting, given = step
        observations = self._checked(shown, "step")
        self._check_shapes(
            "step", rewards=rewards, terminated=terminated, truncated=truncated, acting=acting
        )
        # Copies, because environments that begin an episode may reuse the memory.
        rewards = np.array(rewards, np.float64).ravel()  # [N * A]
        infos, unread = self._read(given)
        turn = self._after(observations, rewards, terminated, truncated, acting)
        turn.infos, turn.unread = infos, unread
        return turn

    def _after(
        self,
        observations: Tree,
        rewards: NDArray[np.float64],
        terminated: Bools,
        truncated: Bools,
        acting: Bools,
    ) -> Turn:
        """Return the turn after a step.

        Args:
            observations: [N, A, ...]
            rewards: [N * A], a copy.
            terminated: [N, A]
            truncated: [N, A]
            acting: [N, A]
        """
        ends = terminated.tobytes() + truncated.tobytes()
        if ends in self._no_ends and acting.tobytes() == self._acts:
            return self._same_act(observations, acting, rewards)
        ended = ((terminated | truncated).ravel() & ~self._books.ended).nonzero()[0]  # [E]
        # Before `_begin`, because the next episodes may use the same memory.
        last_observations = _kept(observations, ended)
        ended_terminated = terminated.ravel()[ended]  # [E]
        running: Bools = np.logical_or.reduce(acting, 1)  # [N]
        gone = (self._running & ~running).nonzero()[0]  # [L]
        at_end: dict[str, Tree] = {}
        if self.critic_spaces and len(ended):
            there = np.array(acting).ravel()  # [N A]
            there[ended] = True
            at_end = self._seen_by_critics(observations, there)
        began = gone  # [K]
        # Under NEXT_STEP, an ended game acts once more before it begins.
        if self._env.autoreset_mode == AutoresetMode.NEXT_STEP:
            began = (~self._running).nonzero()[0]
            self._must_act(running | self._running, "step")
            self._running = running
        elif len(gone):
            observations, acting = self._begin(None, ~running)
        now = self._seen_by_critics(observations, np.ravel(acting))
        critics = {kind: CriticObservations(now[kind], at_end.get(kind, now[kind])) for kind in now}
        # The fast path must not skip the begin of an episode.
        acts = acting.tobytes() if self._running.all() else b""
        self._acts, self._no_ends[1] = acts, b"" if len(gone) else ends
        self._acting = acting.ravel().nonzero()[0]  # [B]
        self._not_first = np.zeros(len(self._acting), np.bool_)
        try:
            booked = self._books.step(rewards, ended, gone, began, self._acting)
        except BrokenRule as error:
            raise self._failure(error.env, "step", error.reason) from None
        turn = self._turn(
            observations, booked, ended, ended_terminated, last_observations, began, gone
        )
        turn.critics = critics
        return turn

    def _turn(
        self,
        observations: Tree,
        booked: SlotResults,
        ended: NDArray[np.intp],
        terminated: Bools,
        last_observations: Tree,
        began: NDArray[np.intp],
        over: NDArray[np.intp],
    ) -> Turn:
        """Assemble a turn.

        Args:
            observations: [N, A, ...]
            ended: [E] slots, of which some may not have acted.
            terminated: [E]
            last_observations: [E, ...]
            began: [K] environments.
            over: [L] environments.
        """
        last = booked.last  # [E]
        # An agent that never acted has no last action.
        if np.count_nonzero(last) < len(last):
            ended, terminated = ended[last], terminated[last]
            last_observations = take(last_observations, last)
        group = GroupTurn(
            acting=self._acting,
            observations=_rows(observations, self._acting),
            first=booked.first,
            rewards=booked.rewards,
            ended=ended,
            last_observations=last_observations,
            last_rewards=booked.last_rewards[last],
            terminated=terminated,
        )
        ended_with = booked.env_returns, booked.env_lengths, booked.agent_returns
        return Turn((group,), began, over, *ended_with)

    def _same_act(self, observations: Tree, acting: Bools, rewards: NDArray[np.float64]) -> Turn:
        """Return the turn after a step without ends, with the same slots."""
        try:
            of_acting = self._books.step_without_ends(rewards)  # [B]
        except BrokenRule as error:
            raise self._failure(error.env, "step", error.reason) from None
        critics: dict[str, CriticObservations] = {}
        if self.critic_spaces:
            now = self._seen_by_critics(observations, np.ravel(acting))
            critics = {kind: CriticObservations(seen, seen) for kind, seen in now.items()}
        # Empty arrays are used again, because making them takes longer than a step's books.
        first = self._first  # no agent ended in it either
        (blank,) = first.groups
        group = GroupTurn(
            self._acting,
            _rows(observations, self._acting),
            self._not_first,
            of_acting,
            blank.ended,
            blank.last_observations,
            blank.last_rewards,
            blank.terminated,
        )
        none = first.over
        ended_with = first.env_returns, first.env_lengths, first.agent_returns
        return Turn((group,), none, none, *ended_with, critics)

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._books.returns()

    def overdue(self, steps: int) -> str:
        remedy = "it has to truncate its episodes, perhaps with max_episode_steps in env_kwargs"
        return self._books.overdue(steps, self._name, remedy)

    def close(self) -> None:
        self._env.close()

    def _begin(self, seed: int | None, which: Bools) -> tuple[Tree, Bools]:
        with failures_of(self._all_of_them, "reset"):
            shown, acting = self._env.reset(seed, which)
        observations = self._checked(shown, "reset")
        self._check_shapes("reset", acting=acting)
        self._must_act(np.logical_or.reduce(acting, 1), "reset")
        return observations, acting

    def _must_act(self, acts: Bools, call: str) -> None:
        """Check that an agent acts in each new episode."""
        if len(idle := np.flatnonzero(~acts)):
            raise self._failure(int(idle[0]), call, "no agent is acting after the reset")

    def _seen_by_critics(self, observations: Tree, there: Bools) -> dict[str, Tree]:
        """Copy what critics see [N, ...], from present slots [N A]."""
        seen: dict[str, Tree] = {}
        if STATE in self.critic_spaces:
            with failures_of(self._all_of_them, "state"):
                state = self._env.state()
            space = self.critic_spaces[STATE]
            states = self._fitting(state, space, (self.num_envs,), "state", "states")
            seen[STATE] = tree_map(np.copy, states)
        if ALL_OBSERVATIONS in self.critic_spaces:
            blank = zeros(self._observed, (self._slots,))  # [N A, ...]
            put(blank, slots := np.flatnonzero(there), _kept(observations, slots))
            seen[ALL_OBSERVATIONS] = joined(self._observed, blank, len(self.agents))
        return seen

    def _spread(self, batch: Any) -> Any:
        """Spread acting agents' actions [B, ...] to all agents: [N, A, ...]."""
        space = self.groups[0].action_space

        if isinstance(batch, np.ndarray) and len(batch) == self._slots:
            return batch.reshape(*self._shape, *batch.shape[1:])

        def spread(acted: Any) -> NDArray[Any]:
            acted = np.asarray(acted)
            every: NDArray[Any] = acted
            if len(acted) < self._slots:
                every = np.zeros((self._slots, *acted.shape[1:]), acted.dtype)
                every[self._acting] = acted
            return every.reshape(self.num_envs, len(self.agents), *acted.shape[1:])

        return from_tree(space, tree_map(spread, to_tree(space, batch)))

    def _checked(self, observations: Any, call: str) -> Tree:
        """Check observations [N, A, ...]."""
        if (
            isinstance(observations, np.ndarray)
            and (observations.dtype, observations.shape) in self._plain
        ):
            return observations
        space = self.groups[0].observation_space
        return self._fitting(observations, space, self._shape, call, "observations")

    def _fitting(
        self, values: Any, space: Space[Any], leading: tuple[int, ...], call: str, what: str
    ) -> Tree:
        """Check values of a space [*leading, ...]."""
        of_space = space_leaves(space)
        try:
            given = dict(flatten(tree_map(np.asarray, values)))
            arrays = [(path, given[path]) for path, _ in of_space]
        except (KeyError, TypeError) as error:
            reason = f"its {what} have other parts than {space}: {error!r}"
            raise EnvironmentFailed(self._all_of_them, call, reason) from None
        # NumPy would repeat a missing axis, and truncate numbers.
        for (path, leaf), (_, array) in zip(of_space, arrays, strict=True):
            shape = (*leading, *(leaf.shape or ()))
            if array.shape != shape or not np.can_cast(
                array.dtype, np.dtype(leaf.dtype), "same_kind"
            ):
                part = f" at {path_name(path)}" if path else ""
                reason = (
                    f"its {what}{part} are {array.dtype} of shape {list(array.shape)}, and "
                    f"must be {leaf.dtype} of shape {list(shape)}"
                )
                raise EnvironmentFailed(self._all_of_them, call, reason)
        leaves = zip(arrays, of_space, strict=True)
        return unflatten(
            (path, np.asarray(array, leaf.dtype)) for (path, array), (_, leaf) in leaves
        )

    def _check_shapes(self, call: str, **arrays: Any) -> None:
        """Check rewards [N, A] and flags [N, A] bool, by name."""
        shape = self._shape
        for name, array in arrays.items():
            of_numbers = name == "rewards"
            kinds = "biuf" if of_numbers else "b"
            if not (
                isinstance(array, np.ndarray) and array.shape == shape and array.dtype.kind in kinds
            ):
                reason = (
                    f"its {name} must be an array of {'numbers' if of_numbers else 'bool'} with "
                    f"shape {list(shape)}, not {array!r}"
                )
                raise EnvironmentFailed(self._all_of_them, call, reason)

    def _read(self, infos: Any) -> tuple[dict[str, NDArray[Any]], str]:
        """Return numbers in a step's infos, and a description of unread parts."""
        if not isinstance(infos, Mapping):
            reason = f"its infos must be a dict of arrays by name, not {infos!r}"
            raise EnvironmentFailed(self._all_of_them, "step", reason)
        return arrays_in(infos, self._shape)

    def _failure(self, env: int, call: str, reason: str) -> EnvironmentFailed:
        where = f"environment {env} ({self._name})"
        return EnvironmentFailed(where, call, reason)


def _kept(observations: Tree, slots: NDArray[np.intp]) -> Tree:
    """Copy some slots' rows [B, ...]: a next episode may reuse memory."""
    copied: Tree = tree_map(
        lambda array: array.reshape(-1, *array.shape[2:]).take(slots, 0), observations
    )
    return copied


def _rows(observations: Tree, slots: NDArray[np.intp]) -> Tree:
    """Return slots' rows [B, ...] of observations [N, A, ...]; all: views."""

    def rows(array: NDArray[Any]) -> NDArray[Any]:
        every = array.reshape(-1, *array.shape[2:])  # [N * A, ...]
        return every if len(slots) == len(every) else every.take(slots, 0)

    found: Tree = tree_map(rows, observations)
    return found
