"""A population does what its members would do by themselves."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.own_algorithms import (
    RATES,
    TWO,
    VECTOR,
    MakeBatch,
    Small,
    assert_close,
    assert_equal,
    in_float64,
    make_core,
)
from support.small_cores import action_space_of, needs_memory
from torch import Tensor, nn

from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
from juggler.learner.core.learner_core import LearnerCore
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.population import Population, stacked
from juggler.learner.core.state_trees import StateMismatch
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.modules.models import (
    DeterministicActorCritic,
    ImplicitActorCritic,
    SoftActorCritic,
)
from juggler.runtime.modules.module_specs import build_module


@pytest.mark.parametrize(
    ("optimizer", "layer"), [("adam", partial(nn.BatchNorm1d, 8)), ("rmsprop", None)]
)
def test_sixteen_members_are_sixteen_runs(
    make_batch: MakeBatch, optimizer: str, layer: Callable[[], nn.Module] | None
) -> None:
    def make() -> Small:
        return Small(layer and layer(), torch.float64)

    entropies = np.linspace(0, 0.1, 16).tolist()
    population = Population(
        make_core(make, optimizer=optimizer),
        hyperparameters={"lr": RATES, "entropy_coefficient": entropies},
    )
    state = population.init(seed=3)
    runs = [
        make_core(make, optimizer=optimizer, lr=lr, entropy_coefficient=entropy)
        for lr, entropy in zip(RATES, entropies, strict=True)
    ]
    states = [run.init(seed=3 + index) for index, run in enumerate(runs)]
    for update in range(8):
        sample = in_float64(make_batch, seed=update % 7)
        output = population.step(state, sample)
        state = output.state
        alone = [run.step(each, sample) for run, each in zip(runs, states, strict=True)]
        states = [each.state for each in alone]
    for index, (run, each) in enumerate(zip(runs, alone, strict=True)):
        assert_close(population.member(state, index), each.state)
        # Some metrics are float32 with parameters of any dtype.
        own = {name: output.metrics[f"{name}[{index}]"] for name in each.metrics}
        assert_close(own, each.metrics, 1e-6)
        params = {name: x[index] for name, x in population.get_params(state).items()}
        assert_close(params, run.get_params(each.state))


def test_a_core_around_another_says_what_it_lacks_for_a_population() -> None:
    class Around(LearnerCore[Any]):
        def __init__(self, inner: Impala) -> None:
            self.inner, self.config, self.trains_on = inner, inner.config, inner.trains_on
            self.name = f"around {inner.name}"

        def init(self, seed: int) -> Any:
            return self.inner.init(seed)

    around: Any = Around(make_core())  # type: ignore[abstract]
    words = r"around impala \(Around\) cannot be in a population: it is not a GradientCore"
    for keys in ({"size": 2}, {"hyperparameters": {"lr": [1e-3, 1e-2]}}):
        with pytest.raises(ValueError, match=words):
            Population(around, **keys)


def test_members_may_learn_from_samples_of_their_own(make_batch: MakeBatch) -> None:
    core = make_core(partial(Small, dtype=torch.float64))
    population = Population(core, size=3, same_start=True, own_samples=True)
    # Many truncated episodes, none, and some.
    samples = [
        in_float64(make_batch, seed=index, ends=ends) for index, ends in enumerate([0.6, 0.0, 0.3])
    ]
    counts = [len(sample["final_rows"]) for sample in samples]
    assert counts[1] == 0 < counts[2] < counts[0]
    output = population.step(population.init(seed=0), stacked(samples))
    for index, sample in enumerate(samples):
        alone = core.step(core.init(seed=0), sample)
        assert_close(population.member(output.state, index), alone.state)
    parameters = output.state["parameters"]  # [3, P]
    assert len(parameters.unique(dim=0)) == 3
    for others in (samples[0], stacked(samples[:2])):
        with pytest.raises(ValueError, match=r"give juggler.stacked\(...\) of 3 samples"):
            population.step(population.init(seed=0), others)
    for differing in ([], [samples[0], {**samples[1], "rewards": samples[1]["rewards"][:2]}]):
        with pytest.raises(ValueError, match="must have the same number of rows and steps"):
            stacked(differing)


def test_a_member_whose_gradient_is_not_finite_is_skipped_alone(make_batch: MakeBatch) -> None:
    population = Population(make_core(), size=2, own_samples=True)
    good, bad = (make_batch(seed=seed, ends=0.0) for seed in range(2))
    bad.rewards[0, 0] = np.nan
    state = population.init(seed=0)
    sample = stacked([collate([batch]) for batch in (good, bad)])
    output = population.step(state, sample)
    skipped = [output.metrics[f"skipped[{index}]"] for index in range(2)]
    assert skipped == [0.0, 1.0]
    assert_equal(population.member(output.state, 1), population.member(state, 1))
    moved = output.state["parameters"] != state["parameters"]  # [2, P]
    assert moved.any(1).tolist() == [True, False]


def test_members_that_draw_from_one_replay_have_no_samples_of_their_own() -> None:
    core = build_learner({"algorithm": "dqn"}, None, VECTOR, TWO, {}).core
    with pytest.raises(ValueError, match="own_samples with dqn, whose source of data"):
        Population(core, size=2, own_samples=True)  # type: ignore[arg-type]


def test_a_learner_takes_a_population_for_any_other_core(make_batch: MakeBatch) -> None:
    def make(seed: int) -> Learner:
        return Learner(Population(make_core(), hyperparameters={"lr": RATES[:3]}), seed=seed)

    learner, restored = make(seed=0), make(seed=9)
    learner.update_from_episodes([make_batch(seed=1)])
    tree, extras = learner.save()
    # Earlier versions saved hyper-parameters, too.
    older: Any = {"default": {**tree["default"], "hyperparameters": {"lr": np.zeros(3)}}}  # type: ignore[dict-item]
    restored.restore(older, extras)
    found = fetch_metrics(learner.update_from_episodes([make_batch(seed=2)]))
    assert found == fetch_metrics(restored.update_from_episodes([make_batch(seed=2)]))
    assert [found[f"lr[{index}]"] for index in range(3)] == RATES[:3]
    assert_equal(learner.state, restored.state)
    assert all(len(array) == 3 for array in learner.get_weights().values())

    four = Learner(Population(make_core(), size=4))
    with pytest.raises(StateMismatch, match="the checkpoint has 3 members"):
        four.restore(*learner.save())


# A population's member does the same as a single learner, for every algorithm.


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
    """A policy and two value networks for SAC, in this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(VECTOR, TWO, {"encoder": lambda *_: Doubled()})
        self.to(dtype)


