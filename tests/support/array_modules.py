"""Modules on arrays, beside the same modules in torch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector.utils import batch_space
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from juggler.runtime.modules.acting_part import restarted, strip_to_acting
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.columns import ACTION_MASK, OBSERVATIONS, STATES
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import to_tree, tree_map

ROWS = 6


def built(
    module: Any, observations: Space[Any], actions: Space[Any], **model: Any
) -> tuple[RLModule, RLModule]:
    """A module with trained weights as in an EnvRunner, and its twin."""
    torch.manual_seed(3)
    made = build_module(module, observations, actions, model)
    strip_to_acting(made)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
        for name, buffer in made.named_buffers():
            if name == "epsilon":
                buffer.fill_(0.2)
    return made, deepcopy(made).eval()


def seen(space: Space[Any], step: int, rows: int = ROWS) -> Any:
    """Observations [N, ...] of a space, with some legal actions each."""
    batch = batch_space(space, rows)
    batch.seed(step)
    tree: Any = to_tree(space, batch.sample())
    if isinstance(tree, Mapping) and ACTION_MASK in tree:
        tree = {**tree, ACTION_MASK: tree_map(_with_some, tree[ACTION_MASK])}
    return tree


def _with_some(mask: Any) -> Any:
    mask = mask.copy()
    mask[..., 0] = 1
    mask[..., -1] = 1
    return mask


class InTorch:
    """Acts as an `ArrayModule` does, with the module itself."""

    def __init__(self, module: RLModule, rows: int = ROWS) -> None:
        self.module = module
        self.initial = tree_map(
            lambda x: x.detach().expand(rows, *x.shape).clone(), module.get_initial_state()
        )
        self.states = self.initial

    def step(
        self, use: str, observations: Any, first: Any, noise: Any
    ) -> tuple[Any, np.ndarray[Any, Any], Any]:
        """Actions, inputs and states as arrays."""
        forward = getattr(self.module, f"forward_{use}")
        with torch.inference_mode():
            tensors = tree_map(torch.tensor, observations)
            if self.initial:
                states = restarted(self.states, self.initial, torch.from_numpy(first))
                sequences = tree_map(lambda x: x.unsqueeze(1), tensors)
                outputs = dict(forward({OBSERVATIONS: sequences, STATES: states}))
                self.states = outputs.pop(STATES)
                outputs = tree_map(lambda x: x.squeeze(1), outputs)
            else:
                outputs = forward({OBSERVATIONS: tensors})
            inputs = outputs["action_dist_inputs"]
            if use == "exploration":
                actions = self.module.action_distribution()(inputs).sample(torch.from_numpy(noise))
            else:
                actions = outputs.get("actions")
                if actions is None:
                    actions = self.module.action_distribution()(inputs).mode()
            return tuple(tree_map(Tensor.numpy, each) for each in (actions, inputs, self.states))  # type: ignore[return-value]


def only_numpy(module: ArrayModule) -> None:
    """From now on, the module itself fails when it acts."""

    def never(*_: Any) -> Any:
        raise AssertionError("torch acted")

    for name in ("_forward", "_forward_exploration", "_forward_inference", "_guarded"):
        module.module.__dict__[name] = never
    module.module._bare.clear()


class WithoutTorch(TorchDispatchMode):
    """A context in which all torch operations fail."""

    def __torch_dispatch__(self, operation: Any, *_: Any) -> Any:
        raise AssertionError(f"torch acted, with {operation}")


def sure(array_module: ArrayModule, observations: Any, noise: Any, rows: int = ROWS) -> None:
    """Let it compare both of its passes."""
    states = array_module.initial_states(rows)
    array_module.explore(observations, states, noise)
    array_module.infer(observations, states)
    assert not array_module.note


def only_traced(array_module: ArrayModule, observations: Any, noise: Any, rows: int = ROWS) -> None:
    """Trace both passes; fail if the module itself acts."""
    states = array_module.initial_states(rows)
    for _ in range(4):  # a call that is traced, and three that are compared
        array_module.explore(observations, states, noise)
        array_module.infer(observations, states)
    assert array_module._traces is not None
    assert array_module._traces._traced == 2
    only_numpy(array_module)
