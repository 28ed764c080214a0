"""Code that somebody wrote acts in NumPy where its author says that it may, and else in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.array_modules import ROWS, InTorch, built, only_numpy, seen, sure
from torch import Tensor, nn

from juggler.runtime.modules.arrays.array_module import ArrayModule
from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.rl_module import RLModule

NUMBERS = spaces.Box(-2, 2, (6,), np.float32)
THREE = spaces.Discrete(3)
NOISE = np.linspace(-1, 1, 3 * ROWS, dtype=np.float32).reshape(ROWS, 3)


class Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.SiLU())

    def forward(self, features: Tensor) -> Tensor:
        return features + self.layers(features)


class Told(Residual):
    may_act_in_numpy = True


class Silent(RLModule):
    """Made of known parts, whose author says nothing."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.body, self.head = Residual(6), nn.Linear(6, 3)

    def _forward(self, batch: Any) -> Any:
        return {"action_dist_inputs": self.head(self.body(batch["observations"]))}


class Talking(Silent):
    """Its word is for its parts, too."""

    may_act_in_numpy = True


class WithTold(Catalog):
    part: type[Residual] = Told

    def build_policy_head(self, features: int, distribution: Any) -> nn.Module:
        return nn.Sequential(self.part(features), super().build_policy_head(features, distribution))


class WithSilent(WithTold):
    part = Residual


@pytest.mark.parametrize("kind", [Talking, WithTold])
def test_who_says_so_acts_in_numpy(kind: Any) -> None:
    module, twin = built(kind, NUMBERS, THREE)
    arrays = ArrayModule(module)
    sure(arrays, seen(NUMBERS, 0), NOISE)
    only_numpy(arrays)
    for use in ("explore", "infer"):
        noise = (NOISE,) if use == "explore" else ()
        got = getattr(arrays, use)(seen(NUMBERS, 1), {}, *noise)
        expected = InTorch(twin).step(
            "exploration" if noise else "inference", seen(NUMBERS, 1), None, NOISE
        )
        np.testing.assert_allclose(got.inputs, expected[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got.actions, expected[0])


@pytest.mark.parametrize("kind", [Silent, WithSilent])
def test_who_does_not_say_so_acts_in_torch_without_a_word(kind: Any) -> None:
    module, twin = built(kind, NUMBERS, THREE)
    arrays = ArrayModule(module)
    acts, rounds = module.forward_exploration, []
    module.__dict__["forward_exploration"] = lambda batch: rounds.append(1) or acts(batch)
    for step in range(5):
        got = arrays.explore(seen(NUMBERS, step), {}, NOISE)
        expected = InTorch(twin).step("exploration", seen(NUMBERS, step), None, NOISE)
        np.testing.assert_array_equal(got.inputs, expected[1])
    assert len(rounds) == 5
    assert not arrays.note
