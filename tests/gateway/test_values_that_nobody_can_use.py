"""Unusable values end their own session only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.gateway_world import GatewayWorld

from juggler.client import GatewayError
from juggler.gateway.session_errors import Code, SessionError
from juggler.gateway.sessions import AgentInterface, SpaceLayout
from juggler.gateway.step_batches import check_rewards
from juggler.runtime.episodes.batch import MOST_REWARD
from juggler.runtime.wire.structures import zeros
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
