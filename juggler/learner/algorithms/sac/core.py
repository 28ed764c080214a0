"""SAC: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv:1812.05905).

A policy π maximizes rewards and its own entropy H, weighted by a temperature α. Two networks Q_1
and Q_2 estimate the value of an action; the smaller one counts (Fujimoto et al. 2018, "Addressing
Function Approximation Error in Actor-Critic Methods"). A learner keeps the steps that arrive, draws
some of them for each optimizer step, and minimizes the sum of

    ½ (y_t - Q_i(x_t, a_t))²  for both i    y_t = r_t + … + γ^(n-1) r_{t+n-1} + γ^n V'(x_{t+n})
    -V(x_t)                                 V(x) = E_{a ~ π}[min_i Q_i(x, a)] + α H(π(x))
    log α (H(π(x_t)) - H*)                  H*: the target entropy

where V' uses the target networks' Q, which follow the trained ones. In the paper n is 1; with more,
the entropy of the steps between is omitted. The first term trains Q, the second π, and the third α.
They have no parameters in common, so one optimizer does the work of three, unless `grad_clip`
limits the norm of all three together.

The expectation is exact for Discrete actions (Christodoulou 2019, "Soft Actor-Critic for Discrete
Action Settings"). For a Box it is estimated from one action of the policy, and H is minus its
log-probability; the noise is a hash of the sample and of a key that counts optimizer steps.
Entropies are of actions with bounds scaled to -1 and 1, so that units of actions do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from juggler.learner.algorithms.off_policy.core import (
    OffPolicyCore,
    action_noise,
    importance_weights,
    place_of,
)
from juggler.learner.algorithms.sac import SacConfig
from juggler.learner.core.gradient_core import Forward, Loss, MakeModule, TrainState
from juggler.learner.core.learner_core import Aux, Columns
from juggler.learner.core.mean_metrics import LiveMean
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.distributions.base import SquashedGaussianSpec
from juggler.runtime.modules.models import LOG_TEMPERATURE, Q_VALUES, SoftActorCritic
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map


class _SampledActions(NamedTuple):
    """Values and entropies of a policy's actions."""

    values: Tensor  # [B] the smaller value, expected
    entropies: Tensor  # [B]


class Sac(OffPolicyCore):
    """The core of SAC, for modules like `SoftActorCritic`.

    The key in its state determines the noise of actions.
    """

    name = "sac"
    config: SacConfig

    def __init__(self, make_module: MakeModule, config: SacConfig) -> None:
        super().__init__(make_module, config)
        if not isinstance(self.module, SoftActorCritic):
            raise ValueError(
                "sac needs a module with two values of actions, such as SoftActorCritic or what "
                f"derives from it, not a {type(self.module).__name__}"
            )
        _must_be_reachable(self.module, config.target_entropy)

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        return {**super().initial_extra(parameters, seed), "key": torch.tensor(seed % 2**32)}  # []

    def next_extra(self, new: TrainState, aux: Aux) -> dict[str, Tensor]:
        key = (new["extra"]["key"] + 1) % 2**32  # []
        return {**super().next_extra(new, aux), "key": key}

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        live = columns[c.LIVE]  # [N, T]
        n, t = live.shape
        rewards, discounts, following = self.led_to(columns)  # [N, T], [N, T], [N T, ...]
        observations = tree_map(lambda x: x.flatten(0, 1), columns[c.OBSERVATIONS])  # [N T, ...]
        log_temperature = self._log_temperature(forward)  # []
        temperature = log_temperature.detach().exp()  # []
        noise = action_noise(forward.module, state["extra"]["key"], columns, draws=2)  # [2, N T, M]
        # y_t, by the target networks and the newest policy.
        with torch.no_grad():
            target = forward.using(state["extra"]["target"])
            after = _acted(forward, target, following, noise[0])
            soft = (after.values + temperature * after.entropies).view(n, t)  # [N, T]
            targets = torch.where(live, rewards + discounts * soft, 0.0)  # [N, T]
        # Errors of both critics, and V(x_t), whose gradient is the policy's.
        values, acted = _learned_of(forward, observations, columns, noise[1])
        values = torch.where(live.unsqueeze(-1), values.view(n, t, 2), 0.0)  # [N, T, 2]
        errors = targets.unsqueeze(-1) - values  # [N, T, 2]
        gain = (acted.values + temperature * acted.entropies).view(n, t)  # [N, T]
        entropies = acted.entropies.view(n, t)  # [N, T]
        mean = LiveMean(live)
        value_loss = mean(0.5 * errors.square().sum(-1) * importance_weights(columns, values))  # []
        policy_loss = -mean(torch.where(live, gain, 0.0))  # []
        # The temperature grows while the policy is less random than wanted.
        wanted = self._target_entropy(forward.module, observations)  # [N T], or a number
        surplus = (acted.entropies.detach() - wanted).view(n, t)  # [N, T]
        temperature_loss = log_temperature * mean(surplus)  # []
        total = value_loss + policy_loss
        if self.config.temperature is None:
            total = total + temperature_loss
        with torch.no_grad():
            metrics = {
                "value_loss": value_loss.detach(),
                "policy_loss": policy_loss.detach(),
                "mean_value": mean(values.mean(-1)),
                "entropy": mean(entropies),
                "temperature": temperature,
            }
        # Of a row: the mean error of both critics.
        priorities = errors.detach().abs().mean(-1).amax(1)  # [N]
        return Loss(total, mean.live_steps, metrics, means={}, priorities=priorities)

    def _log_temperature(self, forward: Forward) -> Tensor:
        learned = forward.parameter(LOG_TEMPERATURE)  # []
        if self.config.temperature is None:
            return learned
        # Made on the device, since a CUDA graph cannot repeat a copy from the host.
        given = torch.ones_like(learned) * self.config.temperature  # []
        return given.to(learned).log()  # []

    def _target_entropy(self, module: RLModule, observations: Any) -> Tensor | float:
        """Return the target for each of B observations [B], or for all."""
        if self.config.target_entropy is not None:
            return self.config.target_entropy
        if not isinstance(module.action_space, Discrete):
            return -float(module.action_distribution().noise_size)
        if isinstance(observations, Mapping) and c.ACTION_MASK in observations:
            legal: Tensor = observations[c.ACTION_MASK].flatten(1).sum(-1).clamp(min=1)  # [B]
            return 0.5 * legal.float().log()  # [B]
        return 0.5 * math.log(int(module.action_space.n))


