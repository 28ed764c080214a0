"""What a gateway takes and refuses of spaces, values, and large messages."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import any_pb2
from gymnasium import spaces
from support.gateway_world import GatewayWorld, RawSimulator, steps_of

from juggler.client import GatewayError
from juggler.driver.workers.worker_events import read
from juggler.gateway import sessions
from juggler.gateway.session_errors import Code, SessionError
from juggler.gateway.session_manager import PROTOCOL_MAX, PROTOCOL_MIN, difference
from juggler.gateway.sessions import MOST_UNREPORTED, AgentInterface, SpaceLayout
from juggler.gateway.step_batches import check_rewards
from juggler.runtime.episodes.batch import MOST_REWARD
from juggler.runtime.wire.structures import zeros
from juggler.runtime.wire.v1 import simulator_pb2, spaces_pb2, tensors_pb2, training_pb2
from juggler.runtime.wire.v1 import simulator_pb2 as pb

CHOICE = spaces.Discrete(2)
DOUBLE = spaces.Box(-np.inf, np.inf, (3,), np.float64)
MASKED = spaces.Dict({"observation": DOUBLE, "action_mask": spaces.MultiBinary(2)})


def refused(space: Any, observations: Any, **options: Any) -> tuple[int, int, str] | None:
    found = AgentInterface(space, CHOICE).first_bad(observations, **options)
    return found and (found[0], found[1].code, str(found[1]))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1e300, "is beyond float32, in which policies compute: scale it"),
        (-1e39, "is beyond float32"),
        (np.nan, "is NaN or infinite"),
        (-np.inf, "is NaN or infinite"),
    ],
)
def test_a_number_that_is_none_in_float32_is_refused(value: float, said: str) -> None:
    shown = np.zeros((4, 3))
    shown[2, 1] = value
    found = refused(DOUBLE, shown)
    assert found is not None
    assert found[:2] == (2, Code.NOT_FINITE)
    assert said in found[2]


def test_the_greatest_numbers_of_float32_are_taken_in_any_width() -> None:
    for dtype in (np.float32, np.float64):
        greatest = np.full((1, 3), np.finfo(np.float32).max, dtype)
        assert refused(spaces.Box(-np.inf, np.inf, (3,), dtype), -greatest) is None
    halves = np.full((1, 3), np.finfo(np.float16).max, np.float16)
    assert refused(spaces.Box(-np.inf, np.inf, (3,), np.float16), halves) is None


@pytest.mark.parametrize("value", [2, -1])
def test_other_bits_than_0_and_1_are_refused_as_learners_do(value: int) -> None:
    space = spaces.Dict({"bits": spaces.MultiBinary((2, 2)), "rest": DOUBLE})
    shown: Any = zeros(space, (3,))
    shown["bits"][0] = 1
    assert refused(space, shown) is None
    shown["bits"][1, 0, 1] = value
    found = refused(space, shown)
    assert found is not None
    assert found[:2] == (1, Code.WRONG_SHAPE)
    assert "the observation at 'bits' holds" in found[2]


@pytest.mark.parametrize("masks", [True, False])
def test_a_mask_has_zeros_and_ones_also_where_nobody_acts(masks: bool) -> None:
    shown: Any = zeros(MASKED, (2,))
    shown["action_mask"][:] = 1
    shown["action_mask"][1] = 0, 2
    found = refused(MASKED, shown, masks=masks)
    assert found is not None
    assert found[:2] == (1, Code.NO_LEGAL_ACTION)
    shown["action_mask"][1] = 0
    assert (refused(MASKED, shown, masks=masks) is None) == (not masks)


def test_an_array_without_bytes_cannot_be_sent_twice() -> None:
    empty = spaces.Box(-1, 1, (0,), np.float32)
    layout = SpaceLayout(spaces.Dict({"a": empty, "b": spaces.Discrete(2)}))
    tensor = pb.NamedTensor(path=["a"], dtype=layout.leaves[0].number, shape=[1, 0])
    with pytest.raises(SessionError, match="'a'"):
        layout.raw([tensor, tensor], 1, "observations")
    bits = pb.NamedTensor(path=["b"], dtype=layout.leaves[1].number, shape=[1], data=bytes(8))
    assert layout.raw([bits, tensor], 1, "observations") == [b"", bytes(8)]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (3e38, "the reward of environment 1 is 3e+38: scale rewards to at most 1e+12"),
        (-1.1e12, "the reward of environment 1 is -1.1e+12: scale rewards"),
        (np.nan, "the reward of environment 1 is nan: rewards must be finite numbers"),
        (-np.inf, "the reward of environment 1 is -inf: rewards must be finite numbers"),
    ],
)
def test_a_reward_whose_returns_would_be_no_float32_ends_its_session_alone(
    reward: float, said: str
) -> None:
    shown = np.zeros((2, 3))
    with GatewayWorld(rows=2, steps=4) as world, world.connect() as other:
        world.ask()
        session = world.connect(environments=2)
        session.step(shown, [0.0, 0.0])
        with pytest.raises(GatewayError, match="NOT_FINITE") as refused_with:
            session.step(shown, [0.0, reward])
        assert said in str(refused_with.value)
        assert other.step(np.zeros(3)) in (0, 1)


def test_rewards_that_are_large_together_are_none_that_is_too_large() -> None:
    check_rewards([MOST_REWARD, -MOST_REWARD] * 10, str)
    with pytest.raises(SessionError, match="step 20"):
        check_rewards([MOST_REWARD] * 20 + [2 * MOST_REWARD], "step {}".format)


# Errors about two simulators' spaces name the first difference.


IMAGE = spaces.Box(0, 255, (8, 8), np.uint8)
LOW = np.zeros(2000, np.float32)
COUNTS = spaces.MultiDiscrete([2, 3])


def joints(low: Any = LOW, counts: Any = COUNTS) -> spaces.Tuple:
    return spaces.Tuple((spaces.Box(low, LOW + 1, dtype=np.float32), counts))


def seen(**changes: Any) -> spaces.Dict:
    """A space whose text is long before it comes to what changes."""
    cameras = {f"camera of the left arm, number {at}": IMAGE for at in range(6)}
    return spaces.Dict({**cameras, "joints": joints(), **changes})


SHIFTED = np.where(np.arange(2000) == 1700, LOW - 0.5, LOW).astype(np.float32)
MIXED = np.where(np.arange(2000) == 1600, LOW - 0.25, LOW).astype(np.float32)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            seen(joints=IMAGE),
            seen(joints=COUNTS),
            "its space at 'joints' is Box(0, 255, (8, 8), uint8); the first at 'joints' is "
            "MultiDiscrete([2 3])",
        ),
        (
            seen(joints=joints(counts=spaces.MultiDiscrete([2, 3], dtype=np.int32))),
            seen(),
            "its space at 'joints' at '1' is MultiDiscrete([2 3]) of int32; the first at 'joints' "
            "at '1' is MultiDiscrete([2 3]) of int64",
        ),
        (
            seen(joints=joints(SHIFTED)),
            seen(joints=joints(MIXED)),
            "with bounds of 0.0 and 1.0 at [1600]; the first at 'joints' at '0' is "
            "Box([0. 0. 0. ... 0. 0. 0.], 1.0, (2000,), float32) with -0.25 and 1.0 there",
        ),
        (
            spaces.Dict([("a", IMAGE), ("b", IMAGE)]),
            spaces.Dict([("b", IMAGE), ("a", IMAGE)]),
            "its space has the parts 'a', 'b'; the first has 'b', 'a'",
        ),
    ],
)
def test_the_part_that_differs_is_named(one: Any, other: Any, said: str) -> None:
    text = difference(one, other, "its space", "the first")
    assert said in text
    assert "camera" not in text


# Episodes without sample requests count, and their number is bounded.


MANY = 8192  # environments


def taken(ended: Collection[tuple[float, int]]) -> training_pb2.Receipt:
    """Totals that a driver reads in receipts without steps."""
    receipt = training_pb2.Receipt()
    receipt.episode_returns.extend(each[0] for each in ended)
    receipt.episode_lengths.extend(each[1] for each in ended)
    body = any_pb2.Any()
    body.Pack(receipt)
    return read(body, training_pb2.Receipt())


def test_of_more_episodes_than_a_driver_takes_the_newest_are_told() -> None:
    shown, over = np.zeros((MANY, 3)), np.ones(MANY, np.bool_)
    with (
        GatewayWorld(rows=1, steps=1) as world,
        world.connect(environments=MANY, real_time=True) as session,
    ):
        for step in range(2 + MOST_UNREPORTED // MANY):
            session.step(shown, np.full(MANY, step), over if step else ~over, False, shown)
        assert world.count("episodes") == MOST_UNREPORTED + MANY
        world.ask()
        for _ in range(2):
            session.step(shown, np.zeros(MANY))
        world.wait_for(1)
        _, ended = world.batches[0]
    receipt = taken(ended)
    assert len(receipt.episode_returns) == MOST_UNREPORTED
    assert min(receipt.episode_returns) == 2  # those of return 1 ended first


def test_episodes_of_several_agents_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_UNREPORTED", 3)
    ended = [(float(k), 1) for k in range(5)]
    for _ in range(2):
        sessions.forget_oldest(ended)
        assert ended == [(2.0, 1), (3.0, 1), (4.0, 1)]


def test_returns_fit_the_receipt_whatever_finite_rewards_a_simulator_gives() -> None:
    with GatewayWorld(rows=1, steps=4) as world, world.connect() as session:
        world.ask(100)
        for _ in range(4):
            session.step(np.zeros(3), MOST_REWARD)
        session.step(np.zeros(3), MOST_REWARD, True)
        session.step(np.zeros(3))
        world.wait_for(1)
    assert taken(world.batches[0][1]).episode_returns[0] == pytest.approx(4 * MOST_REWARD, rel=1e-6)


# A gateway's work on messages of many environments.


ROWS = 1024


def seconds_to_end(world: GatewayWorld, rows: int, kind: str) -> float:
    """CPU time of a message that ends this many episodes."""
    shown, all_of_them = np.zeros((rows, 3), np.float32), [True] * rows
    given: dict[str, Any] = {
        "truncated": {
            "truncated": all_of_them,
            "final_rows": range(rows),
            "final_observations": steps_of(1, shown).agents[0].observations,
        },
        "both": {"truncated": all_of_them, "terminated": all_of_them},
        "paused": {"terminated": all_of_them, "paused": all_of_them},
    }[kind]
    with RawSimulator(world.address) as simulator:
        simulator.greet(environments=rows)
        assert simulator.step(steps_of(1, shown)).actions.seq == 1
        message = steps_of(2, shown, rewards=[0.0] * rows, **given)
        began = time.process_time()
        assert simulator.step(message).actions.seq == 2
        return time.process_time() - began


@pytest.mark.slow  # it looks at the clock of the process
@pytest.mark.parametrize("kind", ["truncated", "both", "paused"])
def test_sixteen_times_the_environments_that_end_together_are_no_work_of_their_square(
    kind: str,
) -> None:
    with GatewayWorld(rows=1 << 16, steps=4, max_batch=1 << 16) as world:
        world.ask()
        seconds_to_end(world, ROWS, kind)  # the first time of all
        some = min(seconds_to_end(world, ROWS, kind) for _ in range(3))
        more = min(seconds_to_end(world, 16 * ROWS, kind) for _ in range(3))
    assert more < 64 * some, "quadratic work takes 256 times as long"


# Version 1 of the simulators' protocol keeps what docs/external-simulators.md promises.


PROMISED = Path(__file__).with_name("simulator_protocol_1.txt")


def numbered() -> set[str]:
    """Fields and enumeration words, with their numbers and types."""
    found = set()
    for file in (simulator_pb2, spaces_pb2, tensors_pb2):
        waiting = [*file.DESCRIPTOR.message_types_by_name.values()]
        words = [*file.DESCRIPTOR.enum_types_by_name.values()]
        while waiting:
            message = waiting.pop()
            waiting += message.nested_types
            words += message.enum_types
            for field in message.fields:
                many = "repeated " if field.is_repeated else ""
                found.add(f"{message.full_name}.{field.name} = {field.number}, {many}{field.type}")
        for enum in words:
            found |= {f"{enum.full_name}.{each.name} = {each.number}" for each in enum.values}
    return found


def test_nothing_of_version_1_is_removed_or_changed() -> None:
    """A new field is added to the file, too."""
    assert PROTOCOL_MIN == PROTOCOL_MAX == 1
    assert numbered() == {*PROMISED.read_text().splitlines()}
