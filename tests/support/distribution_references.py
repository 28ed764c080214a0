"""What our distributions must agree with: those of torch, one for every leaf of an action."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from juggler.runtime.modules.distributions import DistributionSpec

FLOATS = spaces.Box(-1, 1, (2, 3), np.float32)
DISCRETE = spaces.Discrete(5)
SHIFTED = spaces.Discrete(5, start=-2)
UNEVEN = spaces.MultiDiscrete([2, 4, 1, 3])
SPACES: list[gymnasium.Space[Any]] = [
    DISCRETE,
    SHIFTED,
    FLOATS,
    spaces.Box(-1, 1, (), np.float64),
    UNEVEN,
    spaces.MultiDiscrete([3, 3], start=[5, 0]),
    spaces.MultiDiscrete(np.array([[1, 2], [3, 4]]), start=np.array([[0, -1], [2, 3]])),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 2]),
    spaces.Dict(move=FLOATS, jump=spaces.Discrete(2)),
    spaces.Tuple(
        (UNEVEN, spaces.Dict(deep=spaces.Tuple((spaces.MultiBinary(2), SHIFTED)), flat=FLOATS))
    ),
]


class Part(NamedTuple):
    """A torch distribution over what `actions` picks from our actions."""

    distribution: Distribution
    actions: Any  # of our actions


def inputs_for(spec: DistributionSpec, *leading: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*leading, spec.inputs_size, generator=generator)


def drawn(spec: DistributionSpec, inputs: Tensor, seed: int = 1) -> Any:
    """Actions for outputs [..., D]."""
    noise = spec.draw_noise(inputs.shape[:-1], torch.Generator().manual_seed(seed))
    return spec(inputs).sample(noise)


def references(space: gymnasium.Space[Any], inputs: Tensor, actions: Any) -> list[Part]:
    """Independent distributions by torch for our outputs [..., D], and our actions as theirs."""
    *_, end = parts = list(_parts(space, inputs, actions))
    assert end == inputs.shape[-1]
    return parts[:-1]


def _parts(space: gymnasium.Space[Any], inputs: Tensor, actions: Any) -> Iterator[Any]:
    """The parts, then how many of the outputs they take."""
    leading = inputs.shape[:-1]
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces
        items = inner.items() if isinstance(inner, dict) else enumerate(inner)
        taken = 0
        for key, child in items:
            *parts, size = _parts(child, inputs[..., taken:], actions[str(key)])
            yield from parts
            taken += size
        yield taken
    elif isinstance(space, spaces.Discrete):
        yield Part(Categorical(logits=inputs[..., : space.n]), actions - int(space.start))
        yield int(space.n)
    elif isinstance(space, spaces.MultiDiscrete):
        flat = actions.reshape(*leading, -1)
        starts = space.start.reshape(-1).tolist()
        taken = 0
        for i, n in enumerate(space.nvec.reshape(-1).tolist()):
            logits = inputs[..., taken : taken + n]
            yield Part(Categorical(logits=logits), flat[..., i] - starts[i])
            taken += n
        yield taken
    elif isinstance(space, spaces.MultiBinary):
        size = int(np.prod(space.shape))
        bits = Bernoulli(logits=inputs[..., :size])
        yield Part(Independent(bits, 1), actions.reshape(*leading, size).float())
        yield size
    else:
        size = int(np.prod(space.shape))
        mean, log_std = inputs[..., : 2 * size].chunk(2, -1)
        normal = Normal(mean, log_std.exp())
        yield Part(Independent(normal, 1), actions.reshape(*leading, size))
        yield 2 * size