def _acted(policy: Forward, critic: Forward, observations: Any, noise: Tensor) -> _SampledActions:
    """Sample actions for B observations, and value them.

    Args:
        policy: acts.
        critic: values its actions.
        observations: [B, ...], or trees of them.
        noise: [B, M], used to sample actions of a Box.
    """
    inputs = policy({c.OBSERVATIONS: observations})[c.ACTION_DIST_INPUTS]  # [B, D]
    if isinstance(policy.module.action_space, Discrete):
        return _expected(policy, inputs, critic({c.OBSERVATIONS: observations})[Q_VALUES])
    distribution = policy.module.action_distribution()(inputs)
    actions, log_probs = distribution.sample_with_log_prob(noise)  # [B, ...], [B]
    valued = critic({c.OBSERVATIONS: observations, c.ACTIONS: actions})[Q_VALUES]  # [B, 2]
    spec = policy.module.action_distribution()
    if isinstance(spec, SquashedGaussianSpec):
        log_probs = log_probs + spec.log_half_widths  # [B] as if bounds were -1 and 1
    return _SampledActions(valued.amin(-1), -log_probs)


def _expected(policy: Forward, inputs: Tensor, values: Tensor) -> _SampledActions:
    """Compute expected value and entropy of a policy of Discrete actions.

    Args:
        policy: the policy.
        inputs: inputs [B, n] of its action distribution.
        values: two values of each action, [B, 2, n].
    """
    distribution = policy.module.action_distribution()(inputs)
    expected = (inputs.softmax(-1) * values.amin(1)).sum(-1)  # [B]
    return _SampledActions(expected, distribution.entropy())


def _learned_of(
    forward: Forward, observations: Any, columns: Columns, noise: Tensor
) -> tuple[Tensor, _SampledActions]:
    """Compute both values [B, 2] of taken actions, and the policy's values.

    Gradients of the policy's values flow through Q to the policy, and do not change Q.

    Args:
        forward: the trained pass.
        observations: B observations.
        columns: the sample, with its actions.
        noise: as in `_acted`.
    """
    taken = columns[c.ACTIONS].flatten(0, 1)  # [B, ...]
    if not isinstance(forward.module.action_space, Discrete):
        valued = forward({c.OBSERVATIONS: observations, c.ACTIONS: taken})[Q_VALUES]  # [B, 2]
        return valued, _acted(forward, forward.frozen(), observations, noise)
    outputs = forward({c.OBSERVATIONS: observations})  # values of all actions, for both
    values = outputs[Q_VALUES]  # [B, 2, n]
    acted = _expected(forward, outputs[c.ACTION_DIST_INPUTS], values.detach())
    places = place_of(forward.module, taken).view(-1, 1, 1).expand(-1, 2, 1)  # [B, 2, 1]
    return values.gather(-1, places).squeeze(-1), acted


def _must_be_reachable(module: RLModule, target_entropy: float | None) -> None:
    """Raise ValueError if no policy reaches the target entropy.

    The temperature would grow without limit.
    """
    spec, most = module.action_distribution(), math.inf
    if isinstance(module.action_space, Discrete):
        most = math.log(int(module.action_space.n))
    elif isinstance(spec, SquashedGaussianSpec) and spec.is_bounded:
        most = spec.noise_size * math.log(2)
    if target_entropy is not None and target_entropy >= most:
        raise ValueError(
            f"target_entropy = {target_entropy}: must be below {most:.2f}, the largest entropy of "
            f"actions in {module.action_space}"
            + ("" if isinstance(module.action_space, Discrete) else ", scaled to -1 and 1")
        )
