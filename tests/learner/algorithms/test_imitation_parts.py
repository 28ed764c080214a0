"""A discriminator's inputs, and the gradient penalty that smooths it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.random_episodes import VECTOR, random_episodes, write
from support.small_cores import slow_penalties

from juggler.learner.algorithms.imitation.discriminator import (
    DemonstratedSteps,
    Shown,
    gradient_penalties,
)
from juggler.runtime.datasets.dataset import DatasetError


def test_every_step_is_shown_as_numbers_and_box_actions_within_their_bounds() -> None:
    generator = np.random.default_rng(0)
    position = spaces.Box(-np.inf, np.inf, (2, 3), np.float32)
    observations = spaces.Dict(
        {
            "action_mask": spaces.MultiBinary(2),
            "position": position,
            "room": spaces.Discrete(3, start=5),
            "switches": spaces.MultiBinary(4),
        }
    )
    acted = spaces.Box(np.array([-1, 0]), np.array([1, 3]), dtype=np.float32)
    x = generator.normal(3, 2, (7, 2, 3)).astype(np.float32)
    actions = generator.normal(0, 4, (7, 2)).astype(np.float32)
    rooms, switches = generator.integers(5, 8, 7), generator.integers(0, 2, (7, 4))
    seen = {
        "action_mask": torch.ones(7, 2),
        "position": torch.from_numpy(x),
        "room": torch.from_numpy(rooms),
        "switches": torch.from_numpy(switches),
    }
    demonstrations = DemonstratedSteps(seen, torch.from_numpy(actions), torch.zeros(7).bool())
    shown = Shown(observations, acted, demonstrations)
    given = torch.tensor([[-50.0, 50.0], [0.5, 2.0]])
    first = {key: each[:2] for key, each in seen.items()}
    found = shown(first, given)
    assert [found[key].shape[1:] for key in "0123"] == [
        shown.space[key].shape for key in shown.space
    ]
    x, kept = x.astype(np.float64), np.clip(actions, acted.low, acted.high).astype(np.float64)
    expected = {
        "0": ((x - x.mean(0)) / (x.std(0) + 1e-4)).clip(-10, 10)[:2],
        "1": np.eye(3)[rooms[:2] - 5],
        "2": switches[:2],
        "3": (np.array([[-1, 3], [0.5, 2]]) - kept.mean(0)) / (kept.std(0) + 1e-4),
    }
    for key, values in expected.items():
        np.testing.assert_allclose(found[key].numpy(), values, rtol=1e-4, atol=1e-5)


def test_rewards_of_demonstrations_may_be_anything_and_what_is_imitated_must_be_finite(
    tmp_path: Path,
) -> None:
    pytest.importorskip("minari", reason="needs juggler[datasets]")
    acted = spaces.Box(-1, 1, (2,), np.float32)
    episodes = random_episodes([3, 4], VECTOR, acted)
    episodes[0].rewards[:] = np.nan
    episodes[0].observations[-1] = np.nan  # nothing was done there
    place = str(write(tmp_path / "shown", episodes, VECTOR, acted))
    assert len(DemonstratedSteps.read(place, VECTOR, acted).terminated) == 7
    for name in ("observations", "actions"):
        broken = random_episodes([3, 4], VECTOR, acted)
        getattr(broken[1], name)[2] = np.inf
        place = str(write(tmp_path / name, broken, VECTOR, acted))
        with pytest.raises(DatasetError, match=rf"episode 1 of .* not finite, in its {name}$"):
            DemonstratedSteps.read(place, VECTOR, acted)


def test_a_gradient_penalty_and_its_gradient_are_those_of_central_differences() -> None:
    generator = np.random.default_rng(0)
    weights = generator.normal(size=(7, 5))
    out = generator.normal(size=5)
    rows = {name: generator.normal(size=(2, 6, size)) for name, size in (("a", 4), ("b", 3))}
    shares = generator.uniform(size=6)
    some, others = (np.concatenate([rows["a"][i], rows["b"][i]], 1) for i in (0, 1))

    def slow(weights: np.ndarray) -> float:
        found = slow_penalties(lambda x: np.tanh(x @ weights) @ out, some, others, shares)
        return float(found.sum())

    trained = torch.from_numpy(weights).requires_grad_()

    def values(x: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(torch.cat([x["a"], x["b"]], 1) @ trained) @ torch.from_numpy(out)

    first, second = ({name: torch.from_numpy(x[i]) for name, x in rows.items()} for i in (0, 1))
    total = gradient_penalties(values, first, second, torch.from_numpy(shares)).sum()
    assert float(total.detach()) == pytest.approx(slow(weights), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, trained)
    for place in ((0, 0), (3, 2), (6, 4)):
        step = np.zeros_like(weights)
        step[place] = 1e-4
        slope = (slow(weights + step) - slow(weights - step)) / 2e-4
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-3)
