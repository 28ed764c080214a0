"""Modules that share parameters: trained as one, published and measured one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from support.shared_encoder import SHARED, TWO, VECTOR, Headed, make_multi
from support.states import copied
from torch import nn

from juggler.envrunner.sampler import Sampler
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.learner_core import Sample
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.acting import strip_to_acting
from juggler.runtime.modules.multi_rl_module import MultiRLModule
from juggler.runtime.modules.rl_module import RLModule

MakeBatch = Callable[..., EpisodeBatch]


def make_core(**config: Any) -> Impala:
    return Impala(make_multi, ImpalaConfig(**config))


def sample_for(make_batch: MakeBatch, *module_ids: str, seed: int = 0) -> Sample:
    return {
        module_id: collate([make_batch(4, 6, seed=seed + place)])
        for place, module_id in enumerate(module_ids)
    }


def own(tensors: Mapping[str, Any], *prefixes: str) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other))


def test_modules_have_their_own_names_for_what_they_share() -> None:
    core = make_core()
    state = core.init(seed=0)
    params = core.get_params(state)
    assert list(state) == [SHARED, "alone"]
    assert list(params) == ["left", "right", "alone"]
    module = make_multi()["right"]
    strip_to_acting(module)
    for module_id in ("left", "right"):
        assert params[module_id].keys() == module.state_dict().keys()
    assert equal(own(params["left"], "encoder"), own(params["right"], "encoder"))
    assert not equal(own(params["left"], "policy"), own(params["right"], "policy"))


def test_what_is_shared_takes_one_step_for_all_who_share_it(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    sample = sample_for(make_batch, "left", "right")
    together, _ = core.grads(state, sample)
    left, _ = core.grads(state, {"left": sample["left"]})
    right, _ = core.grads(state, {"right": sample["right"]})
    torch.testing.assert_close(together[SHARED], left[SHARED] + right[SHARED])

    output = core.step(copied(state), sample)
    assert output.metrics.keys() == {"left", "right"}
    assert (output.state[SHARED]["moments"]["updates"] == 1).all()
    assert output.state[SHARED]["steps"] == max(part["live"].sum() for part in sample.values())
    params = core.get_params(output.state)
    before = core.get_params(state)
    assert equal(own(params["left"], "encoder"), own(params["right"], "encoder"))
    for module_id in ("left", "right"):
        for name in ("encoder.0.weight", "encoder.1.running_mean", "policy.weight"):
            assert not equal(params[module_id][name], before[module_id][name])
    assert params["left"]["encoder.1.num_batches_tracked"] == 2
    assert equal(params["alone"], before["alone"])


def test_metrics_are_those_of_each_module(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    sample = sample_for(make_batch, "left", "right", "alone")
    together = fetch_metrics(core.step(copied(state), sample).metrics)
    for module_id in ("left", "alone"):
        by_itself = fetch_metrics(core.step(copied(state), {module_id: sample[module_id]}).metrics)
        of_the_unit = {"grad_norm"} if module_id == "left" else set()
        for name, value in by_itself[module_id].items():
            assert (together[module_id][name] == value) == (name not in of_the_unit)
    assert together["left"]["grad_norm"] == together["right"]["grad_norm"]


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_what_only_absent_modules_have_does_not_move(make_batch: MakeBatch, optimizer: str) -> None:
    core = make_core(optimizer=optimizer)
    state = core.init(seed=0)
    everyone = sample_for(make_batch, "left", "right")
    once = core.step(copied(state), everyone).state
    tree = core.state_to_tree(once)[SHARED]
    nothing = {"right": collate([make_batch(4, 6, ends=0.0, live=np.zeros((4, 6), bool))])}
    for absent in ({}, nothing):  # not in the sample, or in it without a live step
        after = core.step(copied(once), {"left": everyone["left"], **absent}).state
        moved = core.state_to_tree(after)[SHARED]
        for kind in (tree["parameters"], *tree["moments"].values()):
            assert own(kind, "right:").keys() == {
                f"right:{part}.{name}"
                for part in ("policy", "value")
                for name in ("weight", "bias")
            }
        for before, later in [
            (tree["parameters"], moved["parameters"]),
            *((tree["moments"][name], moved["moments"][name]) for name in tree["moments"]),
        ]:
            assert equal(own(before, "right:"), own(later, "right:"))
            for name in own(before, "left:"):
                assert not equal(before[name], later[name])


def test_an_absent_module_comes_back_with_an_optimizer_that_is_not_out_of_step(
    make_batch: MakeBatch,
) -> None:
    """Adam's first step is as long as the learning rate, however many came before it for others."""
    core = make_core(lr=1e-3, grad_clip=None, optimizer_epsilon=1e-12)
    state = core.init(seed=0)
    for seed in range(5):
        state = core.step(state, sample_for(make_batch, "left", seed=seed)).state
    before = core.get_params(state)["right"]["policy.weight"]
    after = core.step(copied(state), sample_for(make_batch, "right")).state
    step = core.get_params(after)["right"]["policy.weight"] - before
    torch.testing.assert_close(step.abs(), torch.full_like(step, 1e-3), rtol=1e-2, atol=0)


