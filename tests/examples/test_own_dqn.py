"""The loss of the example that is derived from DQN, against one written out in NumPy."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import juggler
from juggler.testing import check_core, sample_for

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_dqn.py"))
VECTOR, THREE = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)
MAKE = partial(juggler.QNetwork, VECTOR, THREE, {"hidden_sizes": [8]})


def make_core(**keys: Any) -> juggler.Dqn:
    core: juggler.Dqn = EXAMPLE["MunchausenCore"](MAKE, EXAMPLE["MunchausenConfig"](**keys))
    return core


def test_its_loss_rewards_likely_actions_and_follows_with_soft_values() -> None:
    core, tau = make_core(temperature=0.5, gamma=0.9), 0.5
    generator, count = torch.Generator().manual_seed(0), 6
    columns = {
        "observations": torch.randn((count, 1, 4), generator=generator),
        "last_observations": torch.randn((count, 4), generator=generator),
        "actions": torch.tensor([[0], [1], [2], [0], [1], [2]]),
        "rewards": torch.randn((count, 1), generator=generator),
        "discounts": torch.tensor([[0.9], [0.9], [0.0], [0.9], [0.9], [0.9]]),
        "live": torch.ones((count, 1), dtype=torch.bool),
        "importance_weights": torch.linspace(0.2, 1.0, count),
    }
    state = core.init(0)
    parameters = state["parameters"]
    state["parameters"] = parameters + torch.randn(parameters.shape, generator=generator)
    target = parameters + torch.randn(parameters.shape, generator=generator)
    state["extra"]["target"] = target
    own = core.forward(state)

    def values(forward: juggler.Forward, seen: torch.Tensor) -> Any:
        found = forward({"observations": seen})["action_dist_inputs"]
        return found.detach().double().numpy()  # [N, n]

    seen, following = columns["observations"][:, 0], columns["last_observations"]
    now, before = values(own, seen), values(own.using(target), seen)
    after = values(own.using(target), following)
    costs, errors = [], []
    for n in range(count):
        action = int(columns["actions"][n, 0])
        likely = np.exp(before[n] / tau) / np.exp(before[n] / tau).sum()
        policy = np.exp(after[n] / tau) / np.exp(after[n] / tau).sum()
        goal = 0.1 * float(columns["rewards"][n, 0])  # reward_scale
        goal += 0.9 * max(tau * np.log(likely[action]), -1.0)
        goal += (
            float(columns["discounts"][n, 0]) * (policy * (after[n] - tau * np.log(policy))).sum()
        )
        error = abs(goal - now[n, action])
        errors.append(error)
        cost = error**2 / 2 if error < 1 else error - 0.5
        costs.append(float(columns["importance_weights"][n]) * cost)
    _, aux = core.grads(state, columns)
    found = aux
    assert float(found.metrics["value_loss"]) == pytest.approx(np.mean(costs), rel=1e-4)
    np.testing.assert_allclose(found.priorities, errors, rtol=1e-3, atol=1e-5)
    assert "epsilon" in found.metrics


def test_it_conforms() -> None:
    check_core(make_core, sample_for(MAKE()))


def test_it_has_no_bonus_of_several_steps() -> None:
    with pytest.raises(ValueError, match="n_step = 3"):
        make_core(n_step=3)
