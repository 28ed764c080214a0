"""Tables of rows, episodes and frames against rules written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import MakeBatch, in_format_4, kept, numbered, table_of

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.returns import rows_of_transitions, transitions
from juggler.learner.core.sequences import all_observations
from juggler.learner.data.collate import collate
from juggler.learner.data.replay import column_storage
from juggler.learner.data.replay.column_storage import bytes_of_step
from juggler.learner.data.replay.replay import MixInReplay, Replay
from juggler.learner.data.replay.table import (
    EpisodeTable,
    FrameTable,
    SumTree,
    living_rows,
    resized,
    size_of,
)
from juggler.learner.data.sources import DataSource, Queue
from juggler.runtime.connectors.contexts import FRAMES, FrameStack
from juggler.runtime.connectors.learning import ClipRewards
from juggler.runtime.connectors.pipelines import LearnerPipeline
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.structures import tree_map

CPU = torch.device("cpu")


@pytest.mark.parametrize("capacity", [1, 7, 16])
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_rows_are_kept_and_counted_as_one_by_one(alpha: float, capacity: int) -> None:
    table, rng = table_of(capacity, alpha=alpha), np.random.default_rng(1)
    came = unused = 0
    seen: set[int] = set()
    for _ in range(100):
        before = set(range(max(0, came - capacity), came))
        if count := int(rng.integers(0, 6 if rng.random() < 0.9 else 30)):
            table.insert(dict(numbered(came, count)))
            came += count
        here = range(max(0, came - capacity), came)
        unused += len(before - seen - set(here)) + max(0, count - capacity)
        if not came:
            continue
        assert kept(table) == list(here)
        if count := int(rng.integers(0, 9)):
            numbers = table.sample(count).rows["number"].tolist()
            assert set(numbers) <= set(here)
            seen |= set(numbers)
        assert (table.size, table.came_rows) == (len(here), came)
        assert (table.drawn_rows, table.unused_rows) == (len(seen), unused)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_half_a_row_is_never_drawn(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(4, alpha=alpha)
    table.insert(dict(numbered(0, 4)))

    def failing(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("juggler.learner.data.replay.column_storage.ColumnStorage.write", failing)
        with pytest.raises(MemoryError):
            table.insert(dict(numbered(4, 2)))
    assert table.size == 0
    table.insert(dict(numbered(6, 3)))
    assert kept(table) == [6, 7, 8]
    assert set(table.sample(100).slots.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("capacity", [4, 5, 7, 8, 20])
def test_the_oldest_rows_leave_a_table_that_has_got_more_room(capacity: int) -> None:
    one = Replay(dict, capacity=4, size=1, ratio=0.1)
    for first in range(7):
        list(one.add(numbered(first, 1)))
    for _ in range(2):  # a checkpoint of one that has got more room is like others
        other = Replay(dict, capacity=capacity, size=1, ratio=0.1)
        other.restore(one.state(), CPU)
        table = other.table
        for first in range(table.came_rows, 30):
            oldest = kept(table)
            list(other.add(numbered(first, 1)))
            assert kept(table) == [*oldest, first][-capacity:]
        one = other


def slow_find(weights: np.ndarray, value: float) -> int:
    """The slot of a running sum, one slot at a time."""
    for slot, weight in enumerate(weights):
        if value < weight:
            return slot
        value -= weight
    raise AssertionError("beyond the total")


@pytest.mark.parametrize("capacity", [1, 2, 3, 15, 16, 17, 255, 256, 257])
def test_slots_are_found_as_by_adding_up_all_weights(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    tree, weights = SumTree(capacity), np.zeros(capacity)
    for _ in range(200):
        slots = rng.integers(capacity, size=rng.integers(1, 6))
        if rng.random() < 0.3:  # a run of successive ones, as a ring has it
            slots = (slots[0] + np.arange(min(capacity, 40))) % capacity
        slots = np.array(list(dict.fromkeys(slots.tolist())))
        # Sums of these weights are exact, so that both ways find the same.
        new = rng.integers(0, 8, size=len(slots)) / 4
        tree[slots], weights[slots] = new, new
        assert tree.total == weights.sum()
        np.testing.assert_array_equal(tree[np.arange(capacity)], weights)
        if tree.total:
            sums = np.append(rng.random(20), [0.0, np.nextafter(1.0, 0.0)]) * tree.total
            found = tree.find(sums)
            assert found.tolist() == [slow_find(weights, float(each)) for each in sums]


def test_rounding_does_not_add_up_and_of_a_slot_named_twice_the_last_weight_counts() -> None:
    rng = np.random.default_rng(1)
    tree, weights = SumTree(1000), np.zeros(1000)
    for _ in range(2000):
        slots = np.unique(rng.integers(1000, size=64))
        new = rng.random(len(slots)) * 10.0 ** rng.integers(-8, 9)
        tree[slots], weights[slots] = new, new
    assert tree.total == pytest.approx(weights.sum(), rel=1e-12)
    tree = SumTree(4)
    tree[np.array([2, 2])] = np.array([5.0, 3.0])
    assert tree.total == 3.0


# A table of rows of episodes whose rows get room for more: what is reallocated, and what stays.


def rows_of(make_batch: MakeBatch, seed: int, **keys: Any) -> dict[str, Any]:
    return living_rows(collate([make_batch(3, seed=seed, **keys)]))


def same(found: Any, rows: Any) -> None:
    alike = resized(rows, size_of(found), size_of(rows))
    tree_map(partial(torch.testing.assert_close, rtol=0, atol=0), found, alike)


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_are_the_same_once_rows_with_more_ends_have_come(
    make_batch: MakeBatch, tmp_path: Path, on_disk: bool
) -> None:
    table = table_of(5 * 6, EpisodeTable, directory=str(tmp_path) if on_disk else "")
    older = [rows_of(make_batch, seed, ends=0.0) for seed in range(2)]
    for rows in older:
        table.insert(rows)
    more = rows_of(make_batch, 2, ends=0.9, reset_rows=False)
    assert size_of(more).finals > 1 < size_of(more).segments
    later = table.insert(more)
    found = table.rows(table.oldest_first())
    same(tree_map(lambda x: x[:2], found), tree_map(lambda x: x[1:], older[1]))
    same(table.rows(later), more)


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_table_that_lacks_memory_for_longer_rows_has_none_and_goes_on(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    table = table_of(9 * 3, EpisodeTable)
    table.insert(rows_of(make_batch, 0, ends=0.0))
    made, calls = column_storage.ColumnStorage.__init__, count(1)

    def lacking(*given: Any) -> None:
        if next(calls) == failing:
            raise MemoryError
        made(*given)

    longer = rows_of(make_batch, 1, steps=9, ends=0.9, reset_rows=False)
    with monkeypatch.context() as patch:
        patch.setattr(column_storage.ColumnStorage, "__init__", lacking)
        with pytest.raises(MemoryError):
            table.insert(longer)
    assert (table.size, table.unused_rows) == (0, 3)
    same(table.rows(table.insert(longer)), longer)


@pytest.mark.parametrize("steps", [6, 9])
def test_rows_are_gone_if_there_is_no_room_on_disk_for_wider_ones(
    make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    table = table_of(6 * 3, EpisodeTable, directory=str(tmp_path))
    table.insert(rows_of(make_batch, 0, ends=0.0))

    def full(*_: Any) -> Any:
        raise column_storage.no_room_on_disk(str(tmp_path), 1e9, "full")

    with monkeypatch.context() as patch:
        patch.setattr(column_storage, "_on_disk", full)
        wider = rows_of(make_batch, 1, steps=steps, ends=0.9, reset_rows=False)
        with pytest.raises(ValueError, match="there is no room"):
            table.insert(wider)
    assert (table.size, table.unused_rows) == (0, 3)
    again = rows_of(make_batch, 2, ends=0.0)
    same(table.rows(table.insert(again)), again)


# Frames that are kept once, beside stacks that are kept whole.


IMAGE = spaces.Box(0, 255, (5, 6), np.uint8)
PLACE = spaces.Box(-1, 1, (3,), np.float32)
SPACES = {
    "images": IMAGE,
    "vectors": PLACE,
    "several": spaces.Dict({"image": IMAGE, "at": PLACE, "kind": spaces.Discrete(9)}),
}
K = 3


def pipeline_of(space: Any, *connectors: Any) -> LearnerPipeline:
    stack = FrameStack(space, spaces.Discrete(2), K)
    return LearnerPipeline({"stack": stack}, dict(enumerate(connectors)), space)  # type: ignore[arg-type]


def valued(space: Any, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Random values of a space."""
    if isinstance(space, spaces.Dict):
        return {key: valued(each, shape, rng) for key, each in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return rng.integers(9, size=shape)
    return rng.integers(0, 200, (*shape, *space.shape)).astype(space.dtype)


def batch_of(make_batch: MakeBatch, space: Any, seed: int, rows: int = 3, steps: int = 7) -> Any:
    """Rows of episodes, some truncated, some continued."""
    rng = np.random.default_rng(seed)
    plain = make_batch(rows, steps, seed=seed, ends=0.3)
    boxes = (
        spaces.Dict({key: each for key, each in space.spaces.items() if key != "kind"})
        if isinstance(space, spaces.Dict)
        else space
    )
    return make_batch(
        rows,
        steps,
        seed=seed,
        ends=0.3,
        observations=valued(space, (rows, steps), rng),
        last_observations=valued(space, (rows,), rng),
        final_observations=valued(space, (len(plain.final_rows),), rng),
        states={"connectors": {"stack": valued(boxes, (rows, K - 1), rng)}},
    )


def replay_of(**changes: Any) -> Replay:
    rows = partial(rows_of_transitions, n=2, gamma=0.5)
    given = {"capacity": 60, "size": 16, "ratio": 2.0, "seed": 5, **changes}
    return Replay(rows, **given)


def drawn_from(replay: DataSource, pipeline: LearnerPipeline, batch: EpisodeBatch) -> list[Any]:
    found = []
    for sample in replay.add(pipeline(collate([batch]))):
        found.append(pipeline.stacked(dict(sample)))
        replay.update_priorities(found[-1]["rewards"][:, 0].abs() + 0.1)
    return found


def drawn_by_both(
    make_batch: MakeBatch, space: Any, make: Callable[[], Any], sources: list[Any], **keeping: bool
) -> Iterator[tuple[Any, Any]]:
    """Draws of whole stacks, and of frames that are kept once.

    Args:
        make_batch: the fixture.
        space: of observations.
        make: makes a source.
        sources: gets both. In the middle, another one goes on from the state of the second.
        keeping: of `keep_frames_once`.
    """
    whole, once = (pipeline_of(space) for _ in range(2))
    once.keep_frames_once(**keeping)
    sources[:] = make(), make()
    for seed in range(25):
        batch = batch_of(make_batch, space, seed, steps=5 + seed % 4)
        expected = drawn_from(sources[0], whole, batch)
        yield from zip(expected, drawn_from(sources[1], once, batch), strict=True)
        if seed in (12, 18):
            state, sources[1] = sources[1].state(), make()
            sources[1].restore(in_format_4(state) if seed == 18 else state, CPU)


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), one, other)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("rules", [{}, {"capacity": 7}, {"priority_exponent": 0.6}], ids=str)
def test_stacks_of_frames_that_are_kept_once_are_those_that_were_kept_whole(
    make_batch: MakeBatch, space: str, rules: dict[str, Any]
) -> None:
    sources: list[Any] = []
    seeds = iter((5, 5, 9, 9))  # the one that goes on has the draws of the one before

    def make() -> Replay:
        return replay_of(**rules, seed=next(seeds))

    pairs = [*drawn_by_both(make_batch, SPACES[space], make, sources)]
    for one, other in pairs:
        assert_same(one, other)
    assert isinstance(sources[1].table, FrameTable)
    assert len(pairs) > 20


