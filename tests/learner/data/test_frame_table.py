"""Frames that are kept once, beside stacks that are kept whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from juggler.learner.core.transitions import rows_of_transitions
from juggler.learner.data.collate import collate
from juggler.learner.data.replay.frame_table import FrameTable
from juggler.learner.data.replay.memory_columns import bytes_of_step
from juggler.learner.data.replay.replay import Replay
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


def drawn_from(replay: Replay, pipeline: LearnerPipeline, batch: EpisodeBatch) -> list[Any]:
    found = []
    for sample in replay.add({"default": pipeline(collate([batch]))}):
        found.append(pipeline.stacked(dict(sample["default"])))
        replay.learned({"default": found[-1]["rewards"][:, 0].abs() + 0.1})
    return found


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
    whole, once = (pipeline_of(SPACES[space]) for _ in range(2))
    once.keep_frames_once()
    replays = replay_of(**rules), replay_of(**rules)
    count = 0
    for seed in range(25):
        batch = batch_of(make_batch, SPACES[space], seed, steps=7 + seed % 3)
        expected, found = (
            drawn_from(replay, pipeline, batch)
            for replay, pipeline in zip(replays, (whole, once), strict=True)
        )
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other)
            count += 1
        if seed == 12:  # it goes on from its saved state
            state = replays[1].state()
            replays = replays[0], replay_of(**rules, seed=9)
            replays[1].restore(state, CPU)
    table = replays[1]._modules["default"].table
    assert isinstance(table, FrameTable)
    assert count > 20


def test_frames_that_no_row_has_are_let_go_and_their_slots_used_again(
    make_batch: MakeBatch,
) -> None:
    replay, pipeline = replay_of(capacity=50), pipeline_of(IMAGE)
    pipeline.keep_frames_once()
    for seed in range(40):
        drawn_from(replay, pipeline, batch_of(make_batch, IMAGE, seed))
        table: Any = replay._modules["default"].table
        live = table.generations > 0
        held = np.bincount(table._stacks[live].ravel(), minlength=len(table._frames._holds))
        np.testing.assert_array_equal(table._frames._holds, held)
        used = table._frames._used
        assert used - len(table._frames._free) == np.count_nonzero(held)
    assert used < 50 + 50 // 2 + 60, "those of the rows, and of one arrival"


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
