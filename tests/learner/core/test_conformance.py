"""Every core and learner passes `juggler.testing`, including users' own."""

from __future__ import annotations

import importlib
import math
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import TWO, VECTOR, MakeBatch
from support.small_cores import action_space_of, keeps_steps, needs_memory

from juggler.learner.algorithms.actor_critic import ActorCriticConfig
from juggler.learner.algorithms.intrinsic.rnd import Rnd
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.config import IntrinsicConfig, LearnerConfig
from juggler.learner.core.around_core import AroundCore, OwnNetwork
from juggler.learner.core.gradient_core import GradientCore, copied
from juggler.learner.core.learner_core import (
    ALONE,
    Aux,
    Columns,
    Grads,
    LearnerCore,
    Params,
    StepOutput,
)
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.population import Population
from juggler.learner.core.state_trees import arrays_like, tensors_like
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import MOST_REWARD
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree
from juggler.testing import (
    MakeCore,
    MakeLearner,
    assert_same,
    check_core,
    check_learner,
    sample_for,
)

#: As many steps of the optimizer as show that an update makes several of them: of PPO, and of PPO
#: and PQN within cores around them, beside which each is tried alone.
FEW_PASSES, FEWER_PASSES = {"epochs": 2, "minibatches": 2}, {"epochs": 1, "minibatches": 2}
EXAMPLES = Path(__file__).parents[3] / "examples"


class Gaussian(LearnerCore[dict[str, Any]]):
    """A user's core: fits a mean with momentum, and in place."""

    name, trains_on, config = "gaussians", frozenset({"episodes", "batch"}), LearnerConfig()

    def init(self, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "mean": torch.randn(4, generator=generator),  # [4]
            "velocity": torch.zeros(4),  # [4]
        }

    def grads(self, state: dict[str, Any], sample: Columns) -> tuple[Grads, Aux]:
        live = sample["live"]  # [N, T]
        errors = (state["mean"] - sample["observations"])[live]  # [live, 4]
        return errors.mean(0), Aux(live.sum(), {"loss": 0.5 * errors.square().mean()})

    def apply(self, state: dict[str, Any], grads: Grads, aux: Aux) -> StepOutput[dict[str, Any]]:
        state["velocity"].mul_(0.9).add_(grads)
        # Not in place: the caller's parameters keep their values.
        state["mean"] = state["mean"] - 0.1 * state["velocity"]  # [4]
        return StepOutput(state, aux.metrics)

    def get_params(self, state: dict[str, Any]) -> Params:
        return {"mean": state["mean"]}

    def state_to_tree(self, state: dict[str, Any]) -> dict[str, Tree]:
        # Copies: the velocities themselves change in place.
        return arrays_like(tree_map(torch.clone, state))

    def state_from_tree(self, tree: Tree, like: dict[str, Any]) -> dict[str, Any]:
        return tensors_like(tree, like)


def make_shipped(name: str, model: dict[str, Any], **config: Any) -> GradientCore:
    package, _, attribute = ALGORITHMS[name].core.partition(":")
    module = ALGORITHMS[name].module
    model = {"hidden_sizes": [8], **model}
    make = partial(build_module, module, VECTOR, action_space_of(name), model)
    kind = getattr(importlib.import_module(package), attribute)
    if keeps_steps(name):
        # Few updates; a row of what needs a memory has several steps, so that fewer come to one.
        ratio = 4.0 if needs_memory(name) else 1.0
        config = {"replay_begin": 0, "replay_batch_size": 8, "replay_ratio": ratio, **config}
    elif name == "ppo":
        config = {**FEW_PASSES, **config}
    core: GradientCore = kind(make, ALGORITHMS[name].config(**config))
    return core


def make_inner(name: str, model: dict[str, Any], **config: Any) -> GradientCore:
    fewer = FEWER_PASSES if name in ("ppo", "pqn") else {}
    return make_shipped(name, model, **fewer, **config)


def make_population(name: str) -> Population:
    return Population(make_inner(name, {}), hyperparameters={"lr": [1e-3, 1e-2]})


def make_curious() -> LearnerCore[Any]:
    curious = runpy.run_path(str(EXAMPLES / "intrinsic_reward.py"))["Curious"]
    core: LearnerCore[Any] = curious(make_shipped("impala", {}), features=4, scale=0.5)
    return core


def make_rnd(name: str, model: dict[str, Any] | None = None) -> Rnd:
    own = IntrinsicConfig(model={"hidden_sizes": [8]}, features=4, predictor_share=0.5)
    config = {"n_step": 1} if name == "dqn" else {}
    return Rnd(make_inner(name, model or {}, **config), own)


