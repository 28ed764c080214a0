"""Environments that are simulators elsewhere, which do what they should not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2, tensor_utils
from support.network import free_address
from support.package_simulator import (
    BOARD,
    MOVE,
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
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed


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


def _with_state(state: int) -> Callable[[Any, int], Any]:
    def change(response: Any, step: int) -> Any:
        response.state = state if step else response.state
        return response

    return change


def _raise(response: Any, step: int) -> Any:
    raise FileNotFoundError("no map there")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_reward, "'reward' was requested, and is"),
        (_with_board(np.zeros((3, 4))), "'board' came as doubles, and its"),
        (_with_board(np.zeros((4, 3), np.float32)), r"shape \[4, 3\], and its spec says \[3, 4\]"),
        (_with_state(0), "has the state 0"),
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
    arena: Arena, capfd: pytest.CaptureFixture[str]
) -> None:
    address = free_address()
    served: list[Served] = []
    said: list[str] = []

    def come_late() -> None:
        deadline = time.monotonic() + 60
        while "yet" not in "".join(said) and time.monotonic() < deadline:
            said.append(capfd.readouterr().err)
            time.sleep(0.05)
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
