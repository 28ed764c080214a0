"""Modules, connectors and distributions that need no training to be told apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from juggler.runtime.connectors.connector import (
    ActionConnector,
    LearnerConnector,
    ObservationConnector,
)
from juggler.runtime.modules.distributions.base import DistributionSpec
from juggler.runtime.modules.rl_module import RLModule


class LinearPolicy(RLModule):
    """Action distribution inputs as a fixed function of the observation's three numbers."""

    def __init__(self, observation_space, action_space, model_config=None):
        super().__init__(observation_space, action_space, model_config or {})
        outputs = self.action_distribution().inputs_size
        self.register_buffer("weight", torch.sin(torch.arange(3.0 * outputs)).reshape(3, -1))

    def _forward(self, batch):
        return {"action_dist_inputs": torch.tanh(numbers(batch["observations"]) @ self.weight)}


class Summing(LinearPolicy):
    """A policy of the sum of all observations so far."""

    def get_initial_state(self):
        return {"sum": {"of": torch.zeros(3)}, "start": torch.tensor(0.5)}

    def _forward(self, batch):
        seen = numbers(batch["observations"])  # [B, T, 3]
        sums = batch["states"]["sum"]["of"][:, None] + seen.cumsum(1)  # [B, T, 3]
        outputs = sums + batch["states"]["start"][:, None, None]
        return {
            "action_dist_inputs": torch.tanh(outputs @ self.weight),
            "states": {"sum": {"of": sums[:, -1]}, "start": batch["states"]["start"]},
        }


def numbers(observations) -> torch.Tensor:
    """An observation tree's three numbers, as one array."""
    if isinstance(observations, torch.Tensor):
        return observations
    if "count" in observations:  # of AsTrees
        first, rest = observations["floats"]["0"], observations["floats"]["1"]["state"]
        return torch.cat([first, observations["count"].unsqueeze(-1).float(), rest], -1)
    return next(numbers(branch) for key, branch in observations.items() if key != "action_mask")


class Halve(ObservationConnector):
    def __init__(self, observation_space, action_space, times=1, offset=0.0):
        super().__init__(observation_space, action_space)
        self.factor, self.offset = 0.5**times, offset

    def __call__(self, observations):
        return observations * np.float32(self.factor)


class FirstNumber(ObservationConnector):
    def __init__(self, observation_space, action_space):
        if observation_space.shape != (2,):
            raise ValueError(f"observations must be two numbers, not {observation_space}")
        super().__init__(spaces.Box(-1, 1, (1,), np.float32), action_space)

    def __call__(self, observations):
        return observations[:, :1]


class TakesAll(ObservationConnector):
    def __init__(self, observation_space, action_space, **options):
        super().__init__(observation_space, action_space)
        self.options = options

    def __call__(self, observations):
        return observations


class ForgotItsSpaces(ObservationConnector):
    def __init__(self, observation_space, action_space):
        pass

    def __call__(self, observations):
        return observations


class Twice(ActionConnector):
    """The policy may choose half of what the environment allows."""

    def __init__(self, observation_space, action_space):
        half = spaces.Box(action_space.low / 2, action_space.high / 2)
        super().__init__(observation_space, half)

    def __call__(self, actions):
        return actions * 2


class PlusOne(ActionConnector):
    """The environment gets one more than the policy chose."""

    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, spaces.Box(action_space.low - 1, action_space.high - 1))

    def __call__(self, actions):
        return actions + 1


class Negate(LearnerConnector):
    def __call__(self, columns):
        return columns | {"rewards": -columns["rewards"]}


def function(observation_space, action_space):
    return Halve(observation_space, action_space)


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
    """Independent torch distributions for our outputs [..., D], and converted actions."""
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
