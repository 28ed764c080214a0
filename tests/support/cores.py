"""Small cores of the algorithms that ship, and samples for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module
from support.algorithms import action_space_of, keeps_steps, needs_memory

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)


def make_core(name: str, kind: Any = None, **config: Any) -> GradientCore:
    package, _, attribute = ALGORITHMS[name].core.partition(":")
    core = getattr(importlib.import_module(package), attribute)
    model: dict[str, Any] = {"hidden_sizes": [8, 8]}
    if needs_memory(name):
        model |= {"recurrent": "gru", "recurrent_size": 8}
    if keeps_steps(name):
        # Few updates; a row of what needs a memory has several steps, so that fewer come to one.
        ratio = 4.0 if needs_memory(name) else 1.0
        config = {"replay_begin": 0, "replay_batch_size": 8, "replay_ratio": ratio, **config}
    elif name == "ppo":
        config = {"epochs": 2, "minibatches": 2, **config}
    make = partial(
        build_module, kind or ALGORITHMS[name].module, VECTOR, action_space_of(name), model
    )
    made: GradientCore = core(make, ALGORITHMS[name].config(**config))
    return made


def samples_of(make_batch: MakeBatch, count: int) -> list[Any]:
    state = {"hidden": torch.ones(4, 8)}  # [N, 8]
    return [
        {**collate([make_batch(4, 8, seed=seed)]), "states": {"module": state}}
        for seed in range(count)
    ]
