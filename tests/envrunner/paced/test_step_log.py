"""A log of a round brings the same rows as the calls that write every step at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from juggler.envrunner.paced.slots import PacedSlots
from juggler.envrunner.paced.step_log import StepLog
from juggler.runtime.acting.actor import Acted, Actor, RandomActions
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version

SEEN = spaces.Dict(
    {"where": spaces.Box(-np.inf, np.inf, (3,), np.float32), "what": spaces.Discrete(1000)}
)
PLACES = 7
Indices = NDArray[np.intp]


class Counting(Actor):
    """Its actions follow from what it sees, and its state counts steps and rewards."""

    def __init__(self) -> None:
        super().__init__(RandomActions(spaces.Discrete(5)))
        self.remembers = True
        self.blank_inputs = np.zeros(2, np.float32)
        self._now = np.zeros((PLACES, 2), np.float32)
        self._before = np.zeros((PLACES, 2), np.float32)

    def grow(self, capacity: int) -> None:
        self._now = np.zeros((capacity, 2), np.float32)
        self._before = np.zeros((capacity, 2), np.float32)

    def act(self, observations: Any, places: Indices, first: NDArray[np.bool_]) -> Any:
        self._now[places[first]] = 0
        self._before[places] = self._now[places]
        self._now[places, 0] += 1
        inputs = observations["where"][:, :2] + self._now[places]  # [B, 2]
        actions = observations["what"] % 5  # [B]
        return Acted(actions.copy(), actions, inputs)

    def rewarded(self, rewards: NDArray[np.floating[Any]], places: Indices) -> None:
        self._now[places, 1] += rewards

    def states_before(self, places: Indices) -> dict[str, Any]:
        return {"state": {"counted": self._before[places]}}

    def log_probabilities(self, inputs: NDArray[np.float32], actions: Any) -> Any:
        return inputs.sum(-1) - actions


class AtOnce:
    """The interface of `StepLog`, with the calls of `PacedSlots`."""

    def __init__(self, slots: PacedSlots, recorded: bool = True) -> None:
        self._slots, self.recorded = slots, recorded

    def end(
        self, places: Indices, rewards: Any, truncated: NDArray[np.bool_], observations: Any
    ) -> None:
        self._slots.take_rewards(places, rewards)
        lasts = {key: each[truncated] for key, each in observations.items()}
        self._slots.end(places, truncated, lasts)
        self._slots.observe(places, observations)

    def show(
        self, places: Indices, rewards: Any, first: NDArray[np.bool_], observations: Any
    ) -> None:
        self._slots.take_rewards(places[~first], rewards[~first])
        self._slots.observe(places, observations)
        self._shown = places, observations

    def act(self, observations: Any) -> Any:
        places, shown = self._shown
        if not self.recorded:
            self._slots.pause(places)
        return self._slots.act(places, np.full(len(places), self.recorded), shown)


class World:
    """Agents that act, wait and end at random, told to a log and to calls alike."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.steps, row_age = int(rng.integers(1, 6)), int(rng.integers(0, 4))
        self.often = rng.choice([0.2, 0.7, 1.0])  # an agent that is there acts
        self.dies = rng.choice([0.0, 0.1, 0.4])
        self.both = [PacedSlots(SEEN, Counting(), self.steps, row_age) for _ in range(2)]
        for slots in self.both:
            slots.seat(PLACES)
        self.log = StepLog(self.both[0], SEEN, self.both[0]._policy)
        self.calls = AtOnce(self.both[1])
        self.begun = np.zeros(PLACES, np.bool_)  # its episode
        self.acted = np.zeros(PLACES, np.bool_)  # its last action is not rewarded yet

    def seen(self, count: int) -> Any:
        where = self.rng.normal(size=(count, 3)).astype(np.float32)
        return {"where": where, "what": self.rng.integers(0, 1000, count)}

    def turn(self) -> None:
        """Some agents end, and some act next."""
        rng = self.rng
        ended = np.flatnonzero(self.acted & (rng.random(PLACES) < self.dies))
        if len(ended):
            told = rng.integers(-4, 5, len(ended)) / 4
            truncated = rng.random(len(ended)) < 0.5
            last = self.seen(len(ended))
            for each in (self.log, self.calls):
                each.end(ended, told, truncated, last)
            self.begun[ended] = self.acted[ended] = False
        self.acting = np.flatnonzero(rng.random(PLACES) < self.often)
        if len(self.acting):
            first = ~self.begun[self.acting]
            told = np.where(first, 0, rng.integers(-4, 5, len(self.acting)) / 4)
            seen = self.seen(len(self.acting))
            self.observations = seen
            for each in (self.log, self.calls):
                each.show(self.acting, told, first, seen)
            self.begun[self.acting] = True
            self.acted[self.acting] = False

    def act(self) -> None:
        if len(self.acting):
            of_log, of_calls = self.log.act(self.observations), self.calls.act(self.observations)
            np.testing.assert_array_equal(of_log, of_calls)
            self.acted[self.acting] = True


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    else:
        np.testing.assert_array_equal(one, other, strict=True)


