"""Members of a population do what a lone learner does, whatever the algorithm."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from support.algorithms import action_space_of, needs_memory
from support.populations import (
    TWO,
    VECTOR,
    MakeBatch,
    Small,
    assert_close,
    in_float64,
    make_core,
)
from torch import Tensor, nn

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core.population import Population
from juggler.learner.data.collate import collate
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.deterministic_actor_critic import DeterministicActorCritic
from juggler.runtime.modules.implicit_actor_critic import ImplicitActorCritic
from juggler.runtime.modules.soft_actor_critic import SoftActorCritic


class Doubled(nn.Module):
    """An encoder in float64."""

    size = 8

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, observations: Tensor) -> Tensor:
        hidden: Tensor = self.layer(observations.to(self.layer.weight.dtype)).tanh()  # [B, 8]
        return hidden


class SmallSac(SoftActorCritic):
    """A policy and two networks of values for SAC, in the dtype asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(VECTOR, TWO, {"encoder": lambda *_: Doubled()})
        self.to(dtype)


class SmallIql(ImplicitActorCritic):
    """A policy, values and critics for IQL, in the dtype asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(VECTOR, TWO, {"encoder": lambda *_: Doubled()})
        self.to(dtype)


class Joint(Doubled):
    """The same for critics, which see an action of one number beside observations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 8)

    def forward(self, seen: Any) -> Tensor:
        return super().forward(torch.cat([seen["observations"], seen["actions"]], -1))  # [B, 8]


class SmallTd3(DeterministicActorCritic):
    """A policy and two networks of values for TD3, in the dtype asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(VECTOR, action_space_of("td3"), {"hidden_sizes": [8]})
        self.encoder = Doubled()
        for critic in self.critics:
            critic.encoder = Joint()
        self.to(dtype)


class SmallQ(Small):
    """Explores as PQN and DQN want it."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.register_buffer("epsilon", torch.tensor(1.0))


#: Modules of algorithms that need one of their own.
SMALL: dict[str, Any] = {
    "dqn": SmallQ,
    "iql": SmallIql,
    "pqn": SmallQ,
    "sac": SmallSac,
    "td3": SmallTd3,
}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not needs_memory(name)])
def test_members_of_every_algorithm_do_what_it_does(make_batch: MakeBatch, name: str) -> None:
    package, _, attribute = ALGORITHMS[name].core.partition(":")
    kind = getattr(importlib.import_module(package), attribute)
    small = SMALL.get(name, Small)
    make = partial(small, dtype=torch.float64)
    core = kind(make, ALGORITHMS[name].config())
    population = Population(core, hyperparameters={"lr": [1e-3, 1e-2]})
    state = population.init(seed=5)
    states = [core.init(seed=5), core.init(seed=6)]
    cores = [kind(make, ALGORITHMS[name].config(lr=lr)) for lr in (1e-3, 1e-2)]
    for seed in range(3):
        sample = in_float64(make_batch, seed)
        state = population.step(state, sample).state
        states = [core.step(each, sample).state for core, each in zip(cores, states, strict=True)]
    for index, each in enumerate(states):
        assert_close(population.member(state, index), each)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bfloat16"},
        {"micro_batches": 2},
        {"grad_clip_by": "norm", "grad_clip": 0.1},
        {"optimizers": {"heads": {"parameters": ["heads.*"], "lr": 0.1}}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_members_keep_to_the_settings(make_batch: MakeBatch, settings: dict[str, Any]) -> None:
    core = make_core(**settings)
    population = Population(core, size=2)
    sample = collate([make_batch(4, 9)])
    after = population.step(population.init(seed=0), sample).state
    for index in range(2):
        alone = core.step(core.init(seed=index), sample).state
        assert_close(population.member(after, index), alone, 1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs one size above 0"),
        ({"size": 0}, "needs one size above 0"),
        ({"size": 3, "hyperparameters": {"lr": [1e-3]}}, "needs one size above 0: size = 3, and"),
        ({"hyperparameters": {"lr": [1.0], "entropy_coefficient": [0.1, 0.2]}}, r"\[1, 2\]"),
        ({"hyperparameters": {"entropy_coeff": [0.1]}}, "did you mean 'entropy_coefficient'"),
        ({"hyperparameters": {"grad_clip": [0.1]}}, "cannot differ in 'grad_clip'"),
    ],
)
def test_a_population_says_what_is_wrong_with_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Population(make_core(), **options)


def test_a_module_that_cannot_be_mapped_is_named() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x if self.seen.item() else -x

    with pytest.raises(ValueError, match=r"Small.* cannot .*buffers are \['body.1.seen'\]"):
        Population(make_core(partial(Small, Counting())), size=2)
    with pytest.raises(ValueError, match=r"Small.* cannot .* random"):
        Population(make_core(partial(Small, nn.Dropout())), size=2)
    recurrent = partial(build_module, None, VECTOR, TWO, {"recurrent": "lstm"})
    with pytest.raises(ValueError, match=r"ActorCritic.* has a state"):
        Population(make_core(recurrent), size=2)