def rows_kept(rules: dict[str, Any]) -> Replay:
    """A replay of whole rows, as R2D2 has it."""
    given = {"size": 5, "ratio": 3.0, "seed": 5, **rules}
    return Replay(living_rows, episodes=True, **given)


def mixed_in(rules: dict[str, Any]) -> MixInReplay:
    """Old rows beside new ones, as IMPALA has them."""
    return MixInReplay(Queue(), share=0.7, capacity=rules["capacity"], saved=True, seed=5)


def assert_the_same_is_learned(one: Any, other: Any) -> None:
    """Check that all columns and surrounding observations are the same."""
    seen = []
    for columns in (one, other):
        live, after = columns["live"], transitions(columns, 1, 0.9).after
        everything = all_observations(columns)
        before = tree_map(lambda x, m=live: x[m], columns["observations"])
        seen.append(
            {"before": before, "after": tree_map(lambda x, i=after[live]: x[i], everything)}
        )
    assert_same(*seen)
    names = one.keys() - {"observations", "last_observations"}
    assert_same(*({name: columns[name] for name in names} for columns in (one, other)))


RULES = [{"capacity": 1000}, {"capacity": 60}, {"capacity": 60, "priority_exponent": 0.6}]


@pytest.mark.parametrize(
    ("space", "rules", "make"),
    [  # each pair of two
        pytest.param(space, rules, (rows_kept, mixed_in)[(i + j) % 2], id=f"{space}, {rules}")
        for i, space in enumerate(SPACES)
        for j, rules in enumerate(RULES)
    ],
)
def test_rows_whose_frames_are_stacked_when_they_are_drawn_are_those_that_were_kept_whole(
    make_batch: MakeBatch, space: str, rules: dict[str, Any], make: Any
) -> None:
    sources: list[Any] = []
    of_both = drawn_by_both(
        make_batch, SPACES[space], partial(make, rules), sources, rows_stay=True
    )
    count = ends = longest = 0
    for one, other in of_both:
        assert_the_same_is_learned(one, other)
        count, ends = count + 1, ends + len(one["final_rows"])
        longest = max(longest, one["live"].shape[1])
    assert sources[1].keeps_rows
    assert count > 20
    assert ends > 20, "truncated episodes, with observations of their own"
    assert longest == 8, "shorter rows were padded"


