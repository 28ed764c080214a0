"""What the client takes along, and what it makes of spaces."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from gymnasium import spaces
from support.changes import SkippedTime
from support.gateway_world import GatewayWorld

from juggler.client import (
    GatewayError,
    box,
    connect,
    connection,
    dict_of,
    discrete,
    multi_binary,
    multi_discrete,
    tuple_of,
)
from juggler.client.space_values import Values, as_message, for_each
from juggler.runtime.wire.spaces import space_from_message, space_to_message

TWO = np.array([1.0, 2.0], np.float32)


@pytest.mark.parametrize(
    ("ours", "gymnasiums"),
    [
        (box([3]), spaces.Box(-np.inf, np.inf, (3,), np.float32)),
        (box([2], [-1, -2], [1, 2]), spaces.Box(-TWO, TWO, dtype=np.float32)),
        (box([4, 4], 0, 255, np.uint8), spaces.Box(0, 255, (4, 4), np.uint8)),
        (discrete(4, start=-1), spaces.Discrete(4, start=-1)),
        (multi_discrete([2, 3]), spaces.MultiDiscrete([2, 3])),
        (multi_binary(5), spaces.MultiBinary(5)),
        (
            dict_of({"b": discrete(2), "a": tuple_of([box([1]), multi_binary(2)])}),
            spaces.Dict(
                {
                    "a": spaces.Tuple(
                        [spaces.Box(-np.inf, np.inf, (1,), np.float32), spaces.MultiBinary(2)]
                    ),
                    "b": spaces.Discrete(2),
                }
            ),
        ),
    ],
)
def test_its_spaces_are_those_of_gymnasium(ours: object, gymnasiums: spaces.Space) -> None:
    assert space_from_message(as_message(ours)) == gymnasiums
    assert as_message(gymnasiums) == space_to_message(gymnasiums)


def test_values_survive_the_way_there_and_back() -> None:
    values = Values(dict_of({"a": tuple_of([box([2]), discrete(3)]), "m": multi_binary(2)}))
    given = {
        "a": (np.array([[1, 2], [3, 4]], np.float32), np.array([0, 2])),
        "m": np.array([[0, 1], [1, 1]], np.int8),
    }
    back = values.from_tensors(values.tensors(given))
    np.testing.assert_array_equal(back["a"][0], given["a"][0])
    np.testing.assert_array_equal(back["a"][1], given["a"][1])
    np.testing.assert_array_equal(back["m"], given["m"])


def test_last_observations_may_be_an_array_of_objects() -> None:
    """Gymnasium's vectors have None where no episode ended."""
    values = Values(dict_of({"a": box([2]), "t": tuple_of([discrete(3)])}))
    given = np.array([None, {"a": TWO, "t": (2,)}], object)
    found = values.arrays(given, rows=np.array([1]))
    np.testing.assert_array_equal(found["a",], TWO[None])
    np.testing.assert_array_equal(found["t", "0"], [2])


def test_values_that_do_not_fit_are_told_before_they_are_sent() -> None:
    with pytest.raises(ValueError, match=r"\[3\].*\[2\]"):
        Values(box([2])).tensors(np.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"float64.*int64"):
        Values(discrete(2)).tensors(np.array([0.5]))
    with pytest.raises(ValueError, match="b/x"):
        Values(dict_of({"a": discrete(2), "b": dict_of({"x": discrete(2)})})).tensors({"a": [0]})
    with pytest.raises(TypeError, match="space"):
        as_message([2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4,), "shape = 4: must be a list of lengths"),
        (([-2],), "shape = .-2.: must be a list of lengths"),
        (([2], 0, 1, complex), "dtype = complex128: must be bool, an integer or a float"),
        (([2], 0, np.inf, np.int32), "high = inf: a box of int32 needs finite bounds"),
    ],
)
def test_a_box_that_cannot_be_says_what_is_wrong_with_it(
    arguments: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        box(*arguments)


def test_what_is_no_address_or_number_of_environments_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="'here'"):
        connect("here", box([2]), discrete(2))
    with pytest.raises(ValueError, match="environments = 0"):
        connect("127.0.0.1:9", box([2]), discrete(2), environments=0)


