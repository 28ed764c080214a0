"""Brings the steps of a round into rows, for all agents at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.paced.slots import PacedSlots
from juggler.runtime.episodes.finiteness import MOST_REWARD
from juggler.runtime.wire.structures import put, take, tree_map
from juggler.runtime.wire.trees import Tree

Bools = NDArray[np.bool_]
Indices = NDArray[np.intp]


class Entries(NamedTuple):
    """A round as `StepLog` has it: K entries in the order in which they happened.

    Attributes:
        places: [K] of the agents.
        rewards: [K] of their last actions, where they are told.
        told: [K] the reward of the agent's last action is told.
        first: [K] the agent begins an episode.
        ended: [K] its episode has ended.
        truncated: [K] it was truncated; else it terminated.
        acts: [K] the agent acts then.
        observations: [K, ...] what it sees, before it acts.
        actions: [I, ...] of those that act.
        inputs: [I, D] of the distributions of their actions.
        states: before the first steps of rows [R, ...]; {}: there are none.
        doubted: an entry whose observation is not finite; -1: none.
    """

    places: Indices
    rewards: NDArray[np.floating[Any]]
    told: Bools
    first: Bools
    ended: Bools
    truncated: Bools
    acts: Bools
    observations: Any
    actions: Any
    inputs: Any
    states: dict[str, Tree]
    doubted: int


class BadNumber(NamedTuple):
    """A number that is not finite, or a reward beyond `MOST_REWARD`.

    Attributes:
        place: of its agent.
        step: of its row.
        column: "rewards" or "observations".
        value: of a reward; of an observation it is not known.
    """

    place: int
    step: int
    column: str
    value: float | None


class _Sorted:
    """The entries of each agent, one after the other.

    Attributes:
        order: [K] the entries by place and time.
        places: [K] their places.
        rewards: [K] as in `Entries`.
        told: [K] as in `Entries`; so are the next three.
        first: [K]
        ended: [K]
        acts: [K]
        done: [K] entries of all agents so far that were told a reward.
        heads: [G] the first entry of each agent.
        sizes: [G] its number of entries.
        lasts: [G] its last entry.
        agents: [G] its place.
    """

    def __init__(self, entries: Entries, places_in_all: int) -> None:
        places = entries.places
        # NumPy sorts numbers of 8 or 16 bits in a time that grows as their count does.
        short = places.astype(np.min_scalar_type(places_in_all - 1))
        self.order = order = short.argsort(kind="stable")
        self.places = places[order]
        self.told, self.first = entries.told[order], entries.first[order]
        self.ended, self.acts = entries.ended[order], entries.acts[order]
        self.rewards = entries.rewards[order]
        self.done = np.cumsum(self.told)
        others = self.places[1:] != self.places[:-1]  # [K - 1] than the one before
        self.heads = np.concatenate(([0], others.nonzero()[0] + 1))
        self.lasts = _ends(self.heads, len(order))
        self.sizes = self.lasts - self.heads + 1
        self.agents = self.places[self.heads]

    def for_all(self, each: NDArray[Any]) -> NDArray[Any]:
        """What agents [G] have, for all of their entries [K]."""
        return np.repeat(each, self.sizes)


def _ends(starts: Indices, count: int) -> Indices:
    """The last entries [C] of stretches that begin with entries [C] of so many."""
    return np.concatenate((starts[1:], [count])) - 1


class _Located(NamedTuple):
    """Where the sorted entries of a round are in rows.

    Attributes:
        rows: [K] the agent's row; -1: its step is in none.
        steps: [K] complete steps of that row, which is full with the last observation.
        at: [K] the place of the observation among all steps; negative: in no row.
        before: [K] the place of the agent's last action; negative: in no row.
        begins: [K] the agent acts, and a row begins with it.
        full: [K] the agent is told the last reward of a row.
    """

    rows: Indices
    steps: Indices
    at: Indices
    before: Indices
    begins: Bools
    full: Bools


def write_round(slots: PacedSlots, entries: Entries, recorded: bool) -> BadNumber | None:
    """Write the steps of a round into rows, as the calls of `PacedSlots` would.

    Args:
        slots: whose rows these are.
        entries: of the round.
        recorded: else rows end where their agents have acted.

    Returns:
        A number that is not finite; None: there is none.
    """
    by = _Sorted(entries, len(slots.of["row"]))
    # Steps that are let go of as stale are found in no row below, and count once.
    slots.counts["steps_unrecorded"] -= slots.let_go_of_stale(by.agents[by.told[by.heads]])
    found = _located(slots, entries, by, recorded)
    _write_steps(slots, entries, by, found, recorded)
    _write_episodes(slots, entries, by, found)
    _finish_rows(slots, by, found, recorded)
    return _bad_number(slots, entries, by, found)


def _located(slots: PacedSlots, entries: Entries, by: _Sorted, recorded: bool) -> _Located:
    """Find the rows of all entries, and begin those that are new."""
    rows, held = slots.rows, slots.of["row"][by.agents]  # [G] the rows with which agents begin
    so_far = slots.steps_before(by.agents)  # [G]
    # [K] complete steps from the beginning of the held row on, or of the first new one
    done = by.done + by.for_all(so_far - by.done[by.heads] + by.told[by.heads])
    begins = np.zeros(len(done), np.bool_)  # [K]
    if recorded:
        # Much faster than %.
        np.logical_and(by.acts, done == done // rows.steps * rows.steps, out=begins)
    heads = begins.copy()  # [K] entries in the same row begin
    heads[by.heads] = True
    runs = heads.nonzero()[0]  # [C]
    is_new = begins[runs]
    row = np.empty(len(runs), np.intp)  # [C]
    row[~is_new] = held[~begins[by.heads]]
    new = runs[is_new]  # [R]
    if len(new):
        states = entries.states
        if states:  # they are in the order of time
            rank = by.order[new].argsort().argsort()  # [R]
            states = take(states, rank)
        row[is_new] = slots.begin_rows(by.places[new], states)
    lengths = _ends(runs, len(done)) - runs + 1  # [C]
    row_of = row.repeat(lengths)  # [K]
    steps = done - np.where(is_new, done[runs], 0).repeat(lengths)  # [K]
    at = row_of * rows.width + steps
    before = np.full(len(at), -1, np.intp)
    if recorded:
        before[1:] = at[:-1]
    else:
        acted = np.cumsum(by.acts)  # [K]
        row_of[acted - by.acts > by.for_all((acted - by.acts)[by.heads])] = -1
        at[row_of < 0] = -1
    before[by.heads] = np.where(held >= 0, held * rows.width + so_far, -1)
    is_after = steps == rows.steps  # [K] the observation is behind the last step
    full = by.told & (before >= 0) & (begins | is_after)  # [K]
    # Who is told nothing there begins an episode, and no row yet.
    at[is_after & ~by.told] = -1
    return _Located(row_of, steps, at, before, begins, full)


def _write_steps(
    slots: PacedSlots, entries: Entries, by: _Sorted, found: _Located, recorded: bool
) -> None:
    rows = slots.rows
    told = by.told & (found.before >= 0)  # [K]
    count = int(np.count_nonzero(by.told))
    slots.counts["steps"] += count
    slots.counts["steps_unrecorded"] += count - int(np.count_nonzero(told))
    rows.by_step["rewards"][found.before[told]] = by.rewards[told]
    if entries.ended.any():
        _write_ends(slots, entries, by, found)
    # What follows the last step of a row, where the next row has begun.
    more = (found.full & found.begins).nonzero()[0]  # [B]
    if len(more):
        after = take(entries.observations, by.order[more])
        put(rows.by_step["observations"], found.before[more] + 1, after)
    at = np.empty_like(found.at)  # [K] in the order of time
    at[by.order] = found.at
    observations = entries.observations
    if at.min() < 0:
        shown = (at >= 0).nonzero()[0]
        observations = take(observations, shown)
        put(rows.by_step["observations"], at[shown], observations)
    else:
        put(rows.by_step["observations"], at, observations)
    if recorded and entries.acts.any():
        rows.act(at[entries.acts], entries.actions, entries.inputs)


def _write_ends(slots: PacedSlots, entries: Entries, by: _Sorted, found: _Located) -> None:
    rows = slots.rows
    ends = (by.ended & (found.before >= 0)).nonzero()[0]  # [E]
    in_time, at = by.order[ends], found.before[ends]  # [E] both
    truncated = entries.truncated[in_time]  # [E]
    for name, which in (("terminated", ~truncated), ("truncated", truncated)):
        rows.by_step[name][at[which]] = True
    for entry, step in zip(in_time[truncated].tolist(), at[truncated].tolist(), strict=True):
        last = tree_map(np.array, take(entries.observations, entry))  # a copy
        rows.ended_with(step // rows.width, step % rows.width, last)


def _finish_rows(slots: PacedSlots, by: _Sorted, found: _Located, recorded: bool) -> None:
    """Complete rows that are full, and those of agents whose next step is not recorded."""
    of, rows = slots.of, slots.rows
    ready = found.full.nonzero()[0]  # [B]
    finished, steps = found.before[ready] // rows.width, np.full(len(ready), rows.steps)  # [B]
    closed = found.steps[by.lasts] == rows.steps  # [G]
    if not recorded:
        paused = (by.acts & (found.at >= 0) & (found.steps < rows.steps)).nonzero()[0]
        ready = np.concatenate([ready, paused])
        finished = np.concatenate([finished, found.rows[paused]])
        steps = np.concatenate([steps, found.steps[paused]])
        closed |= np.logical_or.reduceat(by.acts, by.heads)
    in_time = np.argsort(by.order[ready])
    rows.finish(finished[in_time], steps[in_time])
    row = np.where(closed, -1, found.rows[by.lasts])  # [G]
    of["row"][by.agents] = row
    of["step"][by.agents] = np.where(row >= 0, found.steps[by.lasts], 0)
    of["acted"][by.agents] = by.acts[by.lasts]


def _write_episodes(slots: PacedSlots, entries: Entries, by: _Sorted, found: _Located) -> None:
    """Note where episodes begin, and what they have brought so far."""
    of = slots.of
    begins = entries.first & entries.acts  # [K] in the order of time
    numbers = np.zeros(len(begins), np.uint64)
    if count := int(np.count_nonzero(begins)):
        numbers[begins] = slots.new_episodes(count)
    # Entries of one agent in the same episode, of which only the first ones may go on.
    heads = by.first.copy()  # [K]
    heads[by.heads] = True
    runs = heads.nonzero()[0]  # [C]
    ends = _ends(runs, len(heads))  # [C]
    places, new = by.places[runs], by.first[runs]  # [C] both
    episodes = np.where(new, numbers[by.order[runs]], of["episode"][places])
    rewards = np.where(by.told, by.rewards, 0)  # [K]
    returns = np.add.reduceat(rewards, runs) + np.where(new, 0, of["return"][places])
    # Steps of the episode before the entry with which the run begins, and its last one.
    begun = np.where(new, 0, of["length"][places]) + by.told[runs]  # [C]
    lengths = begun + by.done[ends] - by.done[runs]

    note = (by.acts & (found.at >= 0) & (by.first | found.begins)).nonzero()[0]  # [B]
    if len(note):
        run = runs.searchsorted(note, "right") - 1  # [B]
        beginnings = np.empty((len(note), 4), np.uint64)
        beginnings[:, 0] = episodes[run]
        beginnings[:, 1] = begun[run] + by.done[note] - by.done[runs[run]]
        beginnings[:, 2:] = slots.newest
        slots.rows.begin_episodes(found.at[note], beginnings)

    over = by.ended[ends]  # [C]
    if over.any():
        in_time = over.nonzero()[0][by.order[ends[over]].argsort()]
        slots.ended += zip(returns[in_time].tolist(), lengths[in_time].tolist(), strict=True)
    run = runs.searchsorted(by.lasts, "right") - 1  # [G]
    agents, over, acts = by.agents, over[run], by.acts[by.lasts]  # [G] all of them
    of["first"][agents] = over | (by.first[by.lasts] & ~acts)
    of["return"][agents] = np.where(over, 0, returns[run])
    of["length"][agents] = np.where(over, 0, lengths[run])
    of["episode"][agents] = episodes[run]
    of["version"][agents[acts]] = slots.newest


def _bad_number(
    slots: PacedSlots, entries: Entries, by: _Sorted, found: _Located
) -> BadNumber | None:
    # Comparisons with a NaN are false.
    finite = (np.abs(entries.rewards) <= MOST_REWARD) | ~entries.told  # [K]
    column, entry, value = "observations", entries.doubted, None
    if np.count_nonzero(finite) < len(finite):
        column, entry = "rewards", int(finite.argmin())
        value = float(entries.rewards[entry])
    if entry < 0:
        return None
    at = int(np.flatnonzero(by.order == entry)[0])
    before = int(found.before[at])
    step = before % slots.rows.width if before >= 0 else int(found.steps[at])
    return BadNumber(int(entries.places[entry]), step, column, value)
