"""Environments that are simulators elsewhere: the protocol, its faults, and its tensors."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2, tensor_utils
from dm_env_rpc.v1 import dm_env_rpc_pb2 as theirs
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.network import free_address
from support.package_simulator import (
    BOARD,
    MOVE,
    PUSH,
    REWARD,
    SEEN,
    Arena,
    Served,
    act,
    arena_specs,
    dial,
    tensor_spec,
)

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc import simulator_vector
from juggler.envrunner.dm_env_rpc.tensors import (
    _NUMBERS,
    MAX_ELEMENTS,
    SimulatorError,
    Spec,
    setting,
)
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as ours
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed


def test_spaces_are_those_of_the_specs(connect: Any) -> None:
    env = connect()
    assert env.single_action_space == spaces.Dict(
        {
            "move": spaces.Discrete(3, start=-1),
            "push": spaces.Box(np.float32(-0.1), np.float32(0.1), (2,)),
        }
    )
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    assert env.single_observation_space == spaces.Dict(
        {
            "agent": spaces.Dict({"count": spaces.Box(low, high, (2,), np.int64)}),
            "board": spaces.Box(0, 100, (3, 4), np.float32),
        }
    )
    assert env.observation_space.contains(env.reset()[0])


def test_a_step_behind_an_end_begins_the_next_sequence(connect: Any, arena: Arena) -> None:
    """Its actions are ignored; sequences end terminated and interrupted in turn."""
    env = connect(count=1)
    env.reset()
    seen = []
    for _ in range(8):
        observations, rewards, terminated, truncated, infos = env.step(act(1))
        step = int(observations["agent"]["count"][0, 0])
        assert (observations["board"] == step).all(), "one element stands for all"
        seen.append((step, rewards[0], bool(terminated[0]), bool(truncated[0])))
        assert infos["discount"].tolist() == [0.5]
    assert seen == [
        (1, 0.5, False, False),
        (2, 1.0, False, False),
        (3, 1.5, True, False),
        (0, 0.0, False, False),
        (1, 0.5, False, False),
        (2, 1.0, False, False),
        (3, 1.5, False, True),
        (0, 0.0, False, False),
    ]
    assert len(arena.actions) == 6
    assert arena.actions[0][MOVE] == 1
    np.testing.assert_array_equal(arena.actions[0][PUSH], np.float32([0.05, 0.05]))


def test_all_requests_are_out_before_any_reply_is_read(connect: Any, arena: Arena) -> None:
    """As with agents that act together: replies come after all actions."""
    arena.barrier = threading.Barrier(4)
    env = connect(count=4)
    env.reset()
    for _ in range(5):
        env.step(act(4))


def test_a_notebook_has_an_event_loop_of_its_own(connect: Any) -> None:
    async def cell() -> float:
        env = connect(count=2)
        env.reset()
        rewards = env.step(act(2))[1]
        env.close()
        return float(rewards[1])

    assert asyncio.run(cell()) == 0.5


def test_floats_are_cut_to_bounds(connect: Any, arena: Arena) -> None:
    env = connect(count=1)
    env.reset()
    env.step({"move": np.zeros(1, int), "push": np.array([[-7.0, 0.1]])})
    np.testing.assert_array_equal(arena.actions[0][PUSH], np.float32([-0.1, 0.1]))


def test_a_reset_gives_up_what_runs_and_sends_the_seed(connect: Any, arena: Arena) -> None:
    env = connect(count=1, seed_setting="seed")
    env.reset(seed=5)
    env.step(act(1))
    observations, _ = env.reset(seed=6)
    assert observations["agent"]["count"][0, 0] == 0
    assert arena.calls.count("reset") == 2
    env.step(act(1))
    env.reset()
    assert arena.calls.count("reset") == 3


def test_worlds_are_left_and_destroyed(connect: Any, arena: Arena) -> None:
    env = connect(count=3)
    assert len(arena.worlds) == 3
    env.close()
    assert arena.worlds == set()
    assert arena.calls.count("leave_world") == 3


def test_env_runners_share_servers_among_them(arena: Arena, served: Served) -> None:
    other = Served(second := Arena())
    both = EnvRunnerConfig(
        env=f"dm_env_rpc://{served.address},{other.address}",
        env_kwargs={"observations": SEEN},
        envs_per_runner=1,
    )
    made = [make_vector_env(both, runner=runner) for runner in range(3)]
    assert (len(arena.worlds), len(second.worlds)) == (2, 1)
    for env in made:
        env.close()
    other.close()


def test_an_env_runner_joins_the_worlds_of_its_number(arena: Arena, served: Served) -> None:
    worlds = [arena.new_world() for _ in range(2)]
    assert worlds == ["arena 1", "arena 2"]
    kwargs = {"observations": SEEN, "world": "arena {runner}"}
    config = EnvRunnerConfig(
        env=f"dm_env_rpc://{served.address}", env_kwargs=kwargs, envs_per_runner=2
    )
    make_vector_env(config, runner=2).close()
    with pytest.raises(EnvironmentFailed, match=r"refused join_world.*arena 3"):
        make_vector_env(config, runner=3)


def test_settings_reach_the_simulator(connect: Any) -> None:
    connect(create_world={"seed": {"dtype": "int32", "value": 3}})
    with pytest.raises(EnvironmentFailed, match=r"refused create_world.*unknown settings.*'level'"):
        connect(create_world={"level": "maze"})
    with pytest.raises(EnvironmentFailed, match=r"refused join_world.*unknown settings.*'hat'"):
        connect(join_world={"hat": [1, 2]})


def test_specs_may_get_other_ids_and_others_beside_them(connect: Any, arena: Arena) -> None:
    env = connect(count=1)
    env.reset()
    before = arena_specs()
    actions = {uid + 50: spec for uid, spec in before[0].items()}
    observations = {uid + 70: spec for uid, spec in before[1].items()}
    observations[1] = tensor_spec("heat", dm_env_rpc_pb2.FLOAT, (2,))
    arena.specs = lambda: (actions, observations)
    env.reset(seed=1)
    _, rewards, *_ = env.step(act(1, -1))
    assert rewards[0] == 0.5
    assert arena.actions[-1][MOVE + 50] == -1


# Environments that are simulators elsewhere, which do what they should not.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"observations": None}, "observation 'title' is of type"),
        ({"observations": ["view"]}, "has no observation 'view'; it has"),
        ({"actions": ["jump"]}, "has no action 'jump'; it has move, push"),
        ({"reward": "score"}, "has no observation"),
        ({"reward": "board"}, "'board' must be one number"),
    ],
)
def test_what_cannot_be_used_is_named(connect: Any, options: Any, words: str) -> None:
    with pytest.raises(EnvironmentFailed, match=words):
        connect(**options)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"env_kwargs": {"create": {}}}, "unknown field `create`; keys"),
        ({"env_kwargs": {"world": "a", "create_world": {"b": 1}}}, "has no create_world"),
        ({"env_kwargs": {"connect_seconds": 0}}, "connect_seconds must be"),
        ({"env": "dm_env_rpc://here"}, "'here' is not an address"),
        ({"vectorize": "async"}, "simulators run elsewhere"),
    ],
)
def test_a_wrong_configuration_is_told(keys: dict[str, Any], words: str) -> None:
    config = EnvRunnerConfig(**{"env": "dm_env_rpc://127.0.0.1:1", **keys})
    with pytest.raises(ValueError, match=words):
        make_vector_env(config)


# -- specs that change ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a, o: o.pop(BOARD), "the observation 'board' is gone"),
        (
            lambda a, o: o.update(
                {BOARD: tensor_spec("board", dm_env_rpc_pb2.FLOAT, (3, 5), 0.0, 100.0)}
            ),
            r"'board' \(float32 \[3, 4\].* is",
        ),
        (
            lambda a, o: a.update({MOVE: tensor_spec("move", dm_env_rpc_pb2.INT32, (), 0, 1)}),
            "the action 'move' .*min -1, max",
        ),
    ],
)
def test_specs_that_no_longer_fit_are_named(
    connect: Any, arena: Arena, change: Any, words: str
) -> None:
    env = connect(count=1)
    env.reset()
    env.step(act(1))
    actions, observations = arena_specs()
    change(actions, observations)
    arena.specs = lambda: (actions, observations)
    with pytest.raises(EnvironmentFailed, match=words):
        env.reset()


# -- faults -----------------------------------------------------------------------------------


def _without_reward(response: Any, _: int) -> Any:
    del response.observations[REWARD]
    return response


def _with_board(value: Any) -> Callable[[Any, int], Any]:
    def change(response: Any, step: int) -> Any:
        if step:
            response.observations[BOARD].CopyFrom(tensor_utils.pack_tensor(value))
        return response

    return change


def _without_state(response: Any, step: int) -> Any:
    response.state = 0 if step else response.state
    return response


def _raise(response: Any, step: int) -> Any:
    raise FileNotFoundError("no map there")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_reward, "'reward' was requested, and is"),
        (_with_board(np.zeros((3, 4))), "'board' arrived as doubles, and its"),
        (_with_board(np.zeros((4, 3), np.float32)), r"shape \[4, 3\], and its spec says \[3, 4\]"),
        (_without_state, "has the state 0"),
        (_raise, "refused step: INVALID_ARGUMENT"),
    ],
)
def test_a_reply_that_is_wrong_is_told(
    connect: Any, arena: Arena, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    monkeypatch.setattr(simulator_vector, "_FAREWELL_SECONDS", 20.0)
    monkeypatch.setattr(simulator_vector, "_CLOSING_SECONDS", 30.0)
    env = connect()
    env.reset()
    arena.change = change
    with pytest.raises(EnvironmentFailed, match=f"environment 0 .*{words}"):
        env.step(act(2))
    env.close()
    assert arena.worlds == set(), "left in order"


def test_sequences_that_end_at_once_do_not_go_on_forever(connect: Any, arena: Arena) -> None:
    env = connect(count=1)
    arena.length = 0
    with pytest.raises(EnvironmentFailed, match="8 sequences in a row ended in"):
        env.reset()


def test_a_hanging_simulator_is_told_at_its_deadline(connect: Any, arena: Arena) -> None:
    env = connect(count=2, deadline=2.0)
    env.reset()
    wait = threading.Event()
    arena.change = lambda response, step: (wait.wait(100), response)[1]
    with pytest.raises(EnvironmentFailed, match="no reply to step within 2"):
        env.step(act(2))
    env.close()  # which does not wait for it
    assert not wait.is_set()
    wait.set()


def test_a_reply_that_is_too_large_is_told_with_what_to_leave_out(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = ("grpc.max_receive_message_length", 64)
    monkeypatch.setattr(simulator_vector, "OPTIONS", [limit])
    with pytest.raises(EnvironmentFailed, match=r"RESOURCE_EXHAUSTED.*env_kwargs\.observations"):
        connect(count=1)


def test_a_simulator_that_comes_late_is_waited_for(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, told = free_address(), threading.Event()
    served: list[Served] = []
    said: list[str] = []

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            said.append(text)
            told.set()
            return len(text)

    monkeypatch.setattr(sys, "stderr", Told())

    def come_late() -> None:
        told.wait(60)
        served.append(Served(arena, int(address.rpartition(":")[2])))

    thread = threading.Thread(target=come_late)
    thread.start()
    env = dial(address, count=2, observations=SEEN)
    env.reset()
    env.close()
    thread.join()
    served[0].close()
    assert f"no simulator at {address} yet" in "".join(said)


def test_nobody_there_is_told_at_the_deadline() -> None:
    with pytest.raises(EnvironmentFailed, match="no simulator answers at"):
        dial("127.0.0.1:1", connect_seconds=0.5)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"\xff\xfe\xfd", "is no message of dm_env_rpc v1"),
        (b"", "is one to nothing"),
        (dm_env_rpc_pb2.EnvironmentResponse(leave_world={}).SerializeToString(), "to leave_world"),
        (None, "UNIMPLEMENTED"),
    ],
)
def test_what_is_no_reply_is_told(reply: bytes | None, words: str) -> None:
    served = Served(reply=reply)
    with pytest.raises(EnvironmentFailed, match=words):
        dial(served.address)
    served.close()


# Tensors of dm_env_rpc: the same numbers as the package dm-env-rpc has, and what is refused.


DTYPES = ["f4", "f8", "i1", "i4", "i8", "u1", "u4", "u8", "?"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, max_side=5))
)


def spec_of(array: Any) -> Spec:
    return Spec(
        1, "x", array.shape, *next(each for each in _NUMBERS.values() if each[1] == array.dtype)
    )


@given(ARRAYS)
def test_a_tensor_of_the_package_is_decoded_bit_by_bit(array: Any) -> None:
    sent = tensor_utils.pack_tensor(array).SerializeToString()
    read = spec_of(array).decode(ours.Tensor.FromString(sent))
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert read.tobytes() == array.tobytes()


@given(ARRAYS)
def test_the_package_decodes_what_is_encoded_bit_by_bit(array: Any) -> None:
    tensor = ours.Tensor()
    spec_of(array).encode(tensor, array)
    read = np.asarray(
        tensor_utils.unpack_tensor(theirs.Tensor.FromString(tensor.SerializeToString()))
    )
    assert read.dtype == array.dtype
    assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_floats_that_are_not_packed_are_read_too(dtype: str) -> None:
    array = np.array([1.5, -0.0, np.inf], dtype)
    # Field 1 of FloatArray or DoubleArray with wire type 5 or 1, for each number.
    tag = b"\x0d" if dtype == "f4" else b"\x09"
    numbers = b"".join(tag + number.tobytes() for number in array)
    field = b"\x0a" if dtype == "f4" else b"\x12"
    sent = field + bytes([len(numbers)]) + numbers + b"\x7a\x01\x03"  # shape [3]
    their_reading = tensor_utils.unpack_tensor(theirs.Tensor.FromString(sent))
    np.testing.assert_array_equal(their_reading, array)
    read = spec_of(array).decode(ours.Tensor.FromString(sent))
    assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(2, 3), (-1, 3), (2, -1)])
@pytest.mark.parametrize("elements", [1, 6])
def test_one_element_fills_a_shape_and_one_dimension_may_be_open(
    shape: tuple[int, int], elements: int
) -> None:
    tensor = theirs.Tensor(shape=shape)
    tensor.floats.array.extend(range(5, 5 + elements))
    spec = spec_of(np.zeros((2, 3), "f4"))
    read = spec.decode(ours.Tensor.FromString(tensor.SerializeToString()))
    expected = np.arange(5, 11).reshape(2, 3) if elements == 6 else np.full((2, 3), 5)
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    ("shape", "elements", "words"),
    [
        ((2, 3), 5, "has 5 elements: there must be 6, or one"),
        ((2, 3), 0, "has 0 elements"),
        ((-1, -1), 6, r"arrived with shape \[-1, -1\]"),
        ((3, 2), 6, r"arrived with shape \[3, 2\], and its"),
        ((6,), 6, r"arrived with shape \[6\]"),
        ((), 1, r"arrived with shape \[\]"),
        ((1 << 30, 1 << 30), 1, "arrived with shape"),
    ],
)
def test_a_tensor_of_another_shape_is_refused(shape: Any, elements: int, words: str) -> None:
    tensor = ours.Tensor(shape=shape)
    tensor.floats.array = bytes(4 * elements)
    with pytest.raises(SimulatorError, match=f"'x' .*{words}"):
        spec_of(np.zeros((2, 3), "f4")).decode(tensor)


def test_bytes_that_are_no_whole_numbers_are_refused() -> None:
    tensor = ours.Tensor(shape=[2])
    tensor.floats.array = bytes(7)
    with pytest.raises(SimulatorError, match=r"has 1.75 elements"):
        spec_of(np.zeros(2, "f4")).decode(tensor)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (ours.TensorSpec(name="x", dtype=ours.STRING), "is of type STRING"),
        (ours.TensorSpec(name="x", dtype=0), "is of type INVALID_DATA_TYPE"),
        (ours.TensorSpec(name="x", dtype=ours.FLOAT, shape=[2, -1]), "which varies"),
        (ours.TensorSpec(name="x", dtype=ours.FLOAT, shape=[1 << 30] * 8), str(MAX_ELEMENTS)),
    ],
)
def test_a_spec_of_what_cannot_be_an_array_is_refused(message: Any, words: str) -> None:
    with pytest.raises(SimulatorError, match=f"'x' .*{words}"):
        Spec.read(1, message)


def test_bounds_that_contradict_their_spec_are_refused() -> None:
    spec = ours.TensorSpec(name="x", dtype=ours.INT32, shape=[2])
    spec.min.int32s.array.extend([0, 3])
    spec.max.int32s.array.extend([2])
    with pytest.raises(SimulatorError, match="min above its max"):
        Spec.read(1, spec)
    spec.max.int64s.array.extend([9])
    with pytest.raises(SimulatorError, match="is of int32s, and its max of int64s"):
        Spec.read(1, spec)
    spec.max.int32s.array.extend([9, 9, 9])
    with pytest.raises(SimulatorError, match="has 3 elements"):
        Spec.read(1, spec)


@pytest.mark.parametrize(
    "value", [3, -0.5, True, "maze", [1, 2], [[0.5], [1.5]], ["a", "b"], [True, False], []]
)
def test_a_setting_arrives_as_the_package_packs_it(value: Any) -> None:
    sent = setting(value)
    theirs_of_it = theirs.Tensor.FromString(sent.SerializeToString())
    np.testing.assert_array_equal(tensor_utils.unpack_tensor(theirs_of_it), value)
    if value != []:
        assert theirs_of_it == tensor_utils.pack_tensor(value)
