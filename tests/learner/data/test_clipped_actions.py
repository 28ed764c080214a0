"""The share of actions outside of their bounds, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.learner.data.clipped_actions import ClippedActions


def batch(actions: Any, live: Any = ((True, True),)) -> Any:
    """N = 1, T = 2."""
    return SimpleNamespace(actions=actions, live=np.array(live))


def test_the_share_is_of_live_numbers_with_a_bound() -> None:
    clipped = ClippedActions("default", spaces.Box(5, 9, (2,), np.float32))
    actions = np.array([[[4, 7], [1, 1]]], np.float32)  # [1, 2, 2]
    assert clipped.share([batch(actions)]) == 0.75
    assert clipped.share([batch(actions, [[True, False]])]) == 0.5
    assert clipped.share([batch(actions), batch(actions + 4)]) == 0.5
    assert clipped.share([]) is None
    rounded = np.full((1, 2, 2), np.nextafter(np.float32(9), np.float32(10)))
    assert clipped.share([batch(rounded)]) == 0
    box = spaces.Box(0, np.inf, (), np.float32)
    within = ClippedActions("default", spaces.Dict({"push": box, "turn": spaces.Discrete(2)}))
    assert within.share([batch({"push": np.array([[-1, 1e9]]), "turn": np.ones((1, 2))})]) == 0.5


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (1,), np.float32)]
)
def test_without_bounds_nothing_is_clipped(space: spaces.Space[Any]) -> None:
    assert ClippedActions("default", space).share([batch(np.zeros((1, 2, 1)))]) is None


def test_one_warning_says_that_nearly_all_is_clipped_and_what_to_do() -> None:
    clipped = ClippedActions("walker", spaces.Box(5, 9, (2,), np.float32))
    assert clipped.note(0.8) == ""
    note = clipped.note(0.97)
    assert "97% of the numbers in actions of module 'walker'" in note
    assert "rescale_actions" in note
    assert clipped.note(0.97) == "", "once is enough"
    suiting = ClippedActions("walker", spaces.Box(-1, 1, (2,), np.float32))
    assert suiting.note(1.0) == "", "it was learned to choose the bounds"
