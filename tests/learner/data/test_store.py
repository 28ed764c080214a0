from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import Frame
from juggler.runtime.wire.v1 import episodes_pb2

OBSERVATION = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
N, T = 2, 4


def _store(
    action_space: gymnasium.Space[Any], **options: Any
) -> tuple[BatchStore, list[HeldBatch]]:
    arrived: list[HeldBatch] = []
    spaces = {"default": (OBSERVATION, action_space)}
    return BatchStore(spaces, arrived.append, **options), arrived


def _frame(batch_id: int, actions: Any, **columns: Any) -> Any:
    numbers = np.zeros(N, np.uint64)
    batch = EpisodeBatch(
        observations=np.zeros((N, T, 3), np.float32),
        actions=actions,
        rewards=np.zeros((N, T), np.float32),
        terminated=np.zeros((N, T), np.bool_),
        truncated=np.zeros((N, T), np.bool_),
        live=np.ones((N, T), np.bool_),
        action_logp=np.zeros((N, T), np.float32),
        last_observations=np.zeros((N, 3), np.float32),
        states={},
        final_observations=np.zeros((0, 3), np.float32),
        final_rows=np.zeros(0, np.int32),
        final_steps=np.zeros(0, np.int32),
        segment_episodes=np.arange(N, dtype=np.uint64),
        segment_rows=np.arange(N, dtype=np.int32),
        segment_starts=np.zeros(N, np.int32),
        segment_lengths=np.full(N, T, np.int32),
        segment_offsets=np.zeros(N, np.int32),
        segment_generations=numbers,
        segment_updates=numbers,
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
    with pytest.raises(WireError, match=f"{column!r} has shape"):
        store.take(_frame(1, actions, **{column: value}))
    assert arrived == []


def test_a_batch_without_steps_is_refused() -> None:
    store, arrived = _store(gymnasium.spaces.Discrete(2))
    rewards = np.zeros((N, 0), np.float32)
    with pytest.raises(WireError, match="holds nothing"):
        store.take(_frame(1, np.zeros((N, 0), np.int64), rewards=rewards))
    assert arrived == []


def test_actions_of_every_kind_come_in_the_dtypes_that_policies_act_in() -> None:
    space = gymnasium.spaces.Dict(
        {
            "bits": gymnasium.spaces.MultiBinary(2),
            "many": gymnasium.spaces.Tuple([gymnasium.spaces.MultiDiscrete([2, 3])]),
        }
    )
    store, arrived = _store(space)
    for batch_id, dtype in enumerate((np.int8, np.int64)):
        actions = {"bits": np.ones((N, T, 2), dtype), "many": {"0": np.ones((N, T, 2), dtype)}}
        assert store.take(_frame(batch_id, actions)) == ""
    collated = collate([held.modules["default"] for held in arrived])["actions"]
    assert collated["bits"].dtype == torch.int8
    assert collated["many"]["0"].dtype == torch.int64


STATES = {"module": {"h": np.zeros((5,), np.float32)}, "connectors": {"stack": np.zeros((), bool)}}


def _states(h: Any, stack: Any) -> dict[str, Any]:
    return {"module": {"h": h}, "connectors": {"stack": stack}}


def test_states_are_taken_as_the_module_has_them() -> None:
    store, arrived = _store(gymnasium.spaces.Discrete(2), states={"default": STATES})
    good = _states(np.ones((N, 5), np.float32), np.ones(N, bool))
    assert store.take(_frame(1, np.zeros((N, T), np.int64), states=good)) == ""
    assert arrived[0].modules["default"].states["module"]["h"].sum() == 5 * N


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({}, "states lack an array at 'connectors/stack'; expected: 'module/h', 'connectors/st"),
        (
            _states(np.ones((N, 4), np.float32), np.ones(N, bool)),
            "states/module/h of shape [N, *(4,)] and dtype float32 do not fit the module's, "
            "[N, *(5,)] of float32",
        ),
        (_states(np.ones((N, 5)), np.ones(N, bool)), "dtype float64 do not fit"),
        (_states(np.ones((N, 5), np.float32), np.ones((N, 1), bool)), "states/connectors/stack of"),
    ],
)
def test_states_of_another_module_are_refused(states: Any, message: str) -> None:
    store, _ = _store(gymnasium.spaces.Discrete(2), states={"default": STATES})
    with pytest.raises(WireError, match=r"^default: states") as raised:
        store.take(_frame(1, np.zeros((N, T), np.int64), states=states))
    assert message in str(raised.value)


def test_states_that_nobody_expects_are_refused() -> None:
    store, _ = _store(gymnasium.spaces.Discrete(2))
    states = {"module": np.zeros(N)}
    with pytest.raises(WireError, match="default: states have an array at 'module'; expected: no"):
        store.take(_frame(1, np.zeros((N, T), np.int64), states=states))
