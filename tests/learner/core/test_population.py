"""A population does what its members would do by themselves."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.populations import (
    NUMBERS,
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
from torch import nn

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
from juggler.learner.core.learner_core import LearnerCore
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.core.population import Population, stacked
from juggler.learner.core.state import StateMismatch
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.learner.optim.optimizers import Adam, RMSProp, Step
from juggler.runtime.wire.structures import tree_map


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("layer", [None, partial(nn.BatchNorm1d, 8)], ids=["plain", "batch norm"])
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
        # Some metrics are float32 whatever the parameters are.
        own = {name: output.metrics[f"{name}[{index}]"] for name in each.metrics}
        assert_close(own, each.metrics, 1e-6)
        params = {name: x[index] for name, x in population.get_params(state).items()}
        assert_close(params, run.get_params(each.state))


@pytest.mark.parametrize(
    ("algorithm", "key"), [(name, key) for name, keys in NUMBERS.items() for key in keys]
)
def test_a_member_is_a_lone_learner_with_its_number(
    make_batch: MakeBatch, algorithm: str, key: str
) -> None:
    """In whatever the loss reads as a number; and the number matters."""
    values = NUMBERS[algorithm][key]
    package, _, attribute = ALGORITHMS[algorithm].core.partition(":")
    kind = getattr(importlib.import_module(package), attribute)
    base: dict[str, Any] = {"lr": 0.01}
    if algorithm == "ppo":
        base |= {"epochs": 2, "minibatches": 2}
    if key in ("value_clip", "target_kl", "kl_coefficient"):
        base |= {key: values[0]} | ({"target_kl": 0.01} if key == "kl_coefficient" else {})

    def core(**config: Any) -> Any:
        config_of = ALGORITHMS[algorithm].config(**{**base, **config})
        return kind(partial(Small, dtype=torch.float64), config_of)

    population = Population(core(), hyperparameters={key: values}, same_start=True)
    state = population.init(seed=3)
    runs = [core(**{key: value}) for value in values]
    states = [run.init(seed=3) for run in runs]
    for update in range(5):
        sample = in_float64(make_batch, seed=update)
        state = population.step(state, sample).state
        states = [run.step(each, sample).state for run, each in zip(runs, states, strict=True)]
    for index, each in enumerate(states):
        assert_close(population.member(state, index), each, 1e-7)
    parameters = [each["parameters"] for each in states]
    assert not torch.equal(parameters[0], parameters[2]), "the number makes a difference"


def test_what_members_cannot_have_is_said() -> None:
    core = make_core()
    for given, words in (
        ({"gama": [0.9, 1.0]}, "cannot differ in 'gama': did you mean 'gamma'"),
        ({"gamma": [0.9, 1.1]}, r"hyperparameters: gamma = 1\.1: must be at least 0 and at most 1"),
        ({"grad_clip": [1.0, 2.0]}, "members of impala cannot differ in 'grad_clip'"),
        ({"burn_in": [1, 2]}, "members of impala cannot differ in 'burn_in'"),
        ({"lr": 0.01}, "lr = 0.01: must be a list with a number for each member"),
        ({"lr": ["fast", 0.01]}, "must be a list with a number for each member"),
        ({"lr": [[[0, 0.1], [9, 0.0]], 0.01]}, "must be a list with a number for each member"),
    ):
        hyperparameters: Any = given
        with pytest.raises(ValueError, match=words):
            Population(core, hyperparameters=hyperparameters)
    ppo = Ppo(Small, PpoConfig())
    with pytest.raises(ValueError, match="'value_clip' is none in the config of ppo; set it there"):
        Population(ppo, hyperparameters={"value_clip": [0.1, 0.2]})


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
    parameters = output.state["members"]["parameters"]  # [3, P]
    assert len(parameters.unique(dim=0)) == 3


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
    moved = output.state["members"]["parameters"] != (state["members"]["parameters"])  # [2, P]
    assert moved.any(1).tolist() == [True, False]


def test_members_that_draw_from_one_replay_have_no_samples_of_their_own() -> None:
    core = build_learner({"algorithm": "dqn"}, None, VECTOR, TWO, {}).core
    with pytest.raises(ValueError, match="own_samples with dqn, whose source of data"):
        Population(core, size=2, own_samples=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_member_alone_takes_the_steps_of_torch_bit_for_bit(
    make_batch: MakeBatch, optimizer: str
) -> None:
    config = ImpalaConfig(optimizer=optimizer, grad_clip=None)
    population = Population(make_core(optimizer=optimizer, grad_clip=None), size=1)
    state = population.init(seed=0)
    reference = state["members"]["parameters"][0].clone().requires_grad_()  # [P]
    settings = {"lr": config.lr, "eps": config.optimizer_epsilon, "foreach": False}
    theirs: torch.optim.Optimizer
    if optimizer == "adam":
        theirs = torch.optim.Adam([reference], betas=config.adam_betas, **settings)
    else:
        theirs = torch.optim.RMSprop([reference], alpha=config.rmsprop_decay, **settings)
    for seed in range(50):
        grads, aux = population.grads(state, collate([make_batch(seed=seed % 5)]))
        assert grads.shape == (1, len(reference))
        reference.grad = grads[0].clone()
        theirs.step()
        state = population.apply(state, grads, aux).state
        assert torch.equal(state["members"]["parameters"][0], reference.detach())


def test_optimizers_in_a_population_of_one_are_those_of_one() -> None:
    for optimizer in (Adam(), RMSProp()):
        parameters, gradient = torch.randn(100), torch.randn(100)
        moments = optimizer.init(parameters)
        lr = torch.tensor(1e-3, dtype=torch.float64)

        def update(p: Any, g: Any, m: Any, lr: Any, optimizer: Any = optimizer) -> Any:
            return optimizer.update(p, g, m, Step(lr, torch.tensor(True), [100]))

        alone = update(parameters, gradient, moments, lr)
        several = tree_map(
            lambda x: x.unsqueeze(0), {"p": parameters, "g": gradient, "m": moments, "lr": lr}
        )
        mapped = torch.func.vmap(update)(*several.values())
        assert torch.equal(mapped[0][0], alone[0])
        assert_equal(tree_map(lambda x: x[0], mapped[1]), alone[1])


def test_a_learner_takes_a_population_for_any_other_core(make_batch: MakeBatch) -> None:
    def make(seed: int) -> Learner:
        return Learner(Population(make_core(), hyperparameters={"lr": RATES[:3]}), seed=seed)

    learner, restored = make(seed=0), make(seed=9)
    learner.update_from_episodes([make_batch(seed=1)])
    restored.restore(*learner.save())
    found = fetch_metrics(learner.update_from_episodes([make_batch(seed=2)]))
    assert found == fetch_metrics(restored.update_from_episodes([make_batch(seed=2)]))
    assert [found[f"lr[{index}]"] for index in range(3)] == RATES[:3]
    assert_equal(learner.state, restored.state)
    assert all(len(array) == 3 for array in learner.get_weights().values())

    four = Learner(Population(make_core(), size=4))
    with pytest.raises(StateMismatch, match="the checkpoint has 3 members; here there are 4"):
        four.restore(*learner.save())


def test_a_member_goes_on_by_itself(make_batch: MakeBatch) -> None:
    core = make_core()
    population = Population(core, size=2)
    state = population.init(seed=0)
    member = population.member(state, 1)
    assert_equal(member, core.init(seed=1))
    sample = collate([make_batch()])
    after = population.step(state, sample).state
    assert_close(core.step(member, sample).state, population.member(after, 1), 1e-5)
