"""The clipped surrogates of PPO and APPO, beside equation 7 as it is written."""

from __future__ import annotations

import torch

from juggler.learner.algorithms.actor_critic.core import clipped_surrogates

_CLIP = 0.2


def test_they_and_their_gradients_are_those_of_the_minimum() -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = 2 * torch.rand(4096, generator=generator)  # [B]
    advantages = torch.randn(4096, generator=generator)  # [B]
    advantages[::7] = 0
    ours, theirs = ratios.clone().requires_grad_(), ratios.clone().requires_grad_()

    surrogates, outside = clipped_surrogates(ours, advantages, _CLIP)
    clipped = theirs.clamp(1 - _CLIP, 1 + _CLIP)
    expected = torch.minimum(theirs * advantages, clipped * advantages)

    assert torch.equal(surrogates, expected)
    (gradient,) = torch.autograd.grad(surrogates.sum(), ours)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), theirs)
    assert torch.equal(gradient, expected_gradient)
    assert torch.equal(outside, (ratios - 1).abs() > _CLIP)
