"""Slots of agents that act at their own pace, and their rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.together import (
    EpisodeIds,
    LogProbabilities,
    Segments,
    Together,
    final_columns,
    running_episodes,
    segments_of,
)
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.batch import STEP_COLUMNS, EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import grown, put, room_for, take, tree_map, zeros
from juggler.runtime.wire.trees import Tree

#: Columns of batches that rows fill; which steps are live shows at the end.
_FILLED = tuple(name for name in STEP_COLUMNS if name != "live")

Where = NDArray[np.intp] | slice


class Rows:
    """Memory for rows, each filled by one agent at a time.

    Columns are [P, T + 1, ...], and are written directly as rows fill up. The observation after a
    row's last step is at the step behind it. The index of a step among the steps of all rows is
    row * `width` + step.

    Args:
        steps: T.
        blank_inputs: of the policy's distribution [D].

    Attributes:
        width: T + 1.
        by_step: the columns with a value for each step, as views [P * (T + 1), ...].
    """

    def __init__(
        self,
        observation_space: Space[Any],
        steps: int,
        blank_inputs: NDArray[np.float32],
        first_rows: int,
    ) -> None:
        self.steps, self.width = steps, steps + 1
        self.complete: list[int] = []  # rows that are ready, in order
        self._space = observation_space
        self._places = SlotAllocator(first_rows)
        shape = (first_rows, self.width)
        self.columns: dict[str, Any] = {
            "observations": zeros(observation_space, shape),
            **{name: np.zeros(shape, STEP_COLUMNS[name]) for name in _FILLED},
            # Where a row or an episode begins: the episode, its number of earlier steps, and the
            # generation and the update of the weights that act.
            "beginnings": np.zeros((*shape, 4), np.uint64),
            "lengths": np.zeros(first_rows, np.intp),  # steps of a complete row
            "places": np.zeros(first_rows, np.intp),  # of the agent
            "states": {},
            # Log-probabilities came with the steps.
            "recorded": np.zeros(first_rows, np.bool_),
            "inputs": np.zeros((*shape, *blank_inputs.shape), np.float32),
        }
        self.by_step: dict[str, Any] = {}
        self._view_by_step()
        self._finals: dict[int, list[tuple[int, Tree]]] = defaultdict(list)  # step, observation

    @property
    def begun(self) -> int:
        """Number of rows that are neither free nor complete."""
        return self._places.used - len(self.complete)

    @property
    def first_updates(self) -> NDArray[np.uint64]:
        """Updates [P] of the weights that acted first in each row."""
        updates: NDArray[np.uint64] = self.columns["beginnings"][:, 0, 3]
        return updates

    def begin(
        self, places: NDArray[np.intp], states: dict[str, Tree], recorded: bool = False
    ) -> NDArray[np.intp]:
        """Begin new rows [B].

        Args:
            places: of their agents [B].
            states: before their first steps [B, ...].
            recorded: log-probabilities come with the steps.
        """
        if self._places.grow(len(places)):
            self.columns = grown(self.columns, self._places.capacity)
            self._view_by_step()
        rows = np.array(self._places.allocate(len(places)), np.intp)
        if states and not self.columns["states"]:
            self.columns["states"] = room_for(states, self._places.capacity)
        if states:
            put(self.columns["states"], rows, states)
        self.columns["places"][rows], self.columns["recorded"][rows] = places, recorded
        for name in ("terminated", "truncated"):
            self.columns[name][rows] = False
        return rows

    def begin_episodes(self, at: NDArray[np.intp], beginnings: NDArray[np.uint64]) -> None:
        """Write beginnings [B, 4] of rows or episodes at steps [B]."""
        self.by_step["beginnings"][at] = beginnings

    def act(self, at: NDArray[np.intp], actions: Tree, inputs: NDArray[np.float32]) -> None:
        """Write the actions chosen at steps [B]."""
        if "actions" not in self.columns:
            self.make_room_for(actions)
        put(self.by_step["actions"], at, actions)
        put(self.by_step["inputs"], at, inputs)

    def record(self, row: int, step: int, steps: int, **columns: Any) -> None:
        """Write L steps of a row.

        Args:
            row: begun with `recorded`.
            steps: L.
            columns: [L, ...], or one value for all.
        """
        if "actions" not in self.columns:
            self.make_room_for(columns["actions"])
        for name, values in columns.items():
            put(self.columns[name], (row, slice(step, step + steps)), values)

    def finish(self, rows: NDArray[np.intp], steps: NDArray[np.intp]) -> None:
        """Complete rows [B] of these numbers of steps [B]."""
        self.columns["lengths"][rows] = steps
        self.complete += rows.tolist()

    def release(self, row: int) -> None:
        """Free a row without a batch."""
        self._finals.pop(row, None)
        self._places.release(row)

    def ended_with(self, row: int, step: int, observation: Tree) -> None:
        """Keep the last observation of a truncated episode."""
        self._finals[row].append((step, observation))

    def move_steps(self, at: NDArray[np.intp], states: dict[str, Tree]) -> NDArray[np.intp]:
        """Begin new rows [B] with other rows' steps, and states."""
        new = self.begin(self.columns["places"][at // self.width], states)
        for column in ("observations", "actions", "inputs"):
            values = take(self.by_step[column], at)
            put(self.by_step[column], new * self.width, values)
        return new

    def batch(self, count: int, log_probabilities: LogProbabilities) -> EpisodeBatch:
        """Make a batch of the first N complete rows, and free them."""
        taken, self.complete = self.complete[:count], self.complete[count:]
        rows = np.array(taken, np.intp)  # [N]
        lengths = self.columns["lengths"][rows]  # [N]
        last_observations = take(self.columns["observations"], (rows, lengths))  # [N, ...]
        finals = [(n, *final) for n, row in enumerate(taken) for final in self._finals.pop(row, ())]
        # A slice, if possible, since fancy indexing takes several times as long.
        within: Any = (where(rows), slice(self.steps))
        kept: dict[str, Any] = {
            name: _copied(column, within) if name in self.by_step else take(column, rows)
            for name, column in self.columns.items()
        }  # [N, T, ...] or [N, ...]
        kept["lengths"] = lengths
        live = np.arange(self.steps) < lengths[:, None]  # [N, T]
        if not live.all():
            _fill_up(kept, live, last_observations)
        # From here on, all columns are copies.
        self._places.release(*taken)
        # Simulators that act by themselves have told theirs.
        action_logp = kept["action_logp"]  # [N, T]
        # Where the policy here has acted.
        ours = ~kept["recorded"]  # [N]
        if ours.any():
            actions = take(kept["actions"], ours)  # [O, T, ...]
            action_logp[ours] = log_probabilities(kept["inputs"][ours], actions)
        action_logp[~live] = 0
        # Rows that were cut are as long as others, with dead steps.
        return EpisodeBatch(
            observations=kept["observations"],
            actions=kept["actions"],
            **{name: kept[name] for name in _FILLED},
            live=live,
            last_observations=last_observations,
            states=kept["states"],
            **final_columns(self._space, finals),
            **_segments(kept, live),
        )

    def _view_by_step(self) -> None:
        apart = ("lengths", "places", "states", "recorded")  # one value per row
        self.by_step = {
            name: tree_map(_flat, column)
            for name, column in self.columns.items()
            if name not in apart
        }

    def make_room_for(self, actions: Tree) -> None:
        """Add the column of actions, like the first ones [B, ...]."""
        self.columns["actions"] = tree_map(
            lambda one: np.zeros((self._places.capacity, self.width, *one.shape[1:]), one.dtype),
            actions,
        )
        self._view_by_step()


def _flat(column: NDArray[Any]) -> NDArray[Any]:
    """View a column [P, T + 1, ...] step by step."""
    rows, width, *rest = column.shape
    return column.reshape(rows * width, *rest)  # not -1, because the rest may be of size 0


def _copied(tree: Any, within: tuple[Any, Any]) -> Any:
    """Copy some rows and steps [N, T, ...]."""
    if isinstance(within[0], slice):
        return tree_map(lambda array: array[within].copy(), tree)
    return take(tree, within)


def where(rows: NDArray[np.intp]) -> Where:
    """Return rows [B], as a slice if consecutive, which is written faster."""
    first, count = int(rows[0]), len(rows)
    follow = int(rows[-1]) - first == count - 1 and bool((np.diff(rows) == 1).all())
    return slice(first, first + count) if follow else rows


def oldest_version(batch: EpisodeBatch) -> Version:
    """Return the oldest weights that acted in a batch."""
    generations, updates = batch.segment_generations, batch.segment_updates
    return Version(*min(zip(generations.tolist(), updates.tolist(), strict=True)))


def _fill_up(kept: dict[str, Any], live: NDArray[np.bool_], last_observations: Tree) -> None:
    """Fill short rows with their last observation, their last action, and zeros."""
    rows, steps = np.nonzero(~live)  # [D] both
    put(kept["observations"], (rows, steps), take(last_observations, rows))
    last = np.maximum(kept["lengths"][rows] - 1, 0)  # [D]
    put(kept["actions"], (rows, steps), take(kept["actions"], (rows, last)))
    kept["inputs"][rows, steps] = kept["inputs"][rows, last]
    for name in _FILLED:
        kept[name][~live] = 0


def _segments(kept: dict[str, Any], live: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Return the segments of rows, each with the oldest weights that acted.

    A segment is a stretch of one episode. It is not split where weights change, because a sequence
    model must see it whole.
    """
    rows, starts, ends = segments_of(live, kept["terminated"] | kept["truncated"])  # [S] each
    beginnings = kept["beginnings"][rows, starts]  # [S, 4]
    segments = Segments(rows, starts, ends - starts + 1, *beginnings.T[:2])
    return segments.columns(beginnings[:, 2:])


class SlotAllocator:
    """Allocates numbers from 0, the lowest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def grow(self, more: int) -> bool:
        """Ensure that this many are free. True: the capacity has grown."""
        before = self.capacity
        while len(self._free) < more:
            new = range(self.capacity, 2 * self.capacity)
            self._free = [*reversed(new), *self._free]
            self.capacity *= 2
        return self.capacity != before

    def allocate(self, count: int) -> list[int]:
        """Take this many places, which `grow` has ensured."""
        left = len(self._free) - count
        taken = self._free[left:]
        del self._free[left:]
        return taken[::-1]

    def release(self, *places: int) -> None:
        self._free += places[::-1]


_FIRST_PLACES = 64


class PacedSlots:
    """Slots of agents, each with a row while its steps are collected.

    An agent that acts is followed by three calls, in this order: `add_rewards` with the reward of
    its action; `end` if that action was its last one in the episode; `observe` with the observation
    after it. A row with T steps is complete when that observation is known.

    Args:
        steps: T, of a row.
        row_age: maximum number of updates that the weights of a row's first step may be behind the
            newest weights.
        count: initial number of places; 0: `seat` adds them.

    Attributes:
        ended: return and length of the episodes that ended since the caller emptied the list.
        of: state of each place, as arrays by name.
        newest: [2] generation and update of the weights that act.
        new_episodes: returns ids, which are unique in this worker.
        together: current steps of all places, if they act at once since `gather`; else None.
        blocks: complete steps of all places, older than complete rows.
    """

    def __init__(
        self,
        observation_space: Space[Any],
        policy: Actor,
        steps: int,
        row_age: int,
        count: int = 0,
    ) -> None:
        capacity = count or _FIRST_PLACES
        self.rows = Rows(observation_space, steps, policy.blank_inputs, capacity)
        self.ended: list[tuple[float, int]] = []
        self.counts: Counter[str] = Counter()  # of events so far, by name
        self._policy = policy
        self._steps = steps
        self._row_age = row_age
        self._places = SlotAllocator(capacity)
        policy.grow(capacity)
        self._space = observation_space
        # Ids of episodes are unique, whichever way their rows fill.
        self.new_episodes = EpisodeIds()
        self.newest = np.zeros(2, np.uint64)
        self.together: Together | None = None
        self.blocks: list[Together] = []
        self._any_stale = False  # an agent's current step may be the first of a row and stale
        self.of: dict[str, NDArray[Any]] = {
            "row": np.full(capacity, -1, np.intp),  # -1: no row
            "step": np.zeros(capacity, np.intp),  # complete steps of the row
            "acted": np.zeros(capacity, np.bool_),  # the reward of an action is due
            # Of the weights that acted last.
            "generation": np.zeros(capacity, np.uint64),
            "update": np.zeros(capacity, np.uint64),
            **running_episodes(capacity),
        }
        if count:
            self.seat(count)

    def __len__(self) -> int:
        return self._places.used

    def seat(self, count: int) -> list[int]:
        """Add places for new agents."""
        before = self._places.capacity
        if self._places.grow(count):
            self.of = grown(self.of, self._places.capacity)
            self.of["row"][before:] = -1
            self._policy.grow(self._places.capacity)
        places = self._places.allocate(count)
        self.of["row"][places], self.of["acted"][places] = -1, False
        self._forget_episodes(np.array(places, np.intp))
        return places

    def forget(self) -> None:
        """Drop all rows and running episodes."""
        self.together = None
        self._policy.grow(len(self))  # batches may share its arrays
        self.blocks.clear()
        for row in [*self.of["row"][self.of["row"] >= 0].tolist(), *self.rows.complete]:
            self.rows.release(row)
        self.rows.complete.clear()
        self.ended.clear()
        self.of["row"][:], self.of["acted"][:] = -1, False
        self._forget_episodes(slice(None))

    def pop_ended(self) -> tuple[list[float], list[int]]:
        """Return returns and lengths of episodes that ended since the last call."""
        self.settle()
        ended, self.ended = self.ended, []
        return [total for total, _ in ended], [length for _, length in ended]

    # -- results of actions ----------------------------------------------------------------------

    def add_rewards(self, places: NDArray[np.intp], rewards: NDArray[np.floating[Any]]) -> None:
        """Complete the last steps at places [B] with their rewards [B]."""
        of = self.of
        self.counts["steps"] += len(places)
        self._policy.rewarded(rewards, places)
        of["length"][places] += 1
        of["return"][places] += rewards
        of["acted"][places] = False
        rows = of["row"][places]  # [B]
        uncollected = int(np.count_nonzero(rows < 0))
        if uncollected:
            self.counts["steps_uncollected"] += uncollected
        # The reward completes a step that may be too old to train on.
        if self._any_stale:
            self._free_stale(places)
            rows = of["row"][places]
        if uncollected or self._any_stale:
            collected = rows >= 0  # [B]
            places, rewards, rows = places[collected], rewards[collected], rows[collected]
        steps = of["step"][places]  # [B]
        self.rows.by_step["rewards"][rows * self.rows.width + steps] = rewards
        of["step"][places] = steps + 1

    def end(
        self,
        places: NDArray[np.intp],
        truncated: NDArray[np.bool_],
        final_observations: Tree,
    ) -> None:
        """End the episodes at places [B] with their last rewarded steps.

        Args:
            places: of the agents, whose next actions begin an episode.
            truncated: [B]; the rest terminated.
            final_observations: [K, ...] of truncated episodes.
        """
        rows, last = self.of["row"][places], self.of["step"][places] - 1  # [B] both
        collected, cut = rows >= 0, truncated  # [B] both
        if np.count_nonzero(collected) < len(rows):
            rows, last, cut = rows[collected], last[collected], truncated[collected]
        at = rows * self.rows.width + last
        self.rows.by_step["terminated"][at] = ~cut
        self.rows.by_step["truncated"][at] = cut
        if np.count_nonzero(cut):
            finals = collected[truncated].nonzero()[0].tolist()  # of collected episodes
            ends = zip(finals, rows[cut].tolist(), last[cut].tolist(), strict=True)
            for k, row, step in ends:
                self.rows.ended_with(row, step, take(final_observations, k))
        self._end_episodes(places)

    def _end_episodes(self, places: NDArray[np.intp]) -> None:
        of = self.of
        self.ended += zip(of["return"][places].tolist(), of["length"][places].tolist(), strict=True)
        self._forget_episodes(places)

    def _forget_episodes(self, places: Where) -> None:
        """Start new episodes with the next actions at places [B]."""
        of = self.of
        of["return"][places], of["length"][places], of["first"][places] = 0, 0, True

    def observe(self, places: NDArray[np.intp], observations: Tree) -> None:
        """Write the observations [B, ...] after the last actions at places [B]."""
        of = self.of
        rows = of["row"][places]  # [B]
        if np.count_nonzero(rows < 0):
            collected = rows >= 0  # [B]
            places, rows, observations = (
                places[collected],
                rows[collected],
                take(observations, collected),
            )
        steps = of["step"][places]  # [B]
        put(self.rows.by_step["observations"], rows * self.rows.width + steps, observations)
        full = steps == self._steps  # [B]
        if np.count_nonzero(full):
            self.rows.finish(rows[full], steps[full])
            of["row"][places[full]] = -1

    def _free_stale(self, places: NDArray[np.intp]) -> None:
        """Free rows at places [B] whose first step is current and stale."""
        rows = self.of["row"][places]  # [B]
        stale = (rows >= 0) & (self.of["step"][places] == 0) & self._is_old(rows)  # [B]
        for row in rows[stale].tolist():
            self.rows.release(row)
        self.counts["steps_stale"] += int(np.count_nonzero(stale))
        self.of["row"][places[stale]] = -1

    # -- actions ---------------------------------------------------------------------------------

    def act(
        self,
        places: NDArray[np.intp],
        collecting: NDArray[np.bool_] | bool,
        observations: Tree,
        kept: Tree | None = None,
    ) -> Any:
        """Let the policy act -> the actions for environments.

        Args:
            places: [B]
            collecting: [B] whose steps are collected; or whether all are.
            observations: [B, ...] of the policy.
            kept: [B, ...] observations in batches; None: the same.
        """
        of = self.of
        first = of["first"][places]  # [B]
        if np.count_nonzero(first):
            self._begin_episodes(places[first])
        sent, actions, inputs = self._policy.act(observations, places, first)
        observations = observations if kept is None else kept
        of["acted"][places] = True
        of["generation"][places], of["update"][places] = self.newest
        # A simulator may get actions before samples are wanted.
        if isinstance(collecting, bool):
            if not collecting:
                return sent
        elif np.count_nonzero(collecting) < len(collecting):
            places, first, inputs = places[collecting], first[collecting], inputs[collecting]
            observations, actions = take(observations, collecting), take(actions, collecting)
        # A row begins with the first collected action at its place.
        rows = of["row"][places]  # [B]
        new = rows < 0  # [B]
        if np.count_nonzero(new):
            beginning = places[new]
            rows[new] = self.rows.begin(beginning, self._policy.states_before(beginning))
            of["row"][beginning], of["step"][beginning] = rows[new], 0
            begun = rows[new] * self.rows.width
            put(self.rows.by_step["observations"], begun, take(observations, new))
            first |= new
        at = rows * self.rows.width + of["step"][places]  # [B]
        if np.count_nonzero(first):
            self.rows.begin_episodes(at[first], self._beginnings(places[first]))
        self.rows.act(at, actions, inputs)
        return sent

    def _begin_episodes(self, places: NDArray[np.intp]) -> None:
        self.of["episode"][places] = self.new_episodes(len(places))
        self.of["first"][places] = False

    def _beginnings(self, places: NDArray[np.intp]) -> NDArray[np.uint64]:
        """Return entries [B, 4] of `beginnings` for the current steps at places."""
        of = self.of
        beginnings = np.empty((len(places), 4), np.uint64)  # [B, 4]
        beginnings[:, 0], beginnings[:, 1] = of["episode"][places], of["length"][places]
        beginnings[:, 2], beginnings[:, 3] = of["generation"][places], of["update"][places]
        return beginnings

    # -- all places act in each turn ---------------------------------------------------------------

    def gather(self) -> bool:
        """Let all places act at once; False: a place has a row."""
        if self.together is None and not np.count_nonzero(self.of["row"] >= 0):
            self._begin_together(None)
            self._policy.grow(len(self))  # memory has only these places
        return self.together is not None

    def _begin_together(self, space: Space[Any] | None) -> Together:
        self.settle()
        self.together = Together(space, len(self), self._steps)
        return self.together

    def settle(self) -> None:
        """Book the episodes of all complete steps of places that act together."""
        if (together := self.together) is not None:
            self.ended += zip(*together.book(self.of, self.new_episodes), strict=True)

    def split(self) -> None:
        """Let some places act at a time, each with its own row."""
        self.settle()
        together, self.together = self.together, None
        if together is None:
            return
        of, step = self.of, together.step
        self._policy.grow(len(self))  # arrays are not shared any more
        of["acted"][:] = together.acted
        of["generation"][:], of["update"][:] = self.newest
        # An action whose reward is due may have begun an episode.
        begun = of["first"].nonzero()[0] if together.acted else np.zeros(0, np.intp)  # [K]
        self._begin_episodes(begun)
        if together.chosen:
            rows = self._moved(together)  # [P]
            of["row"][:], of["step"][:] = rows, step
            noted = begun if step else np.arange(len(rows))
            self.rows.begin_episodes(rows[noted] * self.rows.width + step, self._beginnings(noted))

    def _moved(self, together: Together) -> NDArray[np.intp]:
        """Copy steps into new rows [P] of the places."""
        step, rows = together.step, self.rows
        new = rows.begin(np.arange(len(self)), together.states, recorded=not together.inputs)
        if "actions" not in rows.columns:
            rows.make_room_for(together.chosen[0])
        columns, acted = rows.columns, slice(len(together.chosen))
        for t, seen in enumerate(together.seen[: step + 1]):
            put(columns["observations"], (new, t), seen)
        put(columns["actions"], (new, acted), together.actions())
        # Without inputs of a distribution, log-probabilities are 0.
        if together.inputs:
            columns["inputs"][new, acted] = np.stack(together.inputs, 1)
        else:
            columns["action_logp"][new] = 0
        for name in ("rewards", "terminated", "truncated"):
            columns[name][new, :step] = getattr(together, name)[:, :step]
        for place, t, observation in together.finals:
            rows.ended_with(int(new[place]), t, observation)
        # `Rows` finds the segments of a batch again, when later steps have joined them.
        columns["beginnings"][new, 0, 2:] = together.version
        for segments in together.segments:
            at = new[segments.rows], segments.starts  # [S] both
            columns["beginnings"][(*at, 0)] = segments.episodes
            columns["beginnings"][(*at, 1)] = segments.offsets
            columns["beginnings"][(*at, slice(2, None))] = together.version
        return new

    def act_together(
        self, seen: Tree, kept: Tree, first: NDArray[np.bool_], collecting: bool
    ) -> Any:
        """Let the policy act at all P places -> the environments' actions.

        Args:
            seen: [P, ...] observations of the policy.
            kept: [P, ...] observations in rows.
            first: [P] whether these actions begin an episode.
            collecting: steps are collected.
        """
        together, policy = self.together, self._policy
        assert together is not None
        if collecting and together.space is None:
            together = self._begin_together(self._space)
        begins = not together.chosen
        if begins:
            together.version = self.newest.copy()
            if together.space is not None:
                put(together.seen[0], ..., kept)
        first_if_needed = first if policy.remembers else None
        # States are only kept before the first step of a row.
        acted = policy.act(seen, first=first_if_needed, keep=begins)
        together.acted = True
        if together.space is not None:
            together.add(acted)
            if begins:
                together.states = policy.states_before()
        return acted.sent

    def add_results_together(
        self,
        rewards: NDArray[np.float64],
        kept: Tree,
        ended: NDArray[np.intp],
        last_rewards: NDArray[np.float64],
        truncated: NDArray[np.bool_],
        lasts: Tree,
    ) -> None:
        """Add the results of all places' last actions.

        Args:
            rewards: [P]; 0 where an episode ended.
            kept: [P, ...] observations in rows.
            ended: [E] places whose episode ended.
            last_rewards: [E]
            truncated: [E]; the rest terminated.
            lasts: [E, ...] last observations of their episodes.
        """
        together = self.together
        assert together is not None
        if self._policy.remembers:
            self._policy.rewarded(rewards)
        t, collected = together.step, together.space is not None
        self.counts["steps"] += len(rewards)
        together.acted = False
        together.rewards[:, t] = rewards
        if len(ended):
            together.rewards[ended, t] = last_rewards
            together.truncated[ended, t], together.terminated[ended, t] = truncated, ~truncated
            for k in truncated.nonzero()[0].tolist():
                together.finals.append((int(ended[k]), t, take(lasts, np.array(k))))
        together.step += 1
        # A round may have no request for this module.
        if collected:
            put(together.seen[t + 1], ..., kept)
        else:
            self.counts["steps_uncollected"] += len(rewards)
        if together.step == self._steps:
            self._complete_together(together)

    def _complete_together(self, together: Together) -> None:
        """Complete the row of each place, and begin new ones."""
        self.settle()
        if together.space is not None:
            # Complete rows are older, so these steps come after them.
            if self.rows.complete or len(together.segments) > 1:
                self.rows.finish(self._moved(together), np.full(len(self), together.step))
            else:
                self.blocks.append(together)
        self._begin_together(together.space)

    # -- rows that are handed in short ------------------------------------------------------------

    def use(self, version: Version) -> None:
        """Use newer weights, and hand in outdated rows."""
        together = self.together
        if together is not None and not (together.chosen or together.acted):
            self.newest[:] = version  # no row has been begun
            return
        self.split()
        self.newest[:] = version
        self.flush(self._is_old(self.of["row"]))

    def pause(self, places: NDArray[np.intp]) -> None:
        """Complete observed rows of places [B] whose next step is not collected."""
        if self.together is not None and self.together.space is not None:
            self.split()
        held = places[self.of["row"][places] >= 0]
        self.rows.finish(self.of["row"][held], self.of["step"][held])
        self.of["row"][held] = -1

    def _is_old(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return which rows [B] began with outdated weights [B]."""
        begun = self.rows.first_updates[rows]  # [B]
        old: NDArray[np.bool_] = begun + np.uint64(self._row_age) < self.newest[1]
        return old

    def flush_all(self) -> None:
        """Complete all rows that have a complete step, as they are."""
        self.split()
        self.flush(np.ones(len(self.of["row"]), np.bool_))

    def flush(self, which: NDArray[np.bool_]) -> None:
        """Complete rows as they are, where they have a complete step.

        Args:
            which: [S] of all places. A current step moves to a new row.
        """
        of, rows = self.of, self.rows
        places = np.flatnonzero(which & (of["row"] >= 0) & (of["step"] > 0))  # [B]
        if len(places):
            self.counts["rows_cut"] += len(places)
        rows.finish(of["row"][places], of["step"][places])
        acted = places[of["acted"][places]]
        at = of["row"][acted] * rows.width + of["step"][acted]
        of["row"][places] = -1
        if len(acted):
            new = rows.move_steps(at, self._policy.states_before(acted))
            rows.begin_episodes(new * rows.width, self._beginnings(acted))
            of["row"][acted] = new
        of["step"][places] = 0
        standing = of["acted"] & (of["row"] >= 0) & (of["step"] == 0)
        self._any_stale = bool((standing & self._is_old(of["row"])).any())

    def drop_stale(self) -> None:
        """Free complete rows that are too old, and count their steps."""
        rows = self.rows
        # A row may be filled for `row_age` updates, and then wait for as many.
        oldest = int(self.newest[1]) - 2 * self._row_age
        if oldest <= 0:
            return
        while self.blocks and self.blocks[0].version[1] < oldest:
            self.counts["steps_stale"] += self.blocks.pop(0).rewards.size
        if not rows.complete:
            return
        complete = np.array(rows.complete, np.intp)
        old = complete[rows.first_updates[complete] < oldest]
        self.counts["steps_stale"] += int(rows.columns["lengths"][old].sum())
        gone = set(old.tolist())
        rows.complete = [row for row in rows.complete if row not in gone]
        for row in old.tolist():
            rows.release(row)
