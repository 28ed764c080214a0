"""IMPALA's loss written out: one observation, one step of one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import TrainState
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map


class Step(NamedTuple):
    """What the module says at one step."""

    inputs: Tensor  # [D]
    value: Tensor  # []
    next_value: Tensor  # [] without a gradient
    learned: bool  # from, and not just burnt in


def in_training(core: Impala, state: TrainState, make: Callable[[], RLModule]) -> RLModule:
    """The module "default" with what a state has for it."""
    module = make()
    tree = core.state_to_tree(state)
    arrays = {**tree["parameters"], **tree["buffers"]}
    module.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    return module


def see(module: RLModule, observation: Any, state: Any) -> tuple[Tensor, Tensor, Any]:
    """Policy outputs [D], value [] and next state [...] for one observation [...]."""
    leading = (None, None) if state else (None,)
    batch = {"observations": tree_map(lambda x: torch.as_tensor(x)[leading], observation)}
    if state:
        batch["states"] = tree_map(lambda x: x[None], state)
    outputs = module.forward_train(batch)
    inputs, value = outputs["action_dist_inputs"], outputs["values"]
    state = tree_map(lambda x: x[0], outputs["states"]) if state else {}
    return inputs.flatten(), value.flatten()[0], state


def slow_steps(
    module: RLModule, batch: EpisodeBatch, burn_in: int = 0
) -> dict[tuple[int, int], Step]:
    """By (row, step), the live steps of a batch, played again with the module from its states.

    An episode that goes on at the start of a row is told by the offset of its segment there.
    """
    finals = {
        (int(row), int(step)): k
        for k, (row, step) in enumerate(zip(batch.final_rows, batch.final_steps, strict=True))
    }
    goes_on = {
        int(row)
        for row, start, offset in zip(
            batch.segment_rows, batch.segment_starts, batch.segment_offsets, strict=True
        )
        if start == 0 and offset > 0
    }
    done = batch.terminated | batch.truncated
    steps: dict[tuple[int, int], Step] = {}
    for n in range(batch.rows):
        state = module.get_initial_state()
        warming = n in goes_on and bool(state)
        if warming:
            state = tree_map(lambda x, n=n: torch.as_tensor(x[n]), batch.states["module"])
        for t in range(batch.steps):
            if t and ((done[n, t - 1] and batch.live[n, t]) or not batch.live[n, t - 1]):
                state, warming = module.get_initial_state(), False
            if not batch.live[n, t]:
                continue
            here = tree_map(lambda x, n=n, t=t: x[n, t], batch.observations)
            learned = not (warming and t < burn_in)
            with torch.set_grad_enabled(learned):
                inputs, value, state = see(module, here, state)
            if batch.truncated[n, t]:
                k = finals[n, t]
                after = tree_map(lambda x, k=k: x[k], batch.final_observations)
            elif t + 1 < batch.steps:
                after = tree_map(lambda x, n=n, t=t: x[n, t + 1], batch.observations)
            else:
                after = tree_map(lambda x, n=n: x[n], batch.last_observations)
            with torch.no_grad():
                next_value = see(module, after, state)[1]
            steps[n, t] = Step(inputs, value, next_value, learned)
    return steps


def slow_loss(module: RLModule, batch: EpisodeBatch, config: ImpalaConfig) -> Tensor:
    """The loss of one batch."""
    steps = slow_steps(module, batch, config.burn_in)
    rewards = batch.rewards * config.reward_scale
    losses = []
    for n in range(batch.rows):
        target_after: Tensor | None = None  # none: nothing flows back from the step after
        for t in reversed(range(batch.steps)):
            if not batch.live[n, t] or not steps[n, t].learned:
                continue
            inputs, value, next_value, _ = steps[n, t]
            gamma = 0.0 if batch.terminated[n, t] else config.gamma
            if batch.terminated[n, t] or batch.truncated[n, t] or target_after is None:
                target_after = next_value
            policy = module.action_distribution()(inputs)
            logp = policy.log_prob(
                tree_map(lambda x, n=n, t=t: torch.as_tensor(x[n, t]), batch.actions)
            )
            ratio = (logp.detach() - batch.action_logp[n, t]).exp()
            error = rewards[n, t] + gamma * next_value - value.detach()
            advantage = ratio.clamp(max=config.rho_bar_pg) * (
                rewards[n, t] + gamma * target_after - value.detach()
            )
            target = (
                value.detach()
                + ratio.clamp(max=config.rho_bar) * error
                + gamma
                * config.lambda_
                * ratio.clamp(max=config.c_bar)
                * (target_after - next_value)
            )
            losses.append(
                -advantage * logp
                + config.value_coefficient * 0.5 * (target - value) ** 2
                - config.entropy_coefficient * policy.entropy()
            )
            target_after = target
    return torch.stack(losses).mean()


def slow_gradients(
    module: RLModule, batch: EpisodeBatch, config: ImpalaConfig
) -> dict[str, np.ndarray]:
    """Of the loss, by parameter."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(slow_loss(module, batch, config), parameters, allow_unused=True)
    return {
        name: np.zeros(parameter.shape) if gradient is None else gradient.numpy()
        for name, parameter, gradient in zip(names, parameters, found, strict=True)
    }
