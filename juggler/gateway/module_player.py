"""Acts for agents of simulators, and collects their steps."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.finiteness import NonFiniteBatch, check_finite
from juggler.envrunner.paced_slots import PacedSlots, oldest_version
from juggler.envrunner.rounds import TrainedResult
from juggler.gateway.episode_log import EpisodeLog
from juggler.gateway.sessions import AgentInterface, forget_oldest
from juggler.gateway.step_batches import PlayerRows
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.mergeable_state import State, merge
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import put, take, to_tree, tree_leaves, tree_map, zeros
from juggler.runtime.wire.trees import Tree

#: If a simulator takes longer for a step, its row is handed in short: batches must not wait.
STALL_SECONDS = 1.0
#: Purpose of the episode at a place. An evaluation leaves episodes that take too long, or that are
#: running when it ends: they are not counted.
TRAINING, EVALUATED, LEFT = 0, 1, 2


class ModulePlayer(PacedSlots):
    """Acts in environments that simulators step, one agent in each place.

    A row begins only when samples are requested: until then, steps wait.

    Args:
        steps: T.
        row_age: as in `PacedSlots`. A single step that takes this long is not trained on.
    """

    def __init__(
        self,
        interface: AgentInterface,
        policy: Actor,
        steps: int,
        row_age: int,
    ) -> None:
        self._connectors = policy.connectors
        # With several modules, a round leaves rows for the next round, even in synchronous runs.
        super().__init__(self._connectors.observation_space, policy, steps, max(1, row_age))
        policy.require_log_probabilities()
        self.interface = interface
        self.policy, self.row_age = policy, row_age
        self.version = Version(0, 0)  # version of the policy's weights
        self.waiting: deque[PlayerRows] = deque()  # shares without actions
        # Gets every step; None: episodes are not recorded.
        self.episode_log: EpisodeLog | None = None
        # Plays the episodes of an evaluation; None: the policy plays them.
        self.greedy: Actor | None = None
        room = len(self.of["row"])
        # Observations [P, ...] to act on, as batches have them.
        seen: Any = zeros(self._connectors.observation_space, (room,))
        self.of["seen"] = seen
        self.of["playing"] = np.zeros(room, np.int8)  # purposes
        self.of["acted_at"] = np.zeros(room)  # seconds
        self._leaves = interface.actions.leaves
        self._delta: State = {}
        self._reported: Counter[str] = Counter()  # counts at the last call of `new`
        self._parked = 0  # rows whose simulators stall at the first step

    @property
    def rows_begun(self) -> int:
        """Number of rows that will be complete soon."""
        return self.rows.begun - self._parked

    def seat(self, count: int) -> list[int]:
        places = super().seat(count)
        if self.greedy is not None:
            self.greedy.grow(len(self.of["row"]))
        return places

    def unseat(self, places: list[int]) -> None:
        """Remove environments, and truncate their running episodes at the last step.

        These episodes count as cut, because their return is unknown.
        """
        gone = set(places)
        self.waiting = deque(each for each in self.waiting if int(each.slots[0]) not in gone)
        if self.episode_log is not None:
            self.episode_log.drop(gone)
        for place in places:
            self.cut(place)
            self.of["acted"][place] = False
            self.of["playing"][place] = TRAINING
            self._places.release(place)

    def cut(self, place: int) -> None:
        """Cut off the running episode at a place, and complete its row."""
        row, step = int(self.of["row"][place]), int(self.of["step"][place])
        columns = self.rows.columns
        if row >= 0 and step:
            after = take(columns["observations"], (row, step))
            # If one is set, the next episode has begun there, without a complete step.
            if not any(columns[name][row, step - 1] for name in ("terminated", "truncated")):
                columns["truncated"][row, step - 1] = True
                self.rows.ended_with(row, step - 1, after)
            self.rows.finish(np.array([row]), np.array([step]))
        elif row >= 0:
            self.rows.release(row)
        self.of["row"][place] = -1
        self.counts["episodes_cut"] += int(self.of["length"][place] > 0)
        self._forget_episodes(np.array([place]))

    # -- incoming steps ---------------------------------------------------------------------------

    def receive(self, shares: Sequence[PlayerRows], shown: Tree) -> None:
        """Add the results of actions, and the next observations.

        Args:
            shown: [B, ...] observations of all their rows, in order.
        """
        slots = np.concatenate([share.slots for share in shares])  # [B]
        if self.episode_log is not None:
            self.episode_log.arrive(shares, shown)
        live, begin = np.ones(len(slots), np.bool_), 0  # [B] rows with an observation
        for share in shares:
            if share.paused:
                live[np.add(share.paused, begin)] = False
            begin += len(share.slots)
        observations = self.see(shown, live)  # [B, ...]
        self._take_results(shares, slots, observations)
        put(self.of["seen"], slots, observations)
        if self.greedy is not None:
            put(self.of["shown"], slots, shown)
        # A row does not stall while its agent waits for an action.
        self.of["acted_at"][slots] = np.where(live, np.inf, time.monotonic())
        self.waiting.extend(shares)

    def see(self, shown: Tree, live: NDArray[np.bool_]) -> Tree:
        """Convert observations [B, ...] of simulators for batches.

        Args:
            live: [B] the observations that connectors learn from.
        """
        observations: Tree = self._connectors.watch(shown)
        if self._connectors.rewrites:
            delta = self._connectors.take_delta(live[:, None])
            self._delta = merge(self._delta, delta) if self._delta else delta
        return observations

    def _take_results(
        self, shares: Sequence[PlayerRows], slots: NDArray[np.intp], observations: Tree
    ) -> None:
        """Take the results of the last actions.

        Args:
            slots: [B] the places of their rows, in order.
            observations: [B, ...] after the actions, as batches have them.
        """
        acted = self.of["acted"][slots]  # [B]
        if acted.any():
            places = slots
            rewards = np.array([each for share in shares for each in share.rewards], np.float32)
            if not acted.all():
                places, rewards = slots[acted], rewards[acted]
            self.add_rewards(places, rewards)
            if self.greedy is not None:
                mine = self.of["playing"][places] == EVALUATED  # [B]
                self.greedy.rewarded(rewards[mine], places[mine])
            # Rewards come first, because the end of an episode books its return.
            for share in shares:
                if over := [*share.terminated, *share.truncated]:
                    truncated = np.arange(len(over)) >= len(share.terminated)
                    finals = self._connectors(share.finals) if share.truncated else {}
                    self.end(share.slots[over], truncated, finals)
                    self.counts["episodes"] += len(over)
        for share in shares:
            for place, reward in share.early:  # in few turns
                self.of["return"][place] += reward
        self.observe(slots, observations)

    def end_episodes(self, places: NDArray[np.intp], *, counted: bool) -> None:
        """End the episodes at places [B], with or without counting their returns."""
        (self._end_episodes if counted else self._forget_episodes)(places)

    def _end_episodes(self, places: NDArray[np.intp]) -> None:
        trained = self.of["playing"][places] == TRAINING  # [B]
        if not trained.all():
            self._forget_episodes(places[~trained])
            places = places[trained]
        super()._end_episodes(places)
        forget_oldest(self.ended)

    # -- outgoing actions -------------------------------------------------------------------------

    def answer(self, wanted: int, most_rows: int, holds_up: bool) -> list[PlayerRows]:
        """Choose actions for waiting shares; return the shares.

        The oldest shares come first.

        Args:
            wanted: number of rows that may begin. A share that needs more begins all of its rows if
                at least one may begin.
            most_rows: maximum rows of one inference; a single share may have more.
            holds_up: steps wait until their rows may begin; otherwise they are not collected.
        """
        chosen, collecting = self._next(wanted, most_rows, holds_up)
        if not chosen:
            return []
        places = np.concatenate([share.acting for share in chosen])  # [B]
        sent: list[bytes] = []
        if len(places):
            seen = take(self.of["seen"], places)  # [B, ...]
            if self.greedy is None:
                actions = self.act(places, collecting, seen)
                tree = to_tree(self.interface.spaces[1], actions)  # [B, ...]
            else:
                tree = self._with_evaluation(self.greedy, places, collecting, seen)
            # For `flush_stalled`.
            self.of["acted_at"][places] = time.monotonic()
            # An evaluation plays other weights, so its episodes are not recorded.
            if self.episode_log is not None:
                trained = self.of["playing"][places] == TRAINING  # [B]
                self.episode_log.act(places[trained], take(tree, trained))
            leaves = zip(tree_leaves(tree), self._leaves, strict=True)
            sent = [np.asarray(array, leaf.dtype).tobytes() for (_, array), leaf in leaves]
        # All shares have one array, of which each simulator gets its own bytes.
        begin = 0
        for share in chosen:
            end = begin + len(share.acting)
            pairs = zip(sent, self._leaves, strict=False)  # `sent` is empty if no row acts
            data = [each[begin * leaf.row_bytes : end * leaf.row_bytes] for each, leaf in pairs]
            share.answer(data, self.version)
            begin = end
        return chosen

    def _next(
        self, wanted: int, most_rows: int, holds_up: bool
    ) -> tuple[list[PlayerRows], NDArray[np.bool_]]:
        """Return the shares to answer now, and which rows [B] are collected."""
        chosen: list[PlayerRows] = []
        collecting: list[bool] = []
        everyone = sum(len(share.slots) for share in self.waiting)
        if everyone <= min(wanted, most_rows):
            chosen, self.waiting = list(self.waiting), deque()
            return chosen, np.ones(sum(len(share.acting) for share in chosen), np.bool_)
        later: deque[PlayerRows] = deque()
        rows = standing = 0
        while self.waiting and (not rows or rows < most_rows):
            # A share stays whole, because its simulator waits for all of its actions.
            share = self.waiting.popleft()
            has_row = self.of["row"][share.acting] >= 0  # [S]
            new = len(has_row) - int(np.count_nonzero(has_row))
            real_time = share.steps.batch.session.hello.real_time
            if new and wanted <= 0 and holds_up and not real_time:
                later.append(share)
                standing += len(share.acting) - new
                continue
            # A simulator in real time cannot wait, so its steps are played without a row.
            if new and wanted <= 0:
                collecting += has_row.tolist()
            else:
                collecting += [True] * len(share.acting)
                wanted -= new
            chosen.append(share)
            rows += len(share.acting)
        if not chosen and wanted + standing > 0:
            # Some rows cannot continue because other steps of their share wait for a row.
            chosen.append(later.popleft())
            collecting = [True] * len(chosen[0].acting)
        later.extend(self.waiting)
        self.waiting = later
        return chosen, np.array(collecting, np.bool_)

    # -- evaluations ------------------------------------------------------------------------------

    def evaluate(self, actor: Actor) -> None:
        """Let an actor play the episodes of an evaluation, without exploration."""
        actor.grow(len(self.of["row"]))
        self.greedy = actor
        # Its connectors may see other observations: [P, ...] as simulators send them.
        shown: Any = zeros(self.interface.spaces[0], (len(self.of["row"]),))
        self.of["shown"] = shown

    def _with_evaluation(
        self,
        greedy: Actor,
        places: NDArray[np.intp],
        collecting: NDArray[np.bool_],
        seen: Tree,
    ) -> Tree:
        """Return actions [B, ...] for places [B], some chosen by the evaluation."""
        first = self.of["first"][places]  # [B]
        evaluated = self.of["playing"][places] == EVALUATED  # [B]
        self.pause(places[evaluated])  # rows from before end with the last episode
        space = self.interface.spaces[1]
        tree = to_tree(space, self.act(places, collecting & ~evaluated, seen))  # [B, ...]
        if not evaluated.any():
            return tree
        mine = places[evaluated]
        seen = greedy.connectors(take(self.of["shown"], mine))
        best = greedy.act(seen, mine, first[evaluated], explore=False).sent
        mixed: Tree = tree_map(np.array, tree)  # a writable copy
        put(mixed, np.flatnonzero(evaluated), to_tree(space, best))
        return mixed

    # -- weights and batches ----------------------------------------------------------------------

    def load(self, weights: Tree, version: Version) -> None:
        """Load weights, and hand in outdated rows."""
        self.policy.load(weights)
        self.version = version
        self.use(version)

    def flush_stalled(self) -> None:
        """Hand in rows of slow simulators. Called periodically."""
        of, since = self.of, time.monotonic() - STALL_SECONDS
        stalled = of["acted_at"] < since
        self.flush(stalled)
        standing = of["acted"] & stalled & (of["row"] >= 0) & (of["step"] == 0)
        self._parked = int(np.count_nonzero(standing))

    def pop_batch(self, most_rows: int) -> TrainedResult | NonFiniteBatch:
        """Return a batch of the oldest complete rows, and ended episodes."""
        stale, ended = self.new("steps_stale"), self.pop_ended()
        rows = min(most_rows, len(self.rows.complete))
        if not rows:
            return TrainedResult(None, self.version, *ended, stale_steps=stale)
        batch = self.rows.batch(rows, self.policy.log_probabilities)
        try:
            check_finite(batch)
        except NonFiniteBatch as error:
            return error
        delta, self._delta = self._delta, {}
        return TrainedResult(batch, oldest_version(batch), *ended, delta, stale)

    def new(self, name: str) -> int:
        """Return a count's increase since the last call."""
        before, self._reported[name] = self._reported[name], self.counts[name]
        return self.counts[name] - before