def age(slots: PacedSlots, row: int) -> tuple[int, ...]:
    """The agent, the episode and the step with which a row begins."""
    columns = slots.rows.columns
    return int(columns["places"][row]), *columns["beginnings"][row, 0].tolist()


@pytest.mark.parametrize("seed", range(40))
def test_a_round_in_a_log_becomes_the_rows_that_are_written_at_once(seed: int) -> None:
    world = World(seed)
    rng, update, batches = world.rng, 0, 0
    world.turn()
    for _ in range(30):
        recorded = world.calls.recorded = bool(rng.random() < 0.8)
        update += int(rng.choice([0, 0, 1, 5]))
        for slots in world.both:
            slots.use(Version(1, update))
        for _ in range(int(rng.integers(1, 9))):
            world.act()
            world.turn()
        assert world.log.write(recorded) is None
        of_log, of_calls = world.both
        cut = rng.random() < 0.1
        for slots in world.both:
            if cut:
                slots.hand_in(np.ones(len(slots.of["row"]), np.bool_))
            slots.drop_stale()
            if not recorded:  # rows that are full and rows that are cut short may change places
                slots.rows.complete.sort(key=lambda row: age(slots, row))
        assert of_log.ended == of_calls.ended
        assert of_log.counts == of_calls.counts
        for name in ("acted", "first", "length", "return"):
            assert_equal(of_log.of[name][:PLACES], of_calls.of[name][:PLACES])
        filling = of_log.of["row"] >= 0
        assert_equal(filling, of_calls.of["row"] >= 0)
        assert_equal(of_log.of["step"][filling], of_calls.of["step"][filling])
        assert of_log.rows.begun == np.count_nonzero(filling), "a row is nobody's"
        if count := len(of_log.rows.complete):
            assert count == len(of_calls.rows.complete)
            made = [
                slots.rows.batch(count, slots._policy.log_probabilities) for slots in world.both
            ]
            for field in dataclasses.fields(EpisodeBatch):
                assert_equal(*(getattr(batch, field.name) for batch in made))
            batches += 1
    assert batches > 3


@pytest.mark.parametrize(
    ("column", "reward"), [("rewards", np.nan), ("rewards", 3e38), ("observations", 0.0)]
)
def test_a_number_that_is_not_finite_is_named_by_the_step_of_its_row(
    column: str, reward: float
) -> None:
    slots = PacedSlots(SEEN, Counting(), 4, 0)
    slots.seat(PLACES)
    log, places = StepLog(slots, SEEN, slots._policy), np.arange(PLACES)
    seen = {"where": np.zeros((PLACES, 3), np.float32), "what": np.zeros(PLACES, np.int64)}
    for step in range(7):
        rewards = np.zeros(PLACES)
        if step == 6 and column == "rewards":
            rewards[5] = reward
        if step == 6 and column == "observations":
            log.doubt(5)
        log.show(places, rewards, np.full(PLACES, step == 0), seen)
        if step < 6:
            log.act(seen)
    bad = log.write(True)
    # The sixth action is the second one of the second row.
    assert bad is not None
    assert (bad.place, bad.step, bad.column) == (5, 1, column)
