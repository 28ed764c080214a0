"""A log of the steps of a round, which go into rows when the round is over."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.paced.logged_round import BadNumber, Entries, write_round
from juggler.envrunner.paced.slots import PacedSlots
from juggler.runtime.acting.actor import Actor
from juggler.runtime.wire.structures import grown, put, take, tree_map, zeros
from juggler.runtime.wire.trees import Tree

_FIRST_ENTRIES = 256

Bools = NDArray[np.bool_]
Indices = NDArray[np.intp]
Rewards = NDArray[np.floating[Any]]


class StepLog:
    """What agents did in a round, in the order in which it happened.

    `PacedSlots` writes every step into its row at once, which takes some forty small operations for
    any number of agents. Where nobody looks at rows during a round, this log takes a few copies for
    each step, and `write` brings all of them into rows: the same rows as those calls make.

    An entry is an agent that was told the reward of its last action, unless it was told before, and
    saw an observation. Then it acts, or its episode has ended.

    Args:
        slots: whose rows are written, and whose episodes run there.
        observation_space: of the observations in batches.
        policy: acts for the agents.
    """

    def __init__(self, slots: PacedSlots, observation_space: Space[Any], policy: Actor) -> None:
        self._slots, self._policy = slots, policy
        self._observations: Any = zeros(observation_space, (_FIRST_ENTRIES,))  # [L, ...]
        self._capacity = _FIRST_ENTRIES  # L
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._count = 0  # K, entries
        self._waiting = 0  # the last of them, whose agents have not acted yet
        self._kept = 0  # the first of them, which were in the last round too
        # Of all entries, a part for each call.
        self._places: list[Indices] = []
        self._rewards: list[Rewards] = []
        # The entry with which a part begins, and for each of its entries:
        self._untold: list[tuple[int, Bools]] = []  # it is told no reward
        self._firsts: list[tuple[int, Bools]] = []  # it begins an episode
        self._ends: list[tuple[int, Bools]] = []  # its episode was truncated; else terminated
        self._actions: list[Any] = []
        self._inputs: list[NDArray[np.float32]] = []
        self._doubted = -1  # an entry whose observation is not finite
        # Where the policy keeps states: those of rows that begin, and the complete steps [S] of
        # each place, counted from the row with which the round began.
        self._states: list[dict[str, Tree]] = []
        self._steps: Indices | None = None

    def end(self, places: Indices, rewards: Rewards, truncated: Bools, observations: Tree) -> None:
        """The last actions at places [B] were the last of their episodes.

        Args:
            places: of the agents.
            rewards: [B] of those actions.
            truncated: [B]; the others terminated.
            observations: [B, ...] after them.
        """
        self._ends.append((self._count, truncated))
        self._note(places, rewards, observations)
        self._told(places, rewards)

    def show(self, places: Indices, rewards: Rewards, first: Bools, observations: Tree) -> None:
        """Agents at places [B] act next.

        Args:
            places: of the agents.
            rewards: [B] of their last actions.
            first: [B] they begin an episode, and have no last action in it.
            observations: [B, ...] what they see.
        """
        begin = np.count_nonzero(first)
        if begin:
            self._untold.append((self._count, first))
            self._firsts.append((self._count, first))
        self._note(places, rewards, observations)
        self._waiting = len(places)
        if not begin:
            self._told(places, rewards)
        elif begin < len(first):
            self._told(places[~first], rewards[~first])

    def act(self, observations: Tree) -> Any:
        """Let the policy act for those that were shown last -> the actions for environments.

        Args:
            observations: [B, ...] as the policy sees them.
        """
        places, policy = self._places[-1], self._policy
        if self._firsts and self._firsts[-1][0] == self._count - len(places):
            first = self._firsts[-1][1]  # [B]
        else:
            first = np.zeros(len(places), np.bool_)
        sent, actions, inputs = policy.act(observations, places, first)
        self._actions.append(actions)
        self._inputs.append(inputs)
        self._waiting = 0
        if policy.remembers:
            begin = self._complete_steps()[places] % self._slots.rows.steps == 0  # [B]
            self._states.append(policy.states_before(places[begin]))
        return sent

    def doubt(self, row: int) -> None:
        """An observation that is given next is not finite.

        Args:
            row: of these observations.
        """
        self._doubted = self._count + row

    def write(self, recorded: bool) -> BadNumber | None:
        """Write steps into rows. Those who were shown something, and have not acted, stay here.

        Args:
            recorded: else rows end where their agents have acted.

        Returns:
            A number that is not finite; None: there is none.
        """
        if self._count == self._waiting == self._kept:
            return None
        bad = write_round(self._slots, self._entries(), recorded)
        self._keep_waiting()
        return bad

    def _note(self, places: Indices, rewards: Rewards, observations: Tree) -> None:
        begin, end = self._count, self._count + len(places)
        while end > self._capacity:
            self._capacity *= 2
            self._observations = grown(self._observations, self._capacity)
        put(self._observations, slice(begin, end), observations)
        self._places.append(places)
        self._rewards.append(rewards)
        self._count = end

    def _told(self, places: Indices, rewards: Rewards) -> None:
        if self._policy.remembers:
            self._policy.rewarded(rewards, places)
            self._complete_steps()[places] += 1

    def _complete_steps(self) -> Indices:
        if self._steps is None:
            self._steps = self._slots.steps_before(np.arange(len(self._slots.of["row"])))
        return self._steps

    def _entries(self) -> Entries:
        ended, truncated, acts = self._flags(()), self._flags(self._ends), self._flags(())
        acts[: self._count - self._waiting] = True
        for begin, each in self._ends:
            ended[begin : begin + len(each)] = True
            acts[begin : begin + len(each)] = False
        return Entries(
            places=np.concatenate(self._places),
            rewards=np.concatenate(self._rewards),
            told=~self._flags(self._untold),
            first=self._flags(self._firsts),
            ended=ended,
            truncated=truncated,
            acts=acts,
            observations=take(self._observations, slice(self._count)),
            actions=_joined(self._actions),
            inputs=_joined(self._inputs),
            states=_joined([each for each in self._states if each]),
            doubted=self._doubted,
        )

    def _flags(self, parts: list[tuple[int, Bools]] | tuple[()]) -> Bools:
        """[K] flags of parts of the entries; no others."""
        flags = np.zeros(self._count, np.bool_)
        for begin, each in parts:
            flags[begin : begin + len(each)] = each
        return flags

    def _keep_waiting(self) -> None:
        """Go on with those that have not acted, whose rewards have been told."""
        waiting, begin = self._waiting, self._count - self._waiting
        if not waiting:
            self.clear()
            return
        places, rewards = self._places[-1], self._rewards[-1]
        firsts = [(0, each) for at, each in self._firsts if at == begin]
        shown = take(self._observations, slice(begin, self._count))  # [B, ...]
        put(self._observations, slice(waiting), shown)
        self.clear()
        self._count = self._waiting = self._kept = waiting
        self._places, self._rewards, self._firsts = [places], [rewards], firsts
        self._untold = [(0, np.ones(waiting, np.bool_))]


def _joined(parts: list[Any]) -> Any:
    """Trees [B, ...], one after the other; {}: of none."""
    if not parts:
        return {}
    return tree_map(lambda *each: np.concatenate(each), *parts)