def test_a_gradient_that_is_not_finite_stops_all_who_share(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    bad = make_batch(4, 6)
    bad.rewards[0, 0] = np.nan
    sample = {**sample_for(make_batch, "left", "alone"), "right": collate([bad])}
    output = core.step(copied(state), sample)
    skipped = {key: float(values["skipped"]) for key, values in output.metrics.items()}
    assert skipped == {"left": 1.0, "right": 1.0, "alone": 0.0}
    tree, before = core.state_to_tree(output.state), core.state_to_tree(state)
    assert equal(tree[SHARED], before[SHARED])
    assert not equal(tree["alone"]["parameters"], before["alone"]["parameters"])


def test_a_restored_learner_goes_on_with_the_same_numbers(make_batch: MakeBatch) -> None:
    learner, restored = Learner(make_core(), seed=0), Learner(make_core(), seed=9)
    samples = [
        sample_for(make_batch, *module_ids, seed=seed)
        for seed, module_ids in enumerate([("left", "right"), ("right",), ("left", "alone")])
    ]
    for sample in samples:
        learner.step(sample)
    restored.restore(*learner.save())
    for sample in samples:
        assert fetch_metrics(learner.step(sample)) == fetch_metrics(restored.step(sample))
    assert equal(learner.get_weights(), restored.get_weights())


def test_a_multi_module_alone_trains_as_its_module_would(make_batch: MakeBatch) -> None:
    def make() -> RLModule:
        return Headed(VECTOR, TWO, nn.Linear(4, 16))

    core = Impala(lambda: MultiRLModule({"default": make()}), ImpalaConfig())
    plain = Impala({"default": make}, ImpalaConfig())
    sample = sample_for(make_batch, "default")
    state = core.init(seed=0)
    tree = plain.state_to_tree(plain.init(seed=1))
    state = core.state_from_tree(tree, like=state)
    output = core.step(copied(state), sample)
    expected = plain.step(plain.state_from_tree(tree, like=state), sample)
    assert equal(core.state_to_tree(output.state), plain.state_to_tree(expected.state))


class Guess(gymnasium.Env[Any, Any]):
    """Four steps an episode; each pays for the sign of the first number seen, or its opposite."""

    observation_space, action_space = VECTOR, TWO

    def __init__(self, opposite: bool) -> None:
        self._opposite = opposite

    def _look(self) -> np.ndarray:
        self._seen = self.np_random.standard_normal(4).astype(np.float32)
        return self._seen

    def reset(self, **arguments: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**arguments)
        self._steps = 0
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float((self._seen[0] > 0) == (bool(action) != self._opposite))
        self._steps += 1
        return self._look(), reward, self._steps == 4, False, {}


def test_two_agents_with_one_encoder_learn_in_one_run() -> None:
    learner = Learner(make_core(lr=1e-2, gamma=0.5), seed=0)
    modules = make_multi()
    policies, samplers = {}, {}
    for module_id in ("left", "right"):
        strip_to_acting(modules[module_id])
        policies[module_id] = Actor(modules[module_id], rows=8, steps=16, seed=1)
        env = SyncVectorEnv([lambda opposite=module_id == "right": Guess(opposite)] * 8)
        samplers[module_id] = Sampler(env, policies[module_id], steps=16, seed=1)
    rewards: list[dict[str, float]] = []
    for update in range(60):
        weights = learner.get_weights()
        episodes = {}
        for module_id, sampler in samplers.items():
            policies[module_id].load(weights[module_id])
            episodes[module_id] = [sampler.sample((1, update)).batch]
        rewards.append(
            {key: float(batch.rewards[batch.live].mean()) for key, (batch,) in episodes.items()}
        )
        learner.update_from_episodes(episodes)
    for module_id in ("left", "right"):
        assert np.mean([each[module_id] for each in rewards[:3]]) < 0.7
        assert np.mean([each[module_id] for each in rewards[-3:]]) > 0.9
    weights = learner.get_weights()
    assert equal(own(weights["left"], "encoder"), own(weights["right"], "encoder"))
