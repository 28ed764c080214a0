"""IMPALA's gradients against its equations, and what happens to a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.slow_impala import in_training, slow_gradients
from support.states import copied
from torch import Tensor

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import TrainState
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.rl_module import Batch, RLModule

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)


def make_core(
    module: Any = None,
    observation_space: spaces.Box = VECTOR,
    model: dict[str, Any] | None = None,
    **config: Any,
) -> Impala:
    make = partial(build_module, module, observation_space, TWO, model or {"hidden_sizes": [8]})
    return Impala(make, ImpalaConfig(**config))


@pytest.mark.parametrize("reset_rows", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"lambda_": 0.8, "rho_bar": 2.0, "rho_bar_pg": 1.5, "reward_scale": 0.3}]
)
def test_gradients_are_those_of_the_loss_written_out_step_by_step(
    make_batch: MakeBatch, reset_rows: bool, settings: dict[str, float]
) -> None:
    core = make_core(entropy_coefficient=0.1, gamma=0.9, **settings)
    state = core.init(seed=3)
    batch = make_batch(4, 9, seed=5, reset_rows=reset_rows)
    assert len(batch.final_rows) > 1
    assert batch.terminated.any()
    grads, aux = core.grads(state, collate([batch]))

    module = in_training(core, state, core._make_module)
    expected = slow_gradients(module, batch, core.config)
    found = core.flat.named(grads)
    assert aux.live_steps == batch.live_steps
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_rows_of_different_lengths_give_the_gradient_of_each_by_itself(
    make_batch: MakeBatch,
) -> None:
    core = make_core()
    state = core.init(seed=0)
    batches = [make_batch(3, 9, seed=1), make_batch(2, 5, seed=2)]
    together, aux = core.grads(state, collate(batches))
    mean = torch.zeros_like(together)
    for batch in batches:
        alone, _ = core.grads(state, collate([batch]))
        mean += alone * batch.live_steps / aux.live_steps
    torch.testing.assert_close(together, mean, rtol=1e-4, atol=1e-6)


def test_steps_that_are_not_live_do_not_change_the_gradient(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    batch = make_batch(4, 9, seed=1)
    dead = ~batch.live
    assert dead.any()
    before, _ = core.grads(state, collate([batch]))
    batch.action_logp[dead] = -77.0
    batch.actions[dead] = 1 - batch.actions[dead]
    batch.observations[dead] += 1.0
    batch.rewards[dead] = 9.0
    after, _ = core.grads(state, collate([batch]))
    torch.testing.assert_close(after, before)


def test_the_rounding_of_a_ratio_is_not_counted_as_clipped(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    batch = make_batch(4, 10, ends=0.0)
    module = in_training(core, state, core._make_module)
    seen = module.forward_train({"observations": torch.as_tensor(batch.observations).flatten(0, 1)})
    policy = torch.distributions.Categorical(logits=seen["action_dist_inputs"])
    logp = policy.log_prob(torch.as_tensor(batch.actions).flatten()).detach().numpy()
    for error, clipped in ((1e-5, 0.0), (1e-3, 0.5)):
        errors = np.where(np.arange(40) % 2, error, -error)  # every other ratio is above 1
        batch.action_logp[:] = (logp + errors).reshape(4, 10)
        output = core.step(copied(state), collate([batch]))
        assert fetch_metrics(output.metrics)["clip_fraction"] == clipped


def test_metrics_say_what_they_are_called(make_batch: MakeBatch) -> None:
    core = make_core(lr=[(0, 1e-3), (100, 0.0)])
    state = core.init(seed=0)
    batch = make_batch(4, 10, ends=0.0)
    sample = collate([batch])
    module = in_training(core, state, core._make_module)
    inputs = module.forward_train(
        {"observations": torch.as_tensor(batch.observations).flatten(0, 1)}
    )
    policy = torch.distributions.Categorical(logits=inputs["action_dist_inputs"])
    logp = policy.log_prob(torch.as_tensor(batch.actions).flatten()).detach()
    log_ratio = logp - torch.as_tensor(batch.action_logp).flatten()

    output = core.step(copied(state), sample)
    metrics = fetch_metrics(output.metrics)
    assert metrics["entropy"] == pytest.approx(policy.entropy().mean().item())
    assert metrics["kl"] == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item(), rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx((log_ratio > 1e-4).float().mean().item())
    gradient = core.grads(state, sample)[0]
    assert metrics["grad_norm"] == pytest.approx(gradient.norm().item())
    assert metrics["lr"] == 1e-3
    assert metrics["skipped"] == 0.0
    assert metrics["explained_variance"] < 1.0
    again = fetch_metrics(core.step(copied(output.state), sample).metrics)
    assert again["lr"] == pytest.approx(0.6e-3)  # 40 of 100 steps have been trained on


def test_the_explained_variance_of_perfect_values_is_one(make_batch: MakeBatch) -> None:
    """One step to the end of each episode, whose reward the first observation is the value of."""

    class ValueIsObservation(RLModule):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def _forward(self, batch: Batch) -> dict[str, Tensor]:
            values = batch["observations"][:, 0] * self.scale
            return {"action_dist_inputs": batch["observations"][:, :2], "values": values}

    core = make_core(ValueIsObservation)
    batch = make_batch(
        4, 5, reset_rows=False, terminated=np.ones((4, 5), bool), truncated=np.zeros((4, 5), bool)
    )
    batch.rewards[:] = batch.observations[..., 0]
    metrics = fetch_metrics(core.step(core.init(0), collate([batch])).metrics)
    assert metrics["explained_variance"] == pytest.approx(1.0)
    assert metrics["value_loss"] == pytest.approx(0.0, abs=1e-9)


def equal(one: TrainState, other: TrainState) -> bool:
    def leaves(tree: Any) -> list[Tensor]:
        if isinstance(tree, Tensor):
            return [tree]
        return [leaf for branch in tree.values() for leaf in leaves(branch)]

    return all(map(torch.equal, leaves(one), leaves(other)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(make_batch: MakeBatch, bad: float) -> None:
    core = make_core()
    state = core.step(core.init(seed=0), collate([make_batch()])).state
    batch = make_batch(seed=1)
    batch.rewards[0, 0] = bad
    output = core.step(copied(state), collate([batch]))
    assert equal(output.state, state)
    assert output.metrics["skipped"] == 1.0
    good = core.step(copied(output.state), collate([make_batch(seed=1)]))
    assert good.metrics["skipped"] == 0.0
    assert not equal(good.state, state)


def test_a_sample_without_live_steps_changes_nothing(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    sample = collate([make_batch(ends=0.0, live=np.zeros((3, 6), bool))])
    assert equal(core.step(copied(state), sample).state, state)


def test_an_update_leaves_params_that_were_given_out_alone(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    params = core.get_params(state)
    copies = {name: tensor.clone() for name, tensor in params.items()}
    core.step(copied(state), collate([make_batch()]))
    assert all(torch.equal(params[name], copies[name]) for name in copies)


def test_the_same_seed_draws_the_same_parameters_and_disturbs_no_other_randomness() -> None:
    core = make_core()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = core.init(seed=5)
    assert torch.equal(torch.rand(3), expected)
    assert equal(first, core.init(seed=5))
    assert not equal(first, core.init(seed=6))


class Normalized(RLModule):
    """With a buffer that training changes, and a parameter that it must not."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 3)
        self.fixed = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        outputs = self.head(self.norm(batch["observations"]) * self.fixed)
        return {"action_dist_inputs": outputs[:, :2], "values": outputs[:, 2]}