@pytest.mark.parametrize("algorithm", ["r2d2", "impala", "appo"])
def test_learners_learn_the_same_from_frames_that_are_kept_once(
    make_batch: MakeBatch, algorithm: str
) -> None:
    keys: dict[str, Any] = {"algorithm": algorithm, "replay_capacity": 80}
    kept = {"replay_begin": 10, "replay_batch_size": 4}
    keys |= kept if algorithm == "r2d2" else {"replay_share": 0.6}
    model = {"hidden_sizes": [8], "recurrent": "lstm" if algorithm == "r2d2" else "none"}
    connectors = {"env_to_module": [{"use": "frame_stack", "k": K}]}
    once, whole = (
        build_learner(keys, None, PLACE, spaces.Discrete(2), model, connectors=connectors)
        for _ in range(2)
    )
    whole.pipeline.frames_once = False

    for seed in range(8):
        batch = batch_of(make_batch, PLACE, seed, steps=5 + seed % 3)
        states: Any = {"connectors": {"frame_stack": batch.states["connectors"]["stack"]}}
        if algorithm == "r2d2":
            size = once.example_states()["module"]["hidden"].shape  # type: ignore[index,call-overload,union-attr]
            states["module"] = {
                name: np.ones((3, *size), np.float32) for name in ("hidden", "cell")
            }
        found = [
            fetch_metrics(learner.update_from_episodes([replace(batch, states=states)]))
            for learner in (once, whole)
        ]
        assert found[0] == found[1]
    np.testing.assert_equal(once.get_weights(), whole.get_weights())
    shapes = [
        next(iter(learner.data.table._columns.tree.values())).shape  # type: ignore[attr-defined]
        for learner in (once, whole)
    ]
    assert shapes[0][-1] * K == shapes[1][-1]


