"""Observations, actions, rows and batches of the slots that one module plays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.environments.action_masks import (
    LegalActions,
    ObservedChoices,
    find_non_binary,
)
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFiniteBatch, check_finite
from juggler.envrunner.multi_agent.critics import apart_from_critic, space_with_critic, with_critic
from juggler.envrunner.multi_agent.line_up import LineUp, Role
from juggler.envrunner.multi_agent.turns import AgentGroup, CriticObservations, GroupTurn, Turn
from juggler.envrunner.paced_slots import PacedSlots, oldest_version
from juggler.envrunner.rounds import FrozenResult, TrainedResult
from juggler.runtime.acting.actor import Actor, random_actor
from juggler.runtime.connectors.connector import NonFiniteObservation
from juggler.runtime.connectors.mergeable_state import State, merge
from juggler.runtime.episodes.batch import MOST_REWARD
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import (
    from_tree,
    put,
    take,
    to_tree,
    zeros,
)
from juggler.runtime.wire.trees import Tree


class ModuleSlots:
    """Acts with one module in N environments, and collects its steps.

    A slot is one agent in one environment, as in `GroupTurn`. The slots that this module may play
    have places 0..P-1 here, in ascending order. With line-ups, the module plays only some of them
    at a time; see `line_up`.

    Args:
        num_envs: N.
        agents: all agents of an environment, A of them.
        steps: T, of a row.
        row_age: see `PacedSlots`. 0: a row ends with its round.
        critic_sees: what its value function sees: a key of `Turn.critics`, or "observation", as
            the agents.
        critic_space: of what its value function sees; None: of "observation".
    """

    def __init__(
        self,
        role: Role,
        num_envs: int,
        agents: tuple[str, ...],
        policy: Actor,
        steps: int,
        row_age: int,
        critic_sees: str = "observation",
        critic_space: Space[Any] | None = None,
    ) -> None:
        self.role, self.policy = role, policy
        self.connectors = connectors = policy.connectors
        self.critic_sees, self.critic_space = critic_sees, critic_space
        self._agents = agents
        within = np.array([agents.index(agent) for agent in role.agents], np.intp)  # [agents]
        slots = np.arange(num_envs)[:, None] * len(agents) + within  # [N, agents]
        self._slots: NDArray[np.intp] = slots.ravel()  # [P] by place
        self.most_rows = len(self._slots)  # maximum number of rows in a batch: one per slot
        self._place_of = np.full(num_envs * len(agents), -1, np.intp)  # [N A] by slot
        self._place_of[self._slots] = np.arange(self.most_rows)
        self._places = self._place_of.copy()  # [N A] for any line-up
        self._plays_whole_group = role.agents == role.spaces.agents
        # Rows also hold what the critic sees.
        kept = space_with_critic(connectors.observation_space, critic_space)
        self._paced = PacedSlots(kept, policy, steps, row_age, self.most_rows)
        self._row_age = row_age
        spaces = role.spaces
        self._legal = LegalActions.of(connectors.observation_space, spaces.action_space)
        self._choices = ObservedChoices(connectors.observation_space, "", self._named)
        # [B, ...] observations of the agents that act next, as in batches; and with critics'.
        self._seen: Any = None
        self._kept: Any = None
        self._first = np.zeros(0, np.bool_)  # [B] of these, whether their episode begins
        self._delta: State = {}
        self._watched: list[NDArray[np.bool_]] = []  # [B] by turn, rows that connectors learn from
        self._turns = 0  # of this round
        self._not_finite: NonFiniteBatch | None = None
        self.acting = np.zeros(0, np.intp)  # [B] places of the agents that act next
        # [B] their indices among the agents of their group that act next; a slice if all of the
        # group belong to this module.
        self.where: NDArray[np.intp] | slice = slice(None)
        self._version = Version(0, 0)
        self.is_seated = True  # the module plays somewhere now
        self._shown: NDArray[np.intp] | None = None  # the slots that `acting` was computed from

    @classmethod
    def at_random(
        cls, role: Role, num_envs: int, agents: tuple[str, ...], steps: int, seed: int
    ) -> ModuleSlots:
        """Make the slots of the module "random", which draws legal actions."""
        spaces = role.spaces
        policy = random_actor(spaces.observation_space, spaces.action_space, seed)
        return cls(role, num_envs, agents, policy, steps, 0)

    def forget(self) -> None:
        """Drop all rows and running episodes."""
        self._paced.forget()
        self._shown = None
        self.connectors.forget()
        self._delta, self._watched, self._not_finite = {}, [], None

    def begin(self, version: Version) -> None:
        """Begin a round with these weights, and end outdated rows."""
        self._version, self._turns = version, 0
        self._paced.use(version)

    def line_up(self, line_up: LineUp) -> None:
        """Play this module's slots in these environments until the episodes end."""
        self._plays_whole_group = False
        mine = line_up.players == self.role.module_id  # [K * A]
        if not self.is_seated and not mine.any():
            return
        self._shown = None
        self._place_of[line_up.slots] = np.where(mine, self._places[line_up.slots], -1)
        self.is_seated = bool((self._place_of >= 0).any())

    def deactivate(self) -> None:
        """Play no slot until the next line-up."""
        self._plays_whole_group = self.is_seated = False
        self._place_of.fill(-1)
        self._shown = None

    def receive(
        self,
        turn: GroupTurn,
        collected: bool,
        line_up: LineUp | None = None,
        critic: CriticObservations | None = None,
    ) -> None:
        """Take the last step's results, and the slots that act next.

        Args:
            collected: connectors learn from the agents' observations.
            line_up: of the episodes that begin with this turn; None: no change.
            critic: what the module's critic sees of the environments; None: only what agents see.
        """
        paced, self._turns = self._paced, self._turns + 1
        together = paced.together and turn.acting is self._shown and line_up is None
        # Faster without looking up rows, if all slots act in each turn.
        if not together:
            paced.split()
        ended: NDArray[np.intp] = turn.ended  # [E] places
        truncated, lasts, last_rewards = turn.terminated, turn.last_observations, turn.last_rewards
        if len(ended):
            ended, mine = self._mine(ended)
            last_rewards, truncated = turn.last_rewards[mine], ~turn.terminated[mine]  # [E] both
            if len(ended):
                lasts = take(turn.last_observations, mine)  # [E, ...]
                lasts = self._through(self.connectors, lasts, ended)
                if critic is not None:
                    lasts = with_critic(lasts, take(critic.at_end, self._environments(ended)))
        if line_up is not None:  # the ends above are of earlier episodes
            self.line_up(line_up)
        # The same array means the same slots, so nothing needs to be looked up.
        if turn.acting is not self._shown:
            self.acting, self.where = self._mine(turn.acting)
            self._shown = turn.acting
        kept: Any = None
        if len(self.acting):
            seen = self._stored(take(turn.observations, self.where), collected)  # [B, ...]
            self._seen = kept = seen
            if critic is not None:
                kept = with_critic(kept, take(critic.now, self._environments(self.acting)))
            self._kept, self._first = kept, turn.first[self.where]  # [B, ...], [B]
        if not together:
            self._receive_apart(turn, kept, ended, last_rewards, truncated, lasts)
            return
        # In this form, ends and rewards are of all places.
        rewards = turn.rewards[self.where]  # [B]
        if not collected:  # no batch will be checked for them
            rewards = self._finite(self.acting, rewards)  # [B]
            last_rewards = self._finite(ended, last_rewards)  # [E]
        paced.add_results_together(rewards, kept, ended, last_rewards, truncated, lasts)

    def _receive_apart(
        self,
        turn: GroupTurn,
        kept: Tree,
        ended: NDArray[np.intp],
        last_rewards: NDArray[np.float64],
        truncated: NDArray[np.bool_],
        lasts: Tree,
    ) -> None:
        """Take a turn in which only some agents act.

        Args:
            kept: [B, ...] observations of the agents that act next, in the form of rows.
            ended: [E] places.
            last_rewards: [E]
            truncated: [E]
            lasts: [E, ...] last observations, in the form of rows.
        """
        paced, places = self._paced, self.acting
        first, rewards = turn.first[self.where], turn.rewards[self.where]  # [B] both
        # From before the first action: of the episode's return alone.
        early = places[first], rewards[first]
        if len(early[0]):
            places, rewards = places[~first], rewards[~first]
        if len(ended):
            places = np.concatenate((ended, places))
            rewards = np.concatenate((last_rewards, rewards))
        if len(places):
            paced.add_rewards(places, self._finite(places, rewards))
        if len(ended):
            finals = take(lasts, truncated) if np.count_nonzero(truncated) else lasts
            paced.end(ended, truncated, finals)
            paced.observe(ended, lasts)
        # After the ends, which may be of the episodes before.
        if len(early[0]):
            paced.of["return"][early[0]] += self._finite(*early)
        if len(self.acting):
            paced.observe(self.acting, kept)

    def _finite(self, places: NDArray[np.intp], rewards: NDArray[np.float64]) -> Any:
        """Replace a reward [B] that ends the round by 0."""
        finite = np.abs(rewards) <= MOST_REWARD  # [B] false with a NaN
        if np.count_nonzero(finite) == len(finite):
            return rewards
        self._paced.settle()
        at = int(finite.argmin())
        place = int(places[at])
        step, length = (int(self._paced.of[name][place]) for name in ("step", "length"))
        self._not_finite = self._lost(
            place, step, "rewards", 0, value=float(rewards[at]), episode_step=length
        )
        return np.where(finite, rewards, 0)  # [B]

    def act(self, collected: bool) -> Any:
        """Let the module act -> actions, in the order of `acting`."""
        paced = self._paced
        if self._legal is not None:
            self._check_masks(self._legal, self._seen[ACTION_MASK])
        if not collected:
            paced.pause(self.acting)
        if len(self.acting) == self.most_rows and paced.gather():
            return paced.act_together(self._seen, self._kept, self._first, collected)
        return paced.act(self.acting, collected, self._seen, self._kept)

    def act_only(self, turn: GroupTurn, explore: bool) -> Any:
        """Act without collecting -> actions in the order of `acting`.

        Replaces `receive` and `act`.
        """
        self.acting, self.where = self._mine(turn.acting)
        self._shown = None
        if not len(self.acting):
            return None
        seen = self._through(self.connectors, take(turn.observations, self.where), self.acting)
        if self._legal is not None:
            self._check_masks(self._legal, seen[ACTION_MASK])
        first = turn.first[self.where]  # [B]
        if not first.all():
            self.policy.rewarded(turn.rewards[self.where][~first], self.acting[~first])
        return self.policy.act(seen, self.acting, first, explore=explore, keep=False).sent

    def result(self) -> TrainedResult | NonFiniteBatch:
        """Return the batch of this round: the oldest complete rows."""
        paced, rows = self._paced, self._paced.rows
        self._learn()
        if not self._row_age:
            paced.flush_all()
        paced.drop_stale()
        stale = paced.counts.pop("steps_stale", 0)
        ended = paced.pop_ended()
        if self._not_finite is not None:
            return self._not_finite
        block = paced.blocks.pop(0) if paced.blocks else None
        taken = [] if block else rows.complete[: self.most_rows]
        if not (block or taken):
            return TrainedResult(None, self._version, *ended, stale_steps=stale)
        # Log-probabilities are computed for the whole batch at once.
        logp = self.policy.log_probabilities
        batch = block.batch(logp) if block else rows.batch(len(taken), logp)
        if self.critic_space is not None:
            batch = apart_from_critic(batch)
        try:
            check_finite(batch)
        except NonFiniteBatch as error:
            # The error names a row of the batch: find its agent.
            place, why = error.environment, ""
            inputs: Any = block.inputs if block else rows.columns["inputs"].swapaxes(0, 1)
            if not block:
                place = int(rows.columns["places"][row := taken[place]])
            if error.column == "action_logp":
                why = self.policy.why_not_finite(inputs[error.step][place if block else row])
            at = place, error.step, error.column
            return self._lost(*at, batch.live_steps, why, error.value, error.episode_step)
        delta, self._delta = self._delta, {}
        return TrainedResult(batch, oldest_version(batch), *ended, delta, stale)

    def played(self) -> FrozenResult:
        """Return the steps of an untrained module since the last call.

        Raises:
            NonFiniteBatch: a reward was not finite.
        """
        if self._not_finite is not None:
            raise self._not_finite
        return FrozenResult(self._paced.counts.pop("steps", 0), *self._paced.pop_ended())

    def skip(self) -> None:
        """Drop the returns of a round that was not collected."""
        self._paced.pop_ended()

    def _environments(self, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the environments [B] of places [B]."""
        environments: NDArray[np.intp] = self._slots[places] // len(self._agents)
        return environments

    def _mine(self, slots: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp] | slice]:
        """Return the module's places among slots, and their indices."""
        places = self._place_of[slots]
        if self._plays_whole_group:
            return places, slice(None)
        mine = np.flatnonzero(places >= 0)
        return places[mine], mine

    def _stored(self, shown: Tree, collected: bool) -> Any:
        """Convert observations [B, ...] to the form of batches."""
        if not collected or not self.connectors.learns:
            return self._through(self.connectors, shown, self.acting)
        count = len(self.acting)
        if self._watched and len(self._watched[-1]) != count:
            self._learn()
        stored = self._through(self.connectors.watch, shown, self.acting)
        self._watched.append(np.ones(count, np.bool_))
        return stored

    def _learn(self) -> None:
        """Collect what connectors have learned from the turns that they watched."""
        watched, self._watched = self._watched, []
        if not watched:
            return
        try:
            delta = self.connectors.take_delta(np.stack(watched, 1))  # of [B, turns]
            self._delta = merge(self._delta, delta) if self._delta else delta
        except NonFiniteObservation as error:
            # A connector that clips may have hidden the number from `check_finite`.
            step = self._turns - len(watched) + error.step
            self._not_finite = self._lost(int(self.acting[error.row]), step, "observations", 0)

    def _through(
        self, connectors: Callable[[Tree], Any], shown: Tree, places: NDArray[np.intp]
    ) -> Any:
        """Apply connectors to the observations [B, ...] at places [B]."""

        def place(row: int, *_: int) -> tuple[int, int]:
            return int(places[row]), 0

        stored = self._choices.through(connectors, shown, place)
        self._choices.require(stored, place)
        return stored

    def _lost(
        self,
        place: int,
        step: int,
        column: str,
        live_steps: int,
        why: str = "",
        value: float | None = None,
        episode_step: int | None = None,
    ) -> NonFiniteBatch:
        slot = int(self._slots[place])
        environment, agent = slot // len(self._agents), self._agents[slot % len(self._agents)]
        return NonFiniteBatch(
            environment, step, column, live_steps, why, agent, value, episode_step
        )

    def _check_masks(self, legal: LegalActions, masks: Any) -> None:
        """Check the masks of agents that act next."""
        for _, has_one in legal.has_legal_action(masks):
            if not has_one.all():
                reason = "its action mask has no legal action where it is to act"
                where = self._named(self.acting[has_one.argmin()])
                raise EnvironmentFailed(where, "step", reason)
        if found := find_non_binary(masks):
            (at, *_), what = found
            raise EnvironmentFailed(self._named(self.acting[at]), "step", what)

    def _named(self, place: int) -> str:
        """Name the agent at a place, for messages."""
        slot = int(self._slots[place])
        agent = self._agents[slot % len(self._agents)]
        return f"agent {agent!r} of environment {slot // len(self._agents)}"


def merged_actions(
    turn: Turn, groups: Sequence[AgentGroup], acted: Iterable[tuple[ModuleSlots, Any]]
) -> list[Any]:
    """Merge the actions of modules by group, for `MultiAgentEnvs.step`."""
    by_group: list[list[tuple[ModuleSlots, Any]]] = [[] for _ in groups]
    for slots, sent in acted:
        if len(slots.acting):
            by_group[slots.role.group].append((slots, sent))
    merged: list[Any] = []
    for part, group, acts in zip(turn.groups, groups, by_group, strict=True):
        if len(acts) == 1:  # nothing is copied
            merged.append(acts[0][1])
            continue
        space = group.action_space
        every = zeros(space, (len(part.acting),))  # [B, ...]
        for slots, sent in acts:
            put(every, slots.where, to_tree(space, sent))
        merged.append(from_tree(space, every))
    return merged
