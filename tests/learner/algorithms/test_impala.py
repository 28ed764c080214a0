"""IMPALA's gradients against its equations, and non-finite gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import TWO, VECTOR, MakeBatch
from support.slow_losses import in_training, slow_gradients, slow_steps
from support.small_cores import copied
from torch import Tensor

from juggler.learner.algorithms.actor_critic.core import PolicyAndValues, actor_critic_pass
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import Forward
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.structures import tree_map


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
    """One step per episode, whose reward the first observation shows."""

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


class Normalized(RLModule):
    """Has a buffer that training changes, and a frozen parameter."""

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
        (NoValues, "needs 'values' from forward_train"),
        (ColumnOfValues, "'values' in the output of .* must"),
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


# IMPALA where observations and actions are trees, and where some actions are illegal.


def split(observations: np.ndarray) -> dict[str, Any]:
    """Vectors [..., 4] as observations in OBSERVED."""
    return {
        "near": observations[..., :3],
        "far": {"0": observations[..., 3], "1": (observations[..., 0] > 0).astype(np.int64)},
    }


OBSERVED = spaces.Dict(
    {
        "near": spaces.Box(-10, 10, (3,), np.float32),
        "far": spaces.Tuple([spaces.Box(-10, 10, (), np.float32), spaces.Discrete(2)]),
    }
)
CHOSEN = spaces.Dict(
    {
        "move": spaces.Discrete(3, start=1),
        "arms": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2)]),
    }
)


def assert_gradients(core: Impala, make: Callable[[], RLModule], batch: EpisodeBatch) -> None:
    state = core.init(seed=3)
    module = in_training(core, state, make)
    grads, _ = core.grads(state, collate([batch]))
    found = core.flat.named(grads)
    for name, gradient in slow_gradients(module, batch, core.config).items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_gradients_of_trees_are_those_of_the_loss_written_out(
    make_batch: MakeBatch, recurrent: str
) -> None:
    model = {"hidden_sizes": [8], "recurrent": recurrent, "recurrent_size": 5}
    make = partial(build_module, None, OBSERVED, CHOSEN, model)
    batch = make_batch(4, 7, seed=5)
    rng = np.random.default_rng(0)
    zeros = {name: np.zeros((4, 5), np.float32) for name in make().get_initial_state()}
    batch = replace(
        batch,
        observations=split(batch.observations),
        last_observations=split(batch.last_observations),
        final_observations=split(batch.final_observations),
        actions={
            "move": rng.integers(1, 4, (4, 7)),
            "arms": {
                "0": rng.standard_normal((4, 7, 2), dtype=np.float32),
                "1": rng.integers(0, 2, (4, 7, 2)).astype(np.int8),
            },
        },
        action_logp=batch.action_logp - 5,
        states={"module": zeros} if zeros else {},
    )
    core = Impala(make, ImpalaConfig(gamma=0.9, entropy_coefficient=0.1))
    assert_gradients(core, make, EpisodeBatch.from_tree(batch.to_tree()))


MASKED = spaces.Dict({"vector": VECTOR, "action_mask": spaces.MultiBinary(3)})


class FreeLogits(RLModule):
    """The same logits everywhere."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.value = torch.nn.Linear(4, 1)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        vectors = batch["observations"]["vector"]
        return {
            "action_dist_inputs": self.logits.expand(len(vectors), 3),
            "values": self.value(vectors).squeeze(-1),
        }


def masked(batch: EpisodeBatch, mask: np.ndarray) -> EpisodeBatch:
    """The batch with masks [N, T, 3] before steps, none at ends."""

    def everything(observations: np.ndarray) -> dict[str, np.ndarray]:
        return {"vector": observations, "action_mask": np.ones((len(observations), 3), np.int8)}

    columns = {
        **batch.to_tree(),
        "observations": {"vector": batch.observations, "action_mask": mask.astype(np.int8)},
        "last_observations": everything(batch.last_observations),
        "final_observations": everything(batch.final_observations),
    }
    return EpisodeBatch.from_tree(columns)


def test_illegal_actions_take_no_gradient_and_no_entropy(make_batch: MakeBatch) -> None:
    make = partial(FreeLogits, MASKED, spaces.Discrete(3), {})
    core = Impala(make, ImpalaConfig(entropy_coefficient=0.1))
    state = core.init(seed=0)
    mask = np.ones((3, 6, 3), bool)
    mask[..., 2] = False
    batch = masked(make_batch(3, 6, seed=2, choices=2), mask)
    assert_gradients(core, make, batch)
    sample = collate([batch])
    grads, _ = core.grads(state, sample)
    gradient = core.flat.named(grads)["logits"]
    assert gradient[2] == 0
    assert (gradient[:2] != 0).all()
    metrics = fetch_metrics(core.step(copied(state), sample).metrics)
    legal = torch.distributions.Categorical(logits=torch.tensor([0.3, -0.2]))
    assert metrics["entropy"] == pytest.approx(legal.entropy().item())


# IMPALA with modules that remember, against playing every episode again step by step.


