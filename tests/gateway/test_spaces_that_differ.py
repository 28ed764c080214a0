"""Errors about two simulators' spaces name the first difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.gateway.session_manager import difference

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
