"""Frames that are kept once, beside stacks that are kept whole."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.core.sequences import all_observations
from juggler.learner.core.transitions import rows_of_transitions, transitions
from juggler.learner.data.collate import collate
from juggler.learner.data.example import example_sample
from juggler.learner.data.replay.episode_rows import living_rows
from juggler.learner.data.replay.memory import bytes_of_step
from juggler.learner.data.replay.replay import MixInReplay, Replay
from juggler.learner.data.replay.table import FrameTable
from juggler.learner.data.sources import DataSource, Queue
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.frame_stack import FRAMES, FrameStack
from juggler.runtime.connectors.learner_pipeline import LearnerPipeline
from juggler.runtime.connectors.rewards import ClipRewards
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.structures import tree_map

MakeBatch = Callable[..., EpisodeBatch]
CPU = torch.device("cpu")
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
    """Rows of episodes, some of which are truncated or go on from the row before."""
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
    """What a source draws of whole stacks, and another one of frames that are kept once.

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
        if seed == 12:
            state, sources[1] = sources[1].state(), make()
            sources[1].restore(state, CPU)


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), one, other)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"capacity": 7},
        {"priority_exponent": 0.6, "remover": "lowest_priority"},
        {"max_times_sampled": 2, "remover": "random", "ratio": 1.5},
    ],
    ids=str,
)
def test_stacks_of_frames_that_are_kept_once_are_those_that_were_kept_whole(
    make_batch: MakeBatch, space: str, rules: dict[str, Any]
) -> None:
    sources: list[Any] = []
    seeds = iter((5, 5, 9))  # the one that goes on has the draws of the one before

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
    """All columns are the same, and so is what was observed before and after each live step."""
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
    keys |= (
        {"replay_begin": 10, "replay_batch_size": 4}
        if algorithm == "r2d2"
        else {"replay_share": 0.6}
    )
    model = {"hidden_sizes": [8], "recurrent": "lstm" if algorithm == "r2d2" else "none"}
    once, whole = (
        build_learner(
            keys,
            None,
            PLACE,
            spaces.Discrete(2),
            model,
            connectors=ConnectorsConfig(env_to_module=[{"use": "frame_stack", "k": K}]),
        )
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
        next(iter(learner._data.table._columns.tree.values())).shape  # type: ignore[attr-defined]
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
        live = table.generations > 0
        held = np.bincount(table._stacks[live].ravel(), minlength=len(table._holds))
        np.testing.assert_array_equal(table._holds, held)
        used = table._frames_used
        assert used - len(table._frames_free) == np.count_nonzero(held)
    assert used < 50 + 50 // 2 + 60, "those of the rows, and of one arrival"


def test_frames_of_a_replay_that_is_discarded_are_gone_at_once(make_batch: MakeBatch) -> None:
    replay, pipeline = replay_of(), pipeline_of(IMAGE)
    pipeline.keep_frames_once()
    drawn_from(replay, pipeline, batch_of(make_batch, IMAGE, 0))
    (column,) = replay.table._frames.tree.values()  # type: ignore[attr-defined]
    held = weakref.ref(column)
    del column
    gc.disable()
    try:
        replay.restore({}, CPU)
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("frames_once", [True, False])
def test_rows_that_come_in_the_other_way_after_a_resume_are_refused(
    make_batch: MakeBatch, frames_once: bool
) -> None:
    """As with a connector that looks at observations, and that was not there before."""
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


@pytest.mark.parametrize("algorithm", ["r2d2", "impala"])
def test_rows_of_84_by_84_images_in_stacks_of_4_take_a_quarter(algorithm: str) -> None:
    learner = build_learner(
        {"algorithm": algorithm, "replay_capacity": 1000}
        | ({"replay_share": 0.5} if algorithm == "impala" else {}),
        None,
        spaces.Box(0, 255, (84, 84), np.uint8),
        spaces.Discrete(2),
        {"hidden_sizes": [8], "recurrent": "lstm" if algorithm == "r2d2" else "none"},
        connectors=ConnectorsConfig(env_to_module=[{"use": "frame_stack", "k": 4}]),
    )
    learner.pipeline.frames_once = False
    spaces_of = learner.core.batch_spaces()
    assert spaces_of is not None
    example = example_sample(*spaces_of, learner.pipeline, learner.example_states(), None)
    whole = learner._data.expect(example)
    assert learner.kept_bytes / 1000 == pytest.approx((32 + 1 + 3) / 32 * 84 * 84, rel=0.02)
    assert whole / learner.kept_bytes > 3.6


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