def test_frames_that_no_row_has_are_let_go_and_their_slots_used_again(
    make_batch: MakeBatch,
) -> None:
    replay, pipeline = replay_of(capacity=50), pipeline_of(IMAGE)
    pipeline.keep_frames_once()
    for seed in range(40):
        drawn_from(replay, pipeline, batch_of(make_batch, IMAGE, seed))
        table: Any = replay.table
        stacks = table._stacks[: table.size]
        held = np.bincount(stacks.ravel(), minlength=len(table._holds))
        np.testing.assert_array_equal(table._holds, held)
        used = table._frames_used
        assert used - len(table._frames_free) == np.count_nonzero(held)
    assert used < 50 + 50 // 2 + 60, "those of the rows, and of one arrival"


@pytest.mark.parametrize("frames_once", [True, False])
def test_rows_that_come_in_the_other_way_after_a_resume_are_refused(
    make_batch: MakeBatch, frames_once: bool
) -> None:
    """As with a connector that was added before the resume."""
    before, after = pipeline_of(IMAGE), pipeline_of(IMAGE)
    (before if frames_once else after).keep_frames_once()
    replay, resumed = replay_of(), replay_of()
    drawn_from(replay, before, batch_of(make_batch, IMAGE, 0))
    resumed.restore(replay.state(), CPU)
    with pytest.raises(ValueError, match=r"only one side has \['frames'\]"):
        drawn_from(resumed, after, batch_of(make_batch, IMAGE, 1))


