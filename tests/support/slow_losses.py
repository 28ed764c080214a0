"""Losses in NumPy, step by step, and modules with known gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.learner.algorithms.appo import AppoConfig
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.core.gradient_core import TrainState
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import Batch, RLModule
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
    """Policy outputs [D], value [] and next state [...] for one observation."""
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
    """Live steps by (row, step), replayed from the rows' states.

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


Array = NDArray[np.float64]
#: A linear module's parameters by name, in float64.
Weights = dict[str, Array]
Place = tuple[int, int]


class Linear(RLModule):
    """Four numbers to two logits and a value."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.policy = torch.nn.Linear(4, 2)
        self.value = torch.nn.Linear(4, 1)

    def _forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        observations = batch["observations"]  # [B, 4]
        return {
            "action_dist_inputs": self.policy(observations),
            "values": self.value(observations).squeeze(-1),
        }


def weights_of(named: Mapping[str, torch.Tensor]) -> Weights:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in named.items()}


def log_probs(weights: Weights, observation: Any) -> Array:
    logits = weights["policy.weight"] @ observation.astype(float) + weights["policy.bias"]  # [2]
    return logits - np.log(np.exp(logits).sum())


def value(weights: Weights, observation: Any) -> float:
    return float((weights["value.weight"] @ observation.astype(float) + weights["value.bias"])[0])


def observation_after(batch: EpisodeBatch, n: int, t: int) -> Any:
    """What a step led to, unless it terminated."""
    for k, (row, step) in enumerate(zip(batch.final_rows, batch.final_steps, strict=True)):
        if (row, step) == (n, t):
            return batch.final_observations[k]
    return batch.observations[n, t + 1] if t + 1 < batch.steps else batch.last_observations[n]


def live_places(batch: EpisodeBatch) -> list[Place]:
    return [(int(n), int(t)) for n, t in np.argwhere(batch.live)]


def gae(
    weights: Weights, batch: EpisodeBatch, config: PpoConfig
) -> tuple[dict[Place, float], dict[Place, float]]:
    """Advantages, not normalized, and targets of live steps."""
    advantages: dict[Place, float] = {}
    for n, t in reversed(live_places(batch)):
        gamma = 0.0 if batch.terminated[n, t] else config.gamma
        after = value(weights, observation_after(batch, n, t))
        here = value(weights, batch.observations[n, t])
        delta = float(batch.rewards[n, t]) * config.reward_scale + gamma * after - here
        ends = batch.terminated[n, t] or batch.truncated[n, t]
        later = 0.0 if ends else advantages.get((n, t + 1), 0.0)
        advantages[n, t] = delta + gamma * config.lambda_ * later
    targets = {
        place: each + value(weights, batch.observations[place])
        for place, each in advantages.items()
    }
    return advantages, targets


def ppo_loss(new: Weights, old: Weights, batch: EpisodeBatch, config: PpoConfig) -> float:
    """With the weights `new`, where the update began with `old`."""
    advantages, targets = gae(old, batch, config)
    raw = np.array(list(advantages.values()))
    losses = []
    for n, t in live_places(batch):
        advantage = advantages[n, t]
        if config.normalize_advantages:
            advantage = (advantage - raw.mean()) / raw.std()
        observation = batch.observations[n, t]
        logp = log_probs(new, observation)  # [2]
        ratio = np.exp(logp[batch.actions[n, t]] - batch.action_logp[n, t])
        near = np.clip(ratio, 1 - config.clip, 1 + config.clip)
        square = (value(new, observation) - targets[n, t]) ** 2
        if config.value_clip is not None:
            before = value(old, observation)
            moved = np.clip(value(new, observation) - before, -config.value_clip, config.value_clip)
            square = max(square, (before + moved - targets[n, t]) ** 2)
        losses.append(
            -min(ratio * advantage, near * advantage)
            + config.value_coefficient * 0.5 * square
            - float(config.entropy_coefficient) * -(np.exp(logp) * logp).sum()  # type: ignore[arg-type]
        )
    return float(np.mean(losses))


def appo_loss(
    new: Weights, target: Weights, batch: EpisodeBatch, config: AppoConfig, beta: float = 0.0
) -> float:
    """APPO's loss, with a target network and weight β of their distance."""
    losses = []
    correction_after: dict[Place, float] = {}  # v_t - V'(x_t)
    for n, t in reversed(live_places(batch)):
        gamma = 0.0 if batch.terminated[n, t] else config.gamma
        observation, action = batch.observations[n, t], batch.actions[n, t]
        here, after = value(target, observation), value(target, observation_after(batch, n, t))
        behaviour = float(batch.action_logp[n, t])
        weight = np.exp(log_probs(target, observation)[action] - behaviour)
        ends = batch.terminated[n, t] or batch.truncated[n, t]
        later = 0.0 if ends else correction_after.get((n, t + 1), 0.0)
        reward = float(batch.rewards[n, t]) * config.reward_scale
        error = reward + gamma * after - here
        correction_after[n, t] = (
            min(config.rho_bar, weight) * error
            + gamma * config.lambda_ * min(config.c_bar, weight) * later
        )
        advantage = min(config.rho_bar_pg, weight) * (error + gamma * later)
        logp = log_probs(new, observation)  # [2]
        ratio = min(config.behaviour_clip, 1 / weight) * np.exp(logp[action] - behaviour)
        near = np.clip(ratio, 1 - config.clip, 1 + config.clip)
        goal = here + correction_after[n, t]
        target_logp = log_probs(target, observation)  # [2]
        losses.append(
            -min(ratio * advantage, near * advantage)
            + config.value_coefficient * 0.5 * (goal - value(new, observation)) ** 2
            - float(config.entropy_coefficient) * -(np.exp(logp) * logp).sum()  # type: ignore[arg-type]
            + beta * (np.exp(target_logp) * (target_logp - logp)).sum()
        )
    return float(np.mean(losses))


def gradient(loss: Callable[[Weights], float], weights: Weights, size: float = 1e-6) -> Weights:
    """Of a loss, by central differences."""
    found = {}
    for name, array in weights.items():
        slopes = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            moved = []
            for step in (size, -size):
                others = {key: each.copy() for key, each in weights.items()}
                others[name][index] += step
                moved.append(loss(others))
            slopes[index] = (moved[0] - moved[1]) / (2 * size)
        found[name] = slopes
    return found


VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)


def make_core(module: Any = Linear, model: dict[str, Any] | None = None, **config: Any) -> Ppo:
    make = partial(build_module, module, VECTOR, TWO, model or {})
    return Ppo(make, PpoConfig(**config))


def parameters(core: Ppo, state: TrainState) -> dict[str, Tensor]:
    return core.flat.named(state["parameters"])


def near(state: TrainState, batch: EpisodeBatch, core: Ppo) -> EpisodeBatch:
    """The batch as sampled by a slightly different policy."""
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
