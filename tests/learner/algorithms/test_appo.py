"""APPO against its equations, its target network, and uses of batches."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import TWO, VECTOR, MakeBatch
from support.slow_losses import Linear, appo_loss, gradient, weights_of
from support.small_cores import copied
from torch import Tensor

from juggler.learner.algorithms.appo import AppoConfig
from juggler.learner.algorithms.appo.core import Appo
from juggler.learner.core.gradient_core import TrainState
from juggler.learner.core.learner_core import ALONE, Columns, Seam, StepOutput
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.modules.module_specs import build_module


def make_core(module: Any = Linear, model: dict[str, Any] | None = None, **config: Any) -> Appo:
    make = partial(build_module, module, VECTOR, TWO, model or {})
    return Appo(make, AppoConfig(**config))


def named(core: Appo, vector: Tensor) -> dict[str, Tensor]:
    return core.flat.named(vector)


@pytest.mark.parametrize("reset_rows", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lambda_": 0.8, "rho_bar": 2.0, "rho_bar_pg": 1.5, "behaviour_clip": 1.1, "clip": 0.1},
        {"target_kl": 0.01, "kl_coefficient": 0.7, "reward_scale": 0.3},
    ],
)
def test_gradients_are_those_of_the_loss_written_out_step_by_step(
    make_batch: MakeBatch, reset_rows: bool, settings: dict[str, Any]
) -> None:
    """Where the parameters have moved on from the target network's."""
    core = make_core(entropy_coefficient=0.1, gamma=0.9, lr=0.1, target_period=10, **settings)
    state = core.init(seed=3)
    target = weights_of(named(core, state["parameters"]))
    for seed in range(3):
        state = core.step(state, collate([make_batch(4, 9, seed=seed)])).state
    batch = make_batch(5, 9, seed=5, reset_rows=reset_rows)
    assert len(batch.final_rows) > 1
    grads, aux = core.grads(state, collate([batch]))

    new = weights_of(named(core, state["parameters"]))
    assert np.abs(new["policy.weight"] - target["policy.weight"]).max() > 0.05
    beta = core.config.kl_coefficient if core.config.target_kl is not None else 0.0
    expected = gradient(lambda w: appo_loss(w, target, batch, core.config, beta), new)
    found = named(core, grads)
    assert aux.live_steps == batch.live_steps
    assert 0.0 < aux.metrics["clip_fraction"] < 1.0
    for name, slopes in expected.items():
        np.testing.assert_allclose(found[name], slopes, rtol=1e-4, atol=1e-5)


def test_the_target_network_is_renewed_every_so_many_steps(make_batch: MakeBatch) -> None:
    core = make_core(target_period=3, lr=0.1)
    state = core.init(seed=0)
    history = [state["parameters"].clone()]
    for seed in range(7):
        state = core.step(state, collate([make_batch(seed=seed)])).state
        history.append(state["parameters"].clone())
        target = state["extra"]["target"]
        assert torch.equal(target, history[(seed + 1) // 3 * 3])
    assert not torch.equal(history[0], history[3])


def test_the_weight_of_the_distance_follows_the_distance(make_batch: MakeBatch) -> None:
    def coefficients(lr: float, target_kl: float) -> list[float]:
        core = make_core(target_period=2, lr=lr, target_kl=target_kl, kl_coefficient=1.0)
        state = core.init(seed=0)
        found = []
        for seed in range(4):
            state = core.step(state, collate([make_batch(seed=seed)])).state
            found.append(float(state["extra"]["kl_coefficient"]))
        return found

    # It is adapted where the target network is renewed: after the second and the fourth step.
    assert coefficients(lr=0.3, target_kl=1e-6) == [1.0, 2.0, 2.0, 4.0]
    assert coefficients(lr=1e-4, target_kl=1.0) == [1.0, 0.5, 0.5, 0.25]


class Noting(Appo):
    """Notes which samples its steps are made on."""

    def step(
        self, state: TrainState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[TrainState]:
        self.noted = [*getattr(self, "noted", []), float(sample["rewards"][0, 0])]
        return super().step(state, sample, seam)


def test_a_learner_uses_each_batch_so_many_times(make_batch: MakeBatch) -> None:
    make = partial(build_module, Linear, VECTOR, TWO, {})
    core = Noting(make, AppoConfig(buffer_batches=4, batch_uses=2, lr=0.01))
    learner = Learner(core)
    batches = [make_batch(seed=seed, ends=0.0) for seed in range(12)]
    for number, batch in enumerate(batches):
        batch.rewards[0, 0] = number
        metrics = learner.update_from_episodes([batch])
        assert metrics["skipped"] == 0.0
    uses = Counter(core.noted)
    assert [uses[number] for number in range(12)] == [2] * 10 + [1] * 2
    assert core.noted[-4:] == [8, 10, 9, 11]
    assert learner.updates == 12
    assert learner.state["moments"]["updates"] == len(core.noted) == 22
    learner.forget()
    learner.update_from_episodes([batches[0]])
    assert core.noted[22:] == [0], "what was kept is not used any more"


def test_schedules_follow_the_environments_steps_and_not_the_uses(make_batch: MakeBatch) -> None:
    core = make_core(lr=[[0, 1e-3], [100, 0.0]], batch_uses=2)
    sample = collate([make_batch(4, 10, ends=0.0)])
    state, seen = core.init(seed=0), []
    for _ in range(4):
        output = core.step(copied(state), sample)
        state = output.state
        seen.append(float(output.metrics["lr"]))
    assert seen == pytest.approx([1e-3, 0.8e-3, 0.6e-3, 0.4e-3])
