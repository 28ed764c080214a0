"""A distribution of one's own: the example in DistributionSpec's docstring."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from juggler.runtime.modules.distributions import (
    ActionDistribution,
    CompositeSpec,
    DistributionSpec,
    distribution_for,
)

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)


@pytest.fixture(scope="module")
def laplace() -> Any:
    """The docstring's `laplace`."""
    doc = inspect.getdoc(DistributionSpec) or ""
    start, end = doc.index("    class Laplace("), doc.index("A run takes it as")
    names: dict[str, Any] = {
        "torch": torch,
        "ActionDistribution": ActionDistribution,
        "DistributionSpec": DistributionSpec,
    }
    exec(textwrap.dedent(doc[start:end]), names)
    return names["laplace"]


def test_the_example_samples_what_its_log_probs_say(laplace: Any) -> None:
    spec = laplace(BOX)
    inputs = torch.tensor([0.0, 1, -1, 0, 0.5, -0.5]).expand(40_000, -1)
    policy = spec(inputs)
    actions = policy.sample(spec.draw_noise((40_000,), torch.Generator().manual_seed(0)))
    assert actions.shape == spec.zeros((40_000,)).shape
    log_probs = policy.log_prob(actions)
    error = 5 * log_probs.std() / 200
    assert (policy.entropy()[0] + log_probs.mean()).abs() < error
    torch.testing.assert_close(policy.kl(policy), torch.zeros(40_000))
    assert policy.mode()[0].tolist() == [0, 1, -1]


def test_noise_of_its_own_must_be_made_of_given_numbers_too(laplace: Any) -> None:
    spec = laplace(BOX)
    assert torch.equal(spec.noise_from(torch.full((4, 2, 3), 0.25)), torch.full((4, 3), 0.25))
    own = type("Own", (type(spec),), {"draw_noise": lambda *_: torch.zeros(3)})(6, 3)
    with pytest.raises(NotImplementedError, match="Own has a draw_noise of its own"):
        own.noise_from(torch.zeros(4, 2, 3))


def test_it_may_be_a_part_of_a_composite_and_takes_no_mask(laplace: Any) -> None:
    parts = {"arm": laplace(BOX), "grip": distribution_for(spaces.Discrete(2))}
    spec = CompositeSpec(parts)
    actions = spec(torch.zeros(4, spec.inputs_size)).sample(spec.draw_noise((4,)))
    assert actions["arm"].shape == (4, 3)
    assert actions["grip"].shape == (4,)
    with pytest.raises(ValueError, match="in 'arm', LaplaceSpec takes no action mask"):
        spec.mask(torch.zeros(4, 8), {"arm": torch.ones(4, 3)})