GRU = {"recurrent": "gru", "recurrent_size": 8}
DUELING = {"dueling": True}
#: Each algorithm by itself. What is around a core depends on how it makes updates: in one step, in
#: several, from a replay, with a memory. Each pair of these and what is around them comes once.
CORES: dict[str, MakeCore] = {
    **{name: partial(make_shipped, name, {}) for name in ALGORITHMS if not needs_memory(name)},
    "bc with a memory": partial(make_shipped, "bc", GRU),
    "impala with a memory": partial(make_shipped, "impala", GRU),
    "pqn with a memory": partial(make_inner, "pqn", {**GRU, **DUELING}),
    "ppo with a memory": partial(make_inner, "ppo", GRU),
    "impala with rmsprop": partial(make_shipped, "impala", {}, optimizer="rmsprop"),
    "dqn with atoms": partial(make_shipped, "dqn", {"atoms": 11, **DUELING}, priority_exponent=0.6),
    "r2d2 with a memory": partial(make_shipped, "r2d2", {**GRU, **DUELING}),
    "population of ppo": partial(make_population, "ppo"),
    "population of td3": partial(make_population, "td3"),
    "population of dqn": lambda: Population(make_shipped("dqn", {"atoms": 11, **DUELING}), size=2),
    "impala with rnd": partial(make_rnd, "impala"),
    "ppo with a memory and rnd": partial(make_rnd, "ppo", GRU),
    "dqn with rnd": partial(make_rnd, "dqn"),
    "r2d2 with a memory and rnd": partial(make_rnd, "r2d2", GRU),
    "a core around another": make_curious,
    "a core of a user's own": Gaussian,
}


def make_learner(make: MakeCore, seed: int) -> Learner:
    return Learner(make(), seed=seed)


def make_external(seed: int) -> Learner:
    example = runpy.run_path(str(EXAMPLES / "external_optimizer.py"))
    make = partial(build_module, None, VECTOR, TWO, {"hidden_sizes": [8]})
    learner: Learner = example["MomentumLearner"](make, ActorCriticConfig(), seed=seed)
    return learner


#: A learner knows of its core only how that makes updates.
LEARNERS: dict[str, MakeLearner] = {
    **{
        name: partial(make_learner, CORES[name])
        for name in (
            "impala",
            "ppo",
            "dqn with atoms",
            "ppo with a memory",
            "r2d2 with a memory and rnd",
            "a core around another",
            "a core of a user's own",
        )
    },
    "a learner around another library": make_external,
}


def sample_of(make_batch: MakeBatch, seed: int = 0) -> Columns:
    """With the state that a module with a memory asks for."""
    generator = torch.Generator().manual_seed(seed)
    state = {"hidden": torch.randn(4, 8, generator=generator)}  # [N, 8]
    return {**collate([make_batch(4, 6, seed=seed)]), "states": {"module": state}}


@pytest.mark.parametrize("name", CORES)
def test_a_core_conforms(make_batch: MakeBatch, name: str) -> None:
    check_core(CORES[name], sample_of(make_batch))


