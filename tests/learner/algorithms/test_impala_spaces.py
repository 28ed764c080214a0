"""IMPALA where observations and actions are trees, and where some actions are illegal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.slow_impala import in_training, slow_gradients
from support.states import copied

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.rl_module import Batch, RLModule

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)


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
    """The batch with a mask [N, T, 3] before each step, and none illegal at its ends."""

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


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_masks_are_those_of_each_step(make_batch: MakeBatch, recurrent: str) -> None:
    model = {"hidden_sizes": [8], "recurrent": recurrent, "recurrent_size": 5}
    make = partial(build_module, None, MASKED, spaces.Discrete(3), model)
    zeros = {name: np.zeros((4, 5), np.float32) for name in make().get_initial_state()}
    batch = make_batch(4, 7, seed=3, states={"module": zeros} if zeros else {})
    rng = np.random.default_rng(1)
    mask = rng.random((4, 7, 3)) < 0.5
    rows, steps = np.indices((4, 7))
    mask[rows, steps, batch.actions] = True  # what was chosen was legal
    core = Impala(make, ImpalaConfig(entropy_coefficient=0.1))
    assert_gradients(core, make, masked(batch, mask))