class Accumulator(RLModule):
    """Sums all observations of the episode, and counts them.

    What the sum starts from is learned.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.start = torch.nn.Parameter(torch.full((4,), 0.5))
        self.head = torch.nn.Linear(4, 3)

    def get_initial_state(self) -> dict[str, Any]:
        return {"seen": {"sum": self.start, "count": torch.zeros((), dtype=torch.int64)}}

    def _forward(self, batch: Batch) -> dict[str, Any]:
        seen, observations = batch["states"]["seen"], batch["observations"]  # [B, T, 4]
        sums = seen["sum"].unsqueeze(1) + observations.cumsum(1)  # [B, T, 4]
        counts = seen["count"].unsqueeze(1) + torch.arange(1, observations.shape[1] + 1)  # [B, T]
        outputs = self.head(sums / counts.unsqueeze(-1))  # [B, T, 3]
        return {
            "action_dist_inputs": outputs[..., :2],
            "values": outputs[..., 2],
            "states": {"seen": {"sum": sums[:, -1], "count": counts[:, -1]}},
        }


MODULES: dict[str, Any] = {
    kind: partial(
        build_module,
        None,
        VECTOR,
        TWO,
        {"hidden_sizes": [8], "recurrent": kind, "recurrent_size": 6},
    )
    for kind in ("lstm", "gru")
}
MODULES["accumulator"] = partial(Accumulator, VECTOR, TWO, {})


def batch_for(
    make_batch: MakeBatch, module: RLModule, *sizes: int, **settings: Any
) -> EpisodeBatch:
    """A batch with the module's state before each row."""
    batch = make_batch(*sizes, **settings)
    rng = np.random.default_rng(settings.get("seed", 0))
    goes_on = np.zeros(batch.rows, bool)
    goes_on[batch.segment_rows[(batch.segment_starts == 0) & (batch.segment_offsets > 0)]] = True

    def states(initial: Tensor) -> np.ndarray:
        later = rng.integers(1, 9, (batch.rows, *initial.shape)) / 4
        first = np.broadcast_to(initial.detach(), later.shape)
        goes_on_here = goes_on.reshape(-1, *[1] * initial.ndim)
        return np.where(goes_on_here, later, first).astype(initial.detach().numpy().dtype)

    columns = {
        **batch.to_tree(),
        "states": {"module": tree_map(states, module.get_initial_state())},
    }
    return EpisodeBatch.from_tree(columns)


def outputs_of(core: Impala, state: Any, batches: list[EpisodeBatch]) -> PolicyAndValues:
    forward = Forward(core.flat, state["parameters"], state["buffers"])
    return actor_critic_pass(forward, collate(batches))


def assert_as_played(
    outputs: PolicyAndValues, module: RLModule, batches: list[EpisodeBatch]
) -> None:
    start = 0
    for batch in batches:
        for (n, t), step in slow_steps(module, batch).items():
            at = start + n, t
            assert outputs.live[at]
            close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
            close(outputs.action_dist_inputs[at], step.inputs)
            close(outputs.values[at], step.value)
            if not batch.terminated[n, t]:
                close(outputs.next_values[at], step.next_value)
        start += batch.rows


def test_rows_of_different_lengths_may_begin_with_a_step_that_is_not_live(
    make_batch: MakeBatch,
) -> None:
    """Each row keeps its own last observation behind padding."""
    live = np.ones((3, 5), bool)
    live[1, 0] = live[2, 3:] = False
    core = Impala(MODULES["lstm"], ImpalaConfig())
    state = core.init(seed=3)
    module = in_training(core, state, MODULES["lstm"])
    batches = [batch_for(make_batch, module, 3, 5, ends=0.0, live=live)]
    batches[0].states["module"]["hidden"][1] = 77.0
    for rows, steps in ((2, 4), (3, 9), (4, 1)):
        batches.append(batch_for(make_batch, module, rows, steps, seed=rows, ends=0.1))
    assert_as_played(outputs_of(core, state, batches), module, batches)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
@pytest.mark.parametrize("burn_in", [0, 1, 3])
def test_gradients_are_those_of_playing_every_episode_again(
    make_batch: MakeBatch, make: Callable[[], RLModule], burn_in: int
) -> None:
    """Through all of an episode's steps in its row, except the burn-in."""
    config = ImpalaConfig(burn_in=burn_in, gamma=0.9, lambda_=0.9, entropy_coefficient=0.1)
    core = Impala(make, config)
    state = core.init(seed=3)
    module = in_training(core, state, make)
    batch = batch_for(make_batch, module, 6, 7, seed=8, ends=0.2)
    lengths = batch.segment_lengths[batch.segment_offsets > 0]
    assert len(lengths) > 1
    assert lengths.min() < 3 < lengths.max()  # one is over before its burn-in
    grads, aux = core.grads(state, collate([batch]))
    expected = slow_gradients(module, batch, config)
    found = core.flat.named(grads)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-3, atol=1e-5)
    burnt = np.minimum(lengths, burn_in).sum()
    assert aux.live_steps == batch.live_steps - burnt


def test_episodes_without_states_are_refused(make_batch: MakeBatch) -> None:
    core = Impala(MODULES["lstm"], ImpalaConfig())
    with pytest.raises(ValueError, match="has a state, and the episodes have none"):
        core.step(core.init(0), collate([make_batch()]))


def test_burn_in_without_anything_to_warm_up_is_refused() -> None:
    make = partial(build_module, None, VECTOR, TWO, {})
    with pytest.raises(ValueError, match="burn_in = 2: the module has no state"):
        Impala(make, ImpalaConfig(burn_in=2))
