"""PPO for small modules, and samples for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.core.gradient_core import TrainState
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module
from support.slow_linear import Linear

VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)


def make_core(module: Any = Linear, model: dict[str, Any] | None = None, **config: Any) -> Ppo:
    make = partial(build_module, module, VECTOR, TWO, model or {})
    return Ppo(make, PpoConfig(**config))


def parameters(core: Ppo, state: TrainState) -> dict[str, Tensor]:
    return core.flat.named(state["parameters"])


def near(state: TrainState, batch: EpisodeBatch, core: Ppo) -> EpisodeBatch:
    """The batch as if a policy a little off the present one had sampled it."""
    module = core.module
    unit = core.flat
    seen = torch.as_tensor(batch.observations).flatten(0, 1)
    named = unit.named(state["parameters"])
    outputs = unit.forward_train(named, {}, {"observations": seen})
    logp = module.action_distribution()(outputs["action_dist_inputs"]).log_prob(
        torch.as_tensor(batch.actions).flatten()
    )
    noise = np.random.default_rng(9).normal(0, 0.3, batch.live.shape)
    batch.action_logp[:] = logp.detach().view(batch.live.shape).numpy() + noise
    return batch


def states(core: Ppo, rows: int) -> dict[str, Any]:
    """As rows begin with that go on with an episode."""
    initial = core.module.get_initial_state()
    if not initial:
        return {}
    rng = np.random.default_rng(rows)
    drawn = {
        name: rng.normal(size=(rows, *each.shape)).astype(np.float32)
        for name, each in initial.items()
    }
    return {"module": drawn}
