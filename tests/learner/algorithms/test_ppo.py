"""PPO against its equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.ppo_cases import make_core, near, parameters
from support.slow_linear import gradient, ppo_loss, weights_of
from support.states import copied
from torch import Tensor

from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.learner.algorithms.ppo.core import ADVANTAGES, Ppo
from juggler.learner.core.gradient_core import GradientCore, TrainState
from juggler.learner.core.learner_core import ALONE, Columns
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.rl_module import Batch, RLModule

MakeBatch = Callable[..., EpisodeBatch]


@pytest.mark.parametrize("reset_rows", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"value_clip": 0.1, "normalize_advantages": False},
        {"lambda_": 0.7, "clip": 0.1, "reward_scale": 0.3},
    ],
)
def test_gradients_are_those_of_the_loss_written_out_step_by_step(
    make_batch: MakeBatch, reset_rows: bool, settings: dict[str, Any]
) -> None:
    """After a first step of the optimizer, so that values have moved from the old ones."""
    core = make_core(entropy_coefficient=0.1, gamma=0.9, lr=0.1, **settings)
    before = core.init(seed=3)
    batch = near(before, make_batch(5, 9, seed=5, reset_rows=reset_rows), core)
    assert len(batch.final_rows) > 1
    assert batch.terminated.any()
    prepared, live_steps = core._prepared(before, collate([batch]), ALONE)
    assert live_steps == batch.live_steps
    whole = prepared.columns
    state = core.apply(copied(before), *GradientCore.grads(core, before, whole)).state

    old, new = weights_of(parameters(core, before)), weights_of(parameters(core, state))
    metrics = GradientCore.grads(core, state, whole)[1].metrics
    assert 0.1 < metrics["clip_fraction"] < 0.9
    for weights, at in ((old, before), (new, state)):
        found = core.flat.named(GradientCore.grads(core, at, whole)[0])
        expected = gradient(lambda w: ppo_loss(w, old, batch, core.config), weights)
        assert found.keys() == expected.keys()
        for name, slopes in expected.items():
            np.testing.assert_allclose(found[name], slopes, rtol=1e-4, atol=1e-5)


def test_what_grads_gives_is_the_gradient_of_the_first_step(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=3)
    batch = near(state, make_batch(5, 9, seed=5), core)
    weights = weights_of(parameters(core, state))
    found = core.flat.named(core.grads(state, collate([batch]))[0])
    expected = gradient(lambda w: ppo_loss(w, weights, batch, core.config), weights)
    for name, slopes in expected.items():
        np.testing.assert_allclose(found[name], slopes, rtol=1e-4, atol=1e-5)


def advantages_in(core: Ppo, state: TrainState, batches: list[EpisodeBatch]) -> Tensor:
    """Normalized, of live steps [M]."""
    prepared, _ = core._prepared(state, collate(batches), ALONE)
    columns = prepared.columns
    live: Tensor = columns["live"]
    found: Tensor = columns[ADVANTAGES][live]
    return found


def test_advantages_have_mean_0_and_variance_1_over_live_steps_alone(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    batch = make_batch(4, 9, seed=1)
    before = advantages_in(core, state, [batch])
    assert before.mean() == pytest.approx(0, abs=1e-6)
    assert before.std(correction=0) == pytest.approx(1, abs=1e-5)
    # Neither what reset rows hold matters, nor how far short rows are filled up.
    dead = ~batch.live
    assert dead.any()
    batch.rewards[dead] = 99.0
    batch.observations[dead] += 5.0
    torch.testing.assert_close(advantages_in(core, state, [batch]), before)
    short = make_batch(3, 4, seed=2)
    together = advantages_in(core, state, [batch, short])
    assert together.mean() == pytest.approx(0, abs=1e-6)
    assert together.std(correction=0) == pytest.approx(1, abs=1e-5)
    raw = make_core(normalize_advantages=False)
    unscaled = torch.cat([advantages_in(raw, state, [each]) for each in (batch, short)])
    by_hand = (unscaled - unscaled.mean()) / unscaled.std(correction=0)
    torch.testing.assert_close(together, by_hand, rtol=1e-4, atol=1e-5)


class Counting(RLModule):
    """Notes how many observations each pass without gradients has."""

    passes: list[int] = []  # noqa: RUF012

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.head = torch.nn.Linear(4, 3)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        if not torch.is_grad_enabled():
            self.passes.append(len(batch["observations"]))
        outputs = self.head(batch["observations"])
        return {"action_dist_inputs": outputs[:, :2], "values": outputs[:, 2]}


def test_values_come_from_passes_of_bounded_size(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(Counting)
    state = core.init(seed=0)
    batch = make_batch(8, 16, seed=1)
    sample: dict[str, Columns] = collate([batch])
    whole = core.step(copied(state), sample).state
    Counting.passes.clear()
    monkeypatch.setattr("juggler.learner.core.forward.CHUNK", 50)
    parts = core.step(copied(state), sample).state
    assert max(Counting.passes) == 50
    assert sum(Counting.passes) == 8 * 16 + 8 + len(batch.final_rows), "each observation once"
    torch.testing.assert_close(parts["parameters"], whole["parameters"], rtol=1e-5, atol=1e-6)


def test_a_pass_in_chunks_is_the_pass_as_a_whole_with_states_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core(None, {"recurrent": "gru", "hidden_sizes": [8], "recurrent_size": 6})
    forward = core.forward(core.init(seed=0))
    batch = {"observations": torch.randn(7, 5, 4), "states": {"hidden": torch.randn(7, 6)}}
    monkeypatch.setattr("juggler.learner.core.forward.CHUNK", 11)
    parts, whole = forward.in_chunks()(batch), forward(batch)
    for name in ("action_dist_inputs", "values"):
        torch.testing.assert_close(parts[name], whole[name])
    torch.testing.assert_close(parts["states"]["hidden"], whole["states"]["hidden"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", 0),
        ("minibatches", 0),
        ("lambda_", 1.1),
        ("clip", 0.0),
        ("value_clip", -1.0),
        ("target_kl", 0.0),
        ("minibatches", 4096),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key} = {value}: must be"):
        PpoConfig(**{key: value}).validate()