@pytest.mark.parametrize("name", ["impala with rnd", "dqn with rnd", "a core around another"])
def test_a_core_around_another_shows_the_same_whether_it_learns_or_not(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    core, sample = CORES[name](), sample_of(make_batch)
    assert isinstance(core, AroundCore)
    state = core.init(0)
    shown = core.learned(state, sample, ALONE)[1]
    monkeypatch.setattr(OwnNetwork, "stepped", None)  # no network of its own is trained
    assert_same(core.shown(state, sample), shown, "shown")
    assert torch.equal(core.grads(state, sample)[0], core.inner.grads(state["inner"], shown)[0])


@pytest.mark.parametrize("name", [*sorted({*ALGORITHMS} & CORES.keys()), "r2d2 with a memory"])
def test_nothing_changes_without_a_live_step_or_a_finite_gradient(
    make_batch: MakeBatch, name: str
) -> None:
    core, sample = CORES[name](), sample_of(make_batch)
    state = core.step(core.init(0), sample).state
    silent = {**sample, "live": torch.zeros_like(sample["live"])}
    assert_same(core.step(copied(state), silent).state, state, "state")
    column = "observations" if name == "bc" else "rewards"
    bad = {**sample, column: torch.full_like(sample[column], math.nan)}
    output = core.step(copied(state), bad)
    assert_same(output.state, state, "state")
    assert output.metrics["skipped"] == 1.0
    good = core.step(copied(state), sample)
    assert good.metrics["skipped"] == 0.0


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_conforms(make_batch: MakeBatch, name: str) -> None:
    check_learner(LEARNERS[name], [sample_of(make_batch, seed) for seed in range(2)])


@pytest.mark.parametrize("name", ["ppo", "impala with a memory", "sac", "r2d2 with a memory"])
def test_the_largest_rewards_leave_losses_and_gradients_finite(
    make_batch: MakeBatch, name: str
) -> None:
    learner = make_learner(CORES[name], 0)
    for seed in range(2):
        sample = sample_of(make_batch, seed)
        rewards = torch.full_like(sample["rewards"], MOST_REWARD)  # [N, T]
        metrics = fetch_metrics(learner.step({**sample, "rewards": rewards}))
        assert all(map(math.isfinite, metrics.values()))
        assert not metrics.get("skipped")


REPLAYED = {"replay_begin": 1, "replay_batch_size": 8, "replay_ratio": 1.0}


@pytest.mark.parametrize(
    ("file", "name", "model", "config"),
    [
        ("own_algorithm.py", "MyAlgorithm", {"units": 8}, {}),
        (
            "own_dqn.py",
            "MunchausenDqn",
            {"hidden_sizes": [8], "dueling": True},
            {**REPLAYED, "priority_exponent": 0.6},
        ),
    ],
)
def test_an_algorithm_of_ones_own_conforms_on_what_its_module_samples(
    file: str, name: str, model: dict[str, Any], config: dict[str, Any]
) -> None:
    algorithm = runpy.run_path(str(EXAMPLES / file))[name]
    make_module = partial(algorithm.module, VECTOR, TWO, model)
    make = partial(algorithm.core, make_module, algorithm.config(**config))
    samples = [sample_for(make_module(), seed=seed) for seed in range(3)]
    check_core(make, samples[0])
    check_learner(lambda seed: Learner(make(), seed=seed), samples)


class Counting(Gaussian):
    def __init__(self) -> None:
        self.steps = 0

    def apply(self, state: dict[str, Any], grads: Grads, aux: Aux) -> StepOutput[dict[str, Any]]:
        self.steps += 1
        return super().apply(state, grads / self.steps, aux)


class Noisy(Gaussian):
    def grads(self, state: dict[str, Any], sample: Columns) -> tuple[Grads, Aux]:
        grads, aux = super().grads(state, sample)
        return grads + torch.randn(4), aux


class InPlace(Gaussian):
    def apply(self, state: dict[str, Any], grads: Grads, aux: Aux) -> StepOutput[dict[str, Any]]:
        mean = state["mean"]
        output = super().apply(state, grads, aux)
        output.state["mean"] = mean.copy_(output.state["mean"])
        return output


class Eager(Gaussian):
    def grads(self, state: dict[str, Any], sample: Columns) -> tuple[Grads, Aux]:
        found = super().grads(state, sample)
        state["velocity"].mul_(0.5)
        return found


class Forgetful(Gaussian):
    def state_from_tree(self, tree: Tree, like: dict[str, Any]) -> dict[str, Any]:
        return {**like, "mean": super().state_from_tree(tree, like)["mean"]}


class Rewarding(Gaussian):
    def grads(self, state: dict[str, Any], sample: Columns) -> tuple[Grads, Aux]:
        sample["rewards"].add_(1.0)
        return super().grads(state, sample)


class Verbose(Gaussian):
    def apply(self, state: dict[str, Any], grads: Grads, aux: Aux) -> StepOutput[dict[str, Any]]:
        output = super().apply(state, grads, aux)
        return output._replace(metrics={**output.metrics, "gradient": grads})


class Drawing(Gaussian):
    def grads(self, state: dict[str, Any], sample: Columns) -> tuple[Grads, Aux]:
        torch.rand(1)
        return super().grads(state, sample)


class Idle(Gaussian):
    def apply(self, state: dict[str, Any], grads: Grads, aux: Aux) -> StepOutput[dict[str, Any]]:
        return StepOutput(state, aux.metrics)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Counting, "the same state and sample give the same result: state/mean"),
        (Noisy, "the same state and sample give the same result: state/mean"),
        (InPlace, "returned parameters never change: parameters/mean"),
        (Eager, "the same state and sample|grads changes neither state nor sample: state"),
        (Forgetful, "a saved state continues with the same numbers: restored state/velocity"),
        (Rewarding, "grads changes neither state nor sample: sample/"),
        (Verbose, "metrics are finite 0-d tensors: 'gradient' has shape"),
        (Drawing, "nothing is remembered outside the state: a step drew from torch's random"),
        (Idle, "a step changes parameters: three steps changed no parameter"),
    ],
)
def test_a_core_that_does_not_conform_is_found_out(
    make_batch: MakeBatch, broken: MakeCore, rule: str
) -> None:
    with pytest.raises(AssertionError, match=f"core 'gaussians': {rule}"):
        check_core(broken, sample_of(make_batch))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Idle, "no step changed them"),
        (partial(make_shipped, "dqn", {}, replay_begin=1000), "nothing was learned from these 3"),
    ],
)
def test_a_learner_that_does_not_learn_is_told_why(
    make_batch: MakeBatch, make: MakeCore, told: str
) -> None:
    samples = [sample_of(make_batch, seed) for seed in range(3)]
    with pytest.raises(AssertionError, match=f"Learner: steps change parameters: {told}"):
        check_learner(partial(make_learner, make), samples)
