"""PQN's gradients against λ-returns in NumPy, and its exploration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import VECTOR, MakeBatch
from support.slow_losses import Step, in_training, slow_steps

from juggler.learner.algorithms.pqn import PqnConfig
from juggler.learner.algorithms.pqn.core import Pqn
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.models import ActorCritic, QNetwork
from juggler.runtime.wire.errors import UnsupportedSpace

THREE = spaces.Discrete(3, start=0)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"hidden_sizes": [8]},
    "gru": {"hidden_sizes": [8], "recurrent": "gru", "recurrent_size": 8},
}


def make_core(module: Any = QNetwork, model: str = "plain", **config: Any) -> Pqn:
    make = partial(module, VECTOR, THREE, MODELS[model])
    return Pqn(make, PqnConfig(**config))


def test_the_trained_parameters_act_whatever_keys_a_config_of_ones_own_has() -> None:
    @dataclass(kw_only=True)
    class OwnConfig(PqnConfig):
        target_acts: bool = True  # there is no target network

    core = Pqn(partial(QNetwork, VECTOR, THREE, MODELS["plain"]), OwnConfig())
    state = core.init(0)
    assert core.acting_parameters(state) is state["parameters"]


def slow_returns(
    batch: EpisodeBatch, steps: dict[tuple[int, int], Step], config: PqnConfig
) -> dict[tuple[int, int], float]:
    """G_t of every live step, one at a time in float64."""
    returns: dict[tuple[int, int], float] = {}
    for n in range(batch.rows):
        for t in reversed(range(batch.steps)):
            if not batch.live[n, t]:
                continue
            reward = np.float64(batch.rewards[n, t]) * config.reward_scale
            after = np.float64(steps[n, t].next_value.item())  # max_a Q(x_{t+1}, a)
            if batch.terminated[n, t]:
                returns[n, t] = reward
            elif batch.truncated[n, t] or (n, t + 1) not in returns:
                returns[n, t] = reward + config.gamma * after
            else:
                mixed = (1 - config.lambda_) * after + config.lambda_ * returns[n, t + 1]
                returns[n, t] = reward + config.gamma * mixed
    return returns


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reset_rows", [True, False])
@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
def test_gradients_are_those_of_lambda_returns_written_out_step_by_step(
    make_batch: MakeBatch, model: str, reset_rows: bool, lambda_: float
) -> None:
    core = make_core(model=model, lambda_=lambda_, gamma=0.9, reward_scale=0.3)
    state = core.init(seed=3)
    states = {"module": {"hidden": np.random.default_rng(1).normal(size=(4, 8)).astype("f4")}}
    states = states if model == "gru" else {}
    batch = make_batch(4, 9, seed=5, reset_rows=reset_rows, choices=3, states=states)
    assert len(batch.final_rows) > 1
    assert batch.terminated.any()
    grads, aux = core.grads(state, collate([batch]))
    module = in_training(core, state, core._make_module)
    steps = slow_steps(module, batch)
    returns = slow_returns(batch, steps, core.config)
    losses = [
        0.5 * (returns[at] - step.inputs[int(batch.actions[at])]) ** 2 for at, step in steps.items()
    ]
    loss = torch.stack(losses).mean()
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    expected = torch.autograd.grad(loss, list(named.values()))
    found = core.flat.named(grads)
    assert aux.metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert found.keys() == named.keys()
    for name, gradient in zip(named, expected, strict=True):
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_the_best_action_is_chosen_or_with_epsilon_any_that_is_legal(epsilon: float) -> None:
    masked = spaces.Dict({"at": VECTOR, "action_mask": spaces.MultiBinary(3)})
    module = QNetwork(masked, THREE, {"hidden_sizes": [8]}).eval()
    module.epsilon.fill_(epsilon)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1]], dtype=torch.int8)  # [B, n]
    at = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))  # [B, 4]
    batch = {"observations": {"at": at, "action_mask": mask}}
    with torch.no_grad():
        inputs = module.forward_exploration(batch)["action_dist_inputs"]  # [B, n]
        values = module.forward_inference(batch)["action_dist_inputs"]  # [B, n]
        outputs = module.forward_train(batch)
    shares = inputs.softmax(-1)  # [B, n]
    legal = mask / mask.sum(-1, keepdim=True)  # [B, n]
    best = torch.nn.functional.one_hot(values.argmax(-1), 3)  # [B, n]
    torch.testing.assert_close(shares, epsilon * legal + (1 - epsilon) * best, atol=1e-6, rtol=0)
    assert torch.equal(outputs["values"], values.max(-1).values)
    assert (outputs["values"].abs() < 100).all(), "an illegal action is never the best"


def test_what_it_cannot_train_is_refused() -> None:
    with pytest.raises(ValueError, match="ActorCritic has none"):
        make_core(module=ActorCritic)
    with pytest.raises(UnsupportedSpace, match="QNetwork acts in Discrete spaces"):
        QNetwork(VECTOR, spaces.Box(-1, 1, (2,)), {})
    for keys, said in (
        (
            {"exploration_epsilon": 1.5},
            "exploration_epsilon = 1.5: must be at least 0 and at most 1",
        ),
        ({"lambda_": -0.1}, "lambda_ = -0.1"),
        ({"epochs": 0}, "epochs = 0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            PqnConfig(**keys).validate()
