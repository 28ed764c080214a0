from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from juggler.learner.collate import collate
from juggler.learner.store import BatchStore, HeldBatch
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.frames import Frame
from juggler.runtime.wire.v1 import episodes_pb2

OBSERVATION = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
N, T = 2, 4


def _store(action_space: gymnasium.Space[Any]) -> tuple[BatchStore, list[HeldBatch]]:
    arrived: list[HeldBatch] = []
    return BatchStore({"default": (OBSERVATION, action_space)}, arrived.append), arrived


def _frame(batch_id: int, actions: np.ndarray, **columns: Any) -> Any:
    none = {"rows": np.int32, "starts": np.int32, "lengths": np.int32, "offsets": np.int32}
    none |= {"episodes": np.uint64, "generations": np.uint64, "updates": np.uint64}
    batch = EpisodeBatch(
        observations=np.zeros((N, T, 3), np.float32),
        actions=actions,
        rewards=np.zeros((N, T), np.float32),
        terminated=np.zeros((N, T), np.bool_),
        truncated=np.zeros((N, T), np.bool_),
        live=np.ones((N, T), np.bool_),
        action_logp=np.zeros((N, T), np.float32),
        last_observations=np.zeros((N, 3), np.float32),
        final_observations=np.zeros((0, 3), np.float32),
        final_rows=np.zeros(0, np.int32),
        final_steps=np.zeros(0, np.int32),
        **{f"segment_{name}": np.zeros(0, dtype) for name, dtype in none.items()},
    )
    header = episodes_pb2.BatchHeader(batch_id=batch_id, live_steps=N * T)
    return Frame(header, {"default": {**batch.to_tree(), **columns}})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64])
def test_actions_of_any_integer_dtype_fit_into_one_update(dtype: type) -> None:
    store, arrived = _store(gymnasium.spaces.Discrete(2))
    assert store.take(_frame(1, np.ones((N, T), np.int64))) == ""
    assert store.take(_frame(2, np.ones((N, T), dtype))) == ""
    sample = collate([held.modules["default"] for held in arrived])
    assert sample["actions"].numpy().tolist() == np.ones((2 * N, T)).tolist()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_actions_of_any_float_dtype_fit_into_one_update(dtype: type) -> None:
    store, arrived = _store(gymnasium.spaces.Box(-1, 1, (2,), np.float64))
    assert store.take(_frame(1, np.ones((N, T, 2), np.float32))) == ""
    assert store.take(_frame(2, np.ones((N, T, 2), dtype))) == ""
    assert collate([held.modules["default"] for held in arrived])["actions"].dtype.itemsize == 4


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("action_logp", np.zeros((N, T, 5), np.float32)),
        ("terminated", np.zeros((N, T, 5), np.bool_)),
        ("final_rows", np.zeros((), np.int32)),
    ],
)
def test_a_column_of_the_wrong_shape_does_not_get_as_far_as_an_update(
    column: str, value: np.ndarray
) -> None:
    store, arrived = _store(gymnasium.spaces.Discrete(2))
    actions = np.zeros((N, T), np.int64)
    assert f"{column!r} has shape" in store.take(_frame(1, actions, **{column: value}))
    assert arrived == []


def test_a_batch_without_steps_is_refused() -> None:
    store, arrived = _store(gymnasium.spaces.Discrete(2))
    rewards = np.zeros((N, 0), np.float32)
    assert "holds nothing" in store.take(_frame(1, np.zeros((N, 0), np.int64), rewards=rewards))
    assert arrived == []