class SmallIql(ImplicitActorCritic):
    """A policy, values and critics for IQL, in the dtype asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(VECTOR, TWO, {"encoder": lambda *_: Doubled()})
        self.to(dtype)


class Joint(Doubled):
    """The same for critics, with an action beside observations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 8)

    def forward(self, seen: Any) -> Tensor:
        return super().forward(torch.cat([seen["observations"], seen["actions"]], -1))  # [B, 8]


class SmallTd3(DeterministicActorCritic):
    """A policy and two value networks for TD3, in this dtype."""

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
        ({"hyperparameters": {"burn_in": [1, 2]}}, "members of impala cannot differ in 'burn_in'"),
        ({"hyperparameters": {"gamma": [0.9, 1.1]}}, r"gamma = 1\.1: must be at least 0 and at"),
        ({"hyperparameters": {"lr": 0.01}}, "lr = 0.01: must be a list with a number for each"),
        ({"hyperparameters": {"lr": ["fast", 0.01]}}, "must be a list with a number for each"),
        ({"hyperparameters": {"lr": [[[0, 0.1]], 0.01]}}, "must be a list with a number for each"),
    ],
)
def test_a_population_says_what_is_wrong_with_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Population(make_core(), **options)


def test_a_key_that_the_config_sets_to_none_is_no_members_own() -> None:
    ppo = Ppo(Small, PpoConfig())
    with pytest.raises(ValueError, match="'value_clip', which is none in the"):
        Population(ppo, hyperparameters={"value_clip": [0.1, 0.2]})


def test_a_module_that_cannot_be_mapped_is_named(make_batch: MakeBatch) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x if self.seen.item() else -x

    for layer, said in ((Counting(), "buffers are"), (nn.Dropout(), "random")):
        population = Population(make_core(partial(Small, layer)), size=2)
        with pytest.raises(ValueError, match=rf"Small.* cannot .*{said}"):
            population.step(population.init(seed=0), collate([make_batch(4, 9)]))
    recurrent = partial(build_module, None, VECTOR, TWO, {"recurrent": "lstm"})
    with pytest.raises(ValueError, match=r"ActorCritic.* has a state"):
        Population(make_core(recurrent), size=2)