def test_buffers_follow_training_and_fixed_parameters_do_not(make_batch: MakeBatch) -> None:
    core = make_core(Normalized)
    state = core.init(seed=0)
    after = core.step(copied(state), collate([make_batch()])).state
    before_params, params = core.get_params(state), core.get_params(after)
    assert torch.equal(before_params["norm.running_mean"], torch.zeros(4))
    assert not torch.equal(params["norm.running_mean"], torch.zeros(4))
    assert params["norm.num_batches_tracked"] == 1
    assert torch.equal(params["fixed"], torch.ones(4))
    assert not torch.equal(params["head.weight"], before_params["head.weight"])


class NoValues(RLModule):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.head = torch.nn.Linear(4, 2)

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"action_dist_inputs": self.head(batch["observations"])}


class ColumnOfValues(NoValues):
    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        return {**super()._forward(batch), "values": torch.zeros(len(batch["observations"]), 1)}


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (NoValues, r"needs 'values' from forward_train of NoValues, which returned \['action_dist"),
        (ColumnOfValues, r"'values' in the output of .* must be a tensor \[b\] .* \[\d+, 1\]"),
    ],
)
def test_a_module_that_is_no_actor_critic_is_told_what_it_lacks(
    make_batch: MakeBatch, module: Any, said: str
) -> None:
    core = make_core(module)
    with pytest.raises(ValueError, match=said):
        core.step(core.init(0), collate([make_batch()]))


def test_a_module_that_cannot_be_trained_is_refused() -> None:
    class Empty(RLModule): ...

    class Half(NoValues):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.half()

    with pytest.raises(ValueError, match="Empty has no parameters"):
        make_core(Empty)
    with pytest.raises(ValueError, match=r"Half has parameters in torch.float16"):
        make_core(Half)
