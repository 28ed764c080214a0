"""The core of actor-critics, and their training pass over a sample."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from juggler.learner.algorithms.actor_critic import ActorCriticConfig
from juggler.learner.core.forward import Forward
from juggler.learner.core.gradient_core import GradientCore, MakeModule, TrainState
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.returns import Estimates, next_values
from juggler.learner.core.sequences import all_seen, unrolled
from juggler.learner.optim.optimizers import Schedule
from juggler.runtime.modules import columns as c

#: A column [N, T] of advantages that a wrapping core has estimated for its own rewards.
EXTRA_ADVANTAGES: Final = "extra_advantages"


class ActorCriticCore(GradientCore):
    """A core for modules that return "action_dist_inputs" and "values" in training."""

    config: ActorCriticConfig

    takes_advantages: bool = False
    """Whether it adds a sample's `EXTRA_ADVANTAGES` to its own, and has `estimates`."""

    def __init__(self, make_module: MakeModule, config: ActorCriticConfig) -> None:
        super().__init__(make_module, config)
        if config.burn_in and not self.initial_state():
            raise ValueError(
                f"burn_in = {config.burn_in}: the module has no state that could be warmed up"
            )
        self.schedules["entropy_coefficient"] = Schedule(config.entropy_coefficient)

    def total(
        self, policy_loss: Tensor, value_loss: Tensor, entropy: Tensor, state: TrainState
    ) -> Tensor:
        """Return the loss []: policy, value and entropy terms, weighted."""
        coefficient = self.schedules["entropy_coefficient"](state["steps"])  # []
        return (
            policy_loss
            + self.config.value_coefficient * value_loss
            - coefficient.to(entropy.dtype) * entropy
        )

    def estimates(self, columns: Columns, seen: PolicyAndValues, log_ratios: Tensor) -> Estimates:
        """Estimate advantages and targets of the value function.

        Args:
            columns: the sample.
            seen: outputs of the policy that is estimated for, and of its value function.
            log_ratios: log of that policy's over the behaviour policy's probabilities, [N, T]; 0
                where steps are not live.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `estimates`")

    def log_ratios(self, forward: Forward, columns: Columns) -> tuple[Tensor, Tensor]:
        """Return log π/μ and the steps to learn from, both [N, T]."""
        seen = actor_critic_pass(forward, columns, self.config.burn_in)
        policy = forward.module.action_distribution()(seen.action_dist_inputs)  # [N, T]
        logp = policy.log_prob(columns[c.ACTIONS])  # [N, T]
        # The log-probabilities of steps that are not live may be anything.
        return torch.where(seen.live, logp - columns[c.ACTION_LOGP], 0.0), seen.live


class PolicyAndValues(NamedTuple):
    """Outputs of the policy and the value function, per step."""

    action_dist_inputs: Tensor  # [N, T, D]
    values: Tensor  # [N, T]
    next_values: Tensor  # [N, T] as from `returns.next_values`; without a gradient
    live: Tensor  # [N, T] bool: the steps to learn from


def with_extra(estimates: Estimates, columns: Columns) -> Estimates:
    """Add the sample's `EXTRA_ADVANTAGES` to estimates, if it has any."""
    if EXTRA_ADVANTAGES not in columns:
        return estimates
    return estimates._replace(advantages=estimates.advantages + columns[EXTRA_ADVANTAGES])


def actor_critic_pass(forward: Forward, columns: Columns, burn_in: int = 0) -> PolicyAndValues:
    """Make the training pass over all observations of a sample.

    A module without a state sees each observation separately. A module with a state reads each
    segment in order. It starts from the initial state or, if the segment continues an episode of an
    earlier batch, from the state that came with the row.

    Args:
        forward: the module's training pass.
        columns: the sample.
        burn_in: steps at the start of every segment that continues an episode. There, a module
            with a state only computes a state that fits its current parameters, without gradients;
            nothing is learned from these steps (Kapturowski et al. 2019, "Recurrent
            Experience Replay in Distributed Reinforcement Learning", section 3).

    Raises:
        ValueError: the module returns no distribution inputs or values, or it has a state and the
            episodes have none.
    """
    if forward.initial_state():
        found = unrolled(forward, columns, burn_in)
        inputs, values = inputs_and_values(forward, found.outputs)
        inputs, values = inputs.flatten(0, 1), values.flatten()  # [S (L + 1), D], [S (L + 1)]
        at = found.places  # [N, T]
        return PolicyAndValues(inputs[at], values[at], values.detach()[at + 1], found.live)
    # Without a state, one pass sees each observation of the sample once.
    n, t = columns[c.LIVE].shape
    outputs = forward(all_seen(columns))  # [N T + N + K, ...]
    inputs, all_values = inputs_and_values(forward, outputs)
    values, last_values, final_values = all_values.tensor_split([n * t, n * t + n])
    values = values.view(n, t)  # [N, T]
    with torch.no_grad():
        after = next_values(
            values, last_values, final_values, columns[c.FINAL_ROWS], columns[c.FINAL_STEPS]
        )  # [N, T]
    return PolicyAndValues(inputs[: n * t].view(n, t, -1), values, after, columns[c.LIVE])


def clipped_surrogates(ratios: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped objective, and which ratios are clipped, bool; all [...].

    Schulman et al. 2017, equation 7: min(r Â, clip(r, 1 - ε, 1 + ε) Â).
    """
    with torch.no_grad():
        # A clipped ratio has no gradient, so the minimum selects one of two ratios.
        clipped = ratios.clamp(1 - clip, 1 + clip)  # [...]
        is_less = clipped * advantages < ratios * advantages  # [...] bool
    return torch.where(is_less, clipped, ratios) * advantages, clipped != ratios


def inputs_and_values(forward: Forward, outputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Check and return distribution inputs and values of a training pass.

    Shapes are [B, D] and [B]; for a module with a state, [B, T, D] and [B, T].

    Raises:
        ValueError: the outputs are not an actor-critic's.
    """
    for name in (c.ACTION_DIST_INPUTS, c.VALUES):
        if name not in outputs:
            raise ValueError(
                f"an actor-critic loss needs {name!r} from forward_train of "
                f"{type(forward.module).__name__}, which returned {sorted(outputs)}"
            )
    return outputs[c.ACTION_DIST_INPUTS], outputs[c.VALUES]