class _TooLarge(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "SERVER: Received message larger than max (70000000 vs. 67108864)"


def test_a_message_that_is_too_large_is_refused_with_advice() -> None:
    refused = connection._as_failure(_TooLarge(), "127.0.0.1:9")
    assert refused.code == "RESOURCE_EXHAUSTED"
    assert "fewer environments or steps" in str(refused)


def test_what_is_said_of_environments_is_one_for_all_or_one_for_each() -> None:
    np.testing.assert_array_equal(for_each("reward", 0.5, 2, np.float32), [0.5, 0.5])
    np.testing.assert_array_equal(for_each("reward", [0.5, 1], 2, np.float32), [0.5, 1])
    with pytest.raises(ValueError, match="reward"):
        for_each("reward", [1, 2, 3], 2, np.float32)


@pytest.mark.parametrize("said", [{"terminated": "yes"}, {"truncated": "no"}, {"truncated": 2}])
def test_a_flag_is_true_or_false(said: dict[str, Any]) -> None:
    (name,) = said
    with GatewayWorld(rows=1, steps=4) as world:
        world.ask(10)
        with world.connect() as session:
            session.step(np.zeros(3))
            with pytest.raises(ValueError, match=f"{name}"):
                session.step(np.zeros(3), 1.0, final_observation=np.zeros(3), **said)
            assert session.step(np.zeros(3), 1.0, np.True_) is None
        with world.connect(environments=2) as session:
            session.step(np.zeros((2, 3)))
            many = {name: [said[name], False]}
            with pytest.raises(ValueError, match=f"{name}"):
                session.step(np.zeros((2, 3)), np.ones(2), **many)


def test_rows_that_do_not_fit_the_environments_are_refused_before_they_are_sent() -> None:
    with GatewayWorld(rows=2, steps=4) as world, world.connect(environments=2) as session:
        world.ask()
        with pytest.raises(ValueError, match="give 2 rows"):
            session.step(np.zeros((3, 3)))
        for environments in ([-1], [2], [0, 0]):
            with pytest.raises(ValueError, match="environments"):
                session.step(np.zeros((len(environments), 3)), environments=environments)
        with pytest.raises(ValueError, match="final_observation"):
            session.step(np.zeros((2, 3)), truncated=[True, False])
        for final in (np.zeros((1, 3)), np.zeros(1, object), 0.0):
            with pytest.raises(ValueError, match="values have"):
                session.step(np.zeros((2, 3)), truncated=[False, True], final_observation=final)
        assert session.step(np.zeros((1, 3)), environments=np.array([1])).shape == (1,)


@pytest.mark.parametrize(
    ("mode", "name", "arguments"),
    [
        ("logged", "step", (np.zeros(3),)),
        ("remote", "pull", ()),
        ("remote", "record", (np.zeros((2, 3)), [0], [1.0], [-1.0])),
    ],
)
def test_a_session_refuses_what_its_mode_does_not_have(
    mode: str, name: str, arguments: tuple[Any, ...]
) -> None:
    refused = pytest.raises(GatewayError, match="WRONG_MODE")
    with GatewayWorld() as world, refused, world.connect(mode=mode) as session:
        getattr(session, name)(*arguments)


def test_a_client_that_waits_for_a_gateway_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "time", SkippedTime())
    monkeypatch.setattr(connection, "_RETRY_SECONDS", 25.0)
    with pytest.raises(GatewayError, match="UNAVAILABLE"):
        connect("127.0.0.1:9", box([2]), discrete(2), timeout=60.0)
    assert "still trying, for another " in caplog.text
    assert " s: UNAVAILABLE: the gateway at 127.0.0.1:9" in caplog.text