def test_84_by_84_images_in_stacks_of_4_take_a_seventh_of_the_memory(make_batch: MakeBatch) -> None:
    space = spaces.Box(0, 255, (84, 84), np.uint8)
    sizes = []
    for once in (False, True):
        pipeline = LearnerPipeline({"stack": FrameStack(space, spaces.Discrete(2), 4)}, {}, space)
        if once:
            pipeline.keep_frames_once()
        plain = make_batch(1, 64, ends=0.0)
        batch = make_batch(
            1,
            64,
            ends=0.0,
            observations=np.zeros((1, 64, 84, 84), np.uint8),
            last_observations=np.zeros((1, 84, 84), np.uint8),
            final_observations=np.zeros((0, 84, 84), np.uint8),
            states={"connectors": {"stack": np.zeros((1, 3, 84, 84), np.uint8)}},
        )
        columns = pipeline(collate([batch]))
        rows = rows_of_transitions({k: v for k, v in columns.items() if k != FRAMES}, 1, 0.9)
        sizes.append(bytes_of_step(rows | ({FRAMES: columns[FRAMES]} if once else {})))
        del plain
    assert sizes[0] == pytest.approx(8 * 84 * 84, rel=0.01)
    assert sizes[0] / sizes[1] > 7


def test_frames_are_kept_once_where_nothing_else_looks_at_observations() -> None:
    rewards = ClipRewards(IMAGE, spaces.Discrete(2))
    for pipeline, expected in (
        (pipeline_of(IMAGE), True),
        (pipeline_of(IMAGE, rewards), True),
        (LearnerPipeline({}, {}, IMAGE), False),
    ):
        pipeline.keep_frames_once()
        assert pipeline.frames_once is expected


def test_rows_on_disk_are_those_in_memory_and_leave_no_file(
    make_batch: MakeBatch, tmp_path: Path
) -> None:
    pipeline = pipeline_of(IMAGE)
    pipeline.keep_frames_once()
    replays = replay_of(), replay_of(directory=str(tmp_path))
    for seed in range(12):
        batch = batch_of(make_batch, IMAGE, seed)
        for one, other in zip(
            *(drawn_from(each, pipeline, batch) for each in replays), strict=True
        ):
            assert_same(one, other)
    assert list(tmp_path.iterdir()) == []
