"""Checks for tests of your own algorithms.

    from juggler.testing import check_core, sample_for

    def test_my_core_conforms():
        make_module = partial(MyModule, observation_space, action_space, {})
        make_core = lambda: MyCore(make_module, MyConfig())
        check_core(make_core, sample_for(make_module()))

A check raises an AssertionError that names the broken rule, and the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.sampler import Sampler
from juggler.learner.core.learner_core import Columns, LearnerCore
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.modules.rl_module import RLModule

__all__ = [
    "AnythingEnv",
    "MakeCore",
    "MakeLearner",
    "assert_same",
    "check_core",
    "check_learner",
    "copied",
    "differ",
    "sample_for",
]


def sample_for(module: RLModule, rows: int = 4, steps: int = 8, seed: int = 0) -> Columns:
    """Sample random observations with a module, in episodes of 2-12 steps.

    Args:
        module: chooses the actions.
        rows: N
        steps: T
        seed: of observations and actions.
    """
    observations, actions = module.observation_space, module.action_space
    config = EnvRunnerConfig(envs_per_runner=rows, fragment_steps=steps, vectorize="sync")
    env = make_vector_env(config, partial(AnythingEnv, observations, actions))
    env_to_module, module_to_env = build_runner_pipelines(ConnectorsConfig(), observations, actions)
    policy = Actor(module, rows, steps, seed, module_to_env, env_to_module)
    return collate([Sampler(env, policy, steps, seed).sample((0, 0)).batch])


class AnythingEnv(gymnasium.Env[Any, Any]):
    """An environment of random observations of any space.

    If the space has action masks, at least one action is legal, and illegal ones are an error.
    """

    def __init__(self, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> None:
        self.observation_space, self.action_space = observations, actions

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._left = int(self.np_random.integers(2, 12))
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._legal is None or self._legal[action], f"{action} is an illegal action"
        self._left -= 1
        ends = self._left == 0
        reward = float(self.np_random.normal())
        by_truncation = bool(self.np_random.integers(2))
        return self._shown(), reward, ends and not by_truncation, ends and by_truncation, {}

    def _shown(self) -> Any:
        observation, self._legal = self.observation_space.sample(), None
        if isinstance(observation, dict) and ACTION_MASK in observation:
            self._legal = observation[ACTION_MASK]
            self._legal[int(self.np_random.integers(len(self._legal)))] = 1
        return observation


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Assert that trees are equal bit for bit, NaNs included.

    Raises:
        AssertionError: they differ; names the place.
    """
    if isinstance(one, Mapping):
        must(one.keys() == other.keys(), f"{where}: {sorted(one)} and {sorted(other)}")
        for key, branch in one.items():
            assert_same(branch, other[key], f"{where}/{key}")
        return
    must(one.dtype == other.dtype, f"{where}: dtypes are {one.dtype} and {other.dtype}")
    try:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    except AssertionError as error:
        raise AssertionError(f"{where}: {str(error).strip()}") from None


def differ(one: Any, other: Any) -> bool:
    """Return whether two trees differ."""
    try:
        assert_same(one, other)
    except AssertionError:
        return True
    return False


def copied(tree: Any) -> Any:
    """Copy a tree of tensors or arrays."""
    if isinstance(tree, Mapping):
        return {key: copied(branch) for key, branch in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else np.array(tree)


def _check_rules(name: str, rules: Mapping[str, Callable[..., None]], *given: Any) -> None:
    """Check rules; an AssertionError gets the place."""
    for rule, check in rules.items():
        try:
            check(*given)
        except AssertionError as error:
            raise AssertionError(f"{name}: {rule}: {error}") from error


def must(condition: bool, otherwise: str) -> None:
    """Raise an AssertionError with this text unless the condition holds."""
    if not condition:
        raise AssertionError(otherwise)


#: Makes a core, the same every time.
MakeCore = Callable[[], LearnerCore[Any]]


def check_core(make: MakeCore, sample: Columns) -> None:
    """Check that a core is a function of its state: see `LearnerCore`.

    Args:
        make: makes the core, the same every time.
        sample: data for a step.

    Raises:
        AssertionError: names the broken rule, and the place.
    """
    _check_rules(f"core {make().name!r}", _CORE_RULES, make, sample)


def _after(core: LearnerCore[Any], state: Any, sample: Columns, steps: int = 3) -> Any:
    """Return the state after some updates, starting from a copy."""
    state = copied(state)
    for _ in range(steps):
        state = core.step(state, sample).state
    return state


def _same_from_seed(make: MakeCore, sample: Columns) -> None:
    core = make()
    first = core.init(3)
    assert_same(first, core.init(3), "init(3), twice")
    assert_same(first, make().init(3), "init(3) of two cores")
    other = core.get_params(core.init(4))
    must(differ(core.get_params(first), other), "init(3) and init(4) draw the same parameters")


def _learns(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = core.init(0)
    after = core.get_params(_after(core, state, sample))
    must(differ(core.get_params(state), after), "three steps changed no parameter")


def _repeats(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = _after(core, core.init(0), sample, steps=2)
    one, other = (core.step(copied(state), sample) for _ in range(2))
    assert_same(one.state, other.state, "state")
    assert_same(one.metrics, other.metrics, "metrics")


def _remembers_nothing(make: MakeCore, sample: Columns) -> None:
    fresh, used = make(), make()
    state = fresh.init(0)
    _after(used, used.init(7), sample)
    expected = _after(fresh, state, sample)
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        before = torch.get_rng_state()
        assert_same(_after(used, state, sample), expected, "state, of a new core and a used one")
        same = torch.equal(before, torch.get_rng_state())
        must(same, "a step drew from torch's random generator; keep a key in the state instead")


def _grads_changes_nothing(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = _after(core, core.init(0), sample, steps=1)
    before, columns = copied(state), copied(sample)
    one = core.grads(state, sample)[0]
    assert_same(state, before, "state")
    assert_same(sample, columns, "sample")
    assert_same(one, core.grads(state, sample)[0], "gradients, found twice")


def _step_keeps_inputs(make: MakeCore, sample: Columns) -> None:
    core = make()
    columns = copied(sample)
    core.step(core.init(0), sample)
    assert_same(sample, columns, "sample")
    state = core.init(0)
    grads, aux = core.grads(state, sample)
    before = copied(grads)
    core.apply(state, grads, aux)
    assert_same(grads, before, "gradients")


def _params_stay(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = core.init(0)
    params = core.get_params(state)
    before = copied(params)
    for _ in range(3):
        state = core.step(state, sample).state
    assert_same(params, before, "parameters")


def _continues_from_a_tree(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = _after(core, core.init(0), sample, steps=2)
    tree = core.state_to_tree(state)
    before, other = copied(tree), make()
    restored = other.state_from_tree(tree, like=other.init(9))
    assert_same(restored, state, "restored state")
    expected = _after(core, state, sample)
    core.step(state, sample)  # consumes it
    assert_same(tree, before, "arrays, after a later step")
    assert_same(_after(other, restored, sample), expected, "state after three steps more")


def _metrics_are_numbers(make: MakeCore, sample: Columns) -> None:
    core = make()
    metrics = core.step(core.init(0), sample).metrics
    must(bool(metrics), "there are no metrics")
    for name, value in metrics.items():
        must(isinstance(value, Tensor), f"{name!r} is a {type(value).__name__}, not a tensor")
        must(value.shape == (), f"{name!r} has shape {tuple(value.shape)}, not ()")
        must(not value.requires_grad, f"{name!r} requires a gradient: detach it")
        must(bool(value.isfinite()), f"{name!r} is {value}")


_CORE_RULES: dict[str, Callable[[MakeCore, Columns], None]] = {
    "a seed gives the same state every time": _same_from_seed,
    "a step changes parameters": _learns,
    "the same state and sample give the same result": _repeats,
    "nothing is remembered outside the state": _remembers_nothing,
    "grads changes neither state nor sample": _grads_changes_nothing,
    "step and apply change neither sample nor gradients": _step_keeps_inputs,
    "returned parameters never change": _params_stay,
    "a saved state continues with the same numbers": _continues_from_a_tree,
    "metrics are finite 0-d tensors": _metrics_are_numbers,
}


#: Makes a learner from a seed.
MakeLearner = Callable[[int], Learner]


def check_learner(make: MakeLearner, samples: Sequence[Columns]) -> None:
    """Check that a learner is reproducible and continues from its state.

    Args:
        make: makes the learner from a seed.
        samples: for its `step`; two or more.

    Raises:
        AssertionError: names the broken rule, and the place.
    """
    _check_rules(type(make(0)).__name__, _LEARNER_RULES, make, samples)


def _stepped(learner: Learner, samples: Sequence[Columns]) -> list[Any]:
    return [fetch_metrics(learner.step(sample)) for sample in samples]


def _agree(one: Learner, other: Learner, samples: Sequence[Columns]) -> None:
    same = _stepped(one, samples) == _stepped(other, samples)
    must(same, "metrics differ")
    assert_same(one.get_weights(), other.get_weights(), "weights")


def _steps_learn(make: MakeLearner, samples: Sequence[Columns]) -> None:
    learner = make(0)
    before = copied(learner.get_params())
    found = any(_stepped(learner, samples))
    nothing_due = (
        f"nothing was learned from these {len(samples)} samples. A replay returns nothing before "
        "replay_begin steps, and then one sample per replay_batch_size / replay_ratio steps: "
        "lower these, or give more steps"
    )
    changed = differ(learner.get_params(), before)
    must(changed, "no step changed them" if found else nothing_due)


def _learners_repeat(make: MakeLearner, samples: Sequence[Columns]) -> None:
    one = make(0)
    _agree(one, make(0), samples)
    must(one.updates == len(samples), f"{len(samples)} steps are counted as {one.updates}")
    other = make(1).get_weights()
    must(differ(one.get_weights(), other), "seeds 0 and 1 give the same weights")


def _sources_are_samples(make: MakeLearner, samples: Sequence[Columns]) -> None:
    given, sourced = make(0), make(0)
    sourced.source = iter(samples)
    for sample in samples:
        same = fetch_metrics(given.step(sample)) == fetch_metrics(sourced.step())
        must(same, "metrics differ between step(sample) and step() with a source")
    assert_same(given.get_weights(), sourced.get_weights(), "weights")
    for learner, error in ((sourced, StopIteration), (given, ValueError)):
        try:
            learner.step()
        except error:
            continue
        raise AssertionError(f"step() without a sample must raise {error.__name__}")


def _weights_stay(make: MakeLearner, samples: Sequence[Columns]) -> None:
    learner = make(0)
    params, weights = learner.get_params(), learner.get_weights()
    before = copied(params), copied(weights)
    _stepped(learner, samples)
    assert_same(params, before[0], "get_params()")
    assert_same(weights, before[1], "get_weights()")


def _learner_continues(make: MakeLearner, samples: Sequence[Columns]) -> None:
    learner, restored = make(0), make(9)
    _stepped(learner, samples)
    # Buffers for later steps are not saved, so both have to start without them.
    learner.forget()
    tree, extras = learner.save()
    before = copied(tree)
    restored.restore(tree, extras)
    must(restored.updates == learner.updates, "updates are not restored")
    assert_same(restored.get_weights(), learner.get_weights(), "restored weights")
    _agree(restored, learner, samples)
    assert_same(tree, before, "what was saved")


_LEARNER_RULES: dict[str, Callable[[MakeLearner, Sequence[Columns]], None]] = {
    "steps change parameters": _steps_learn,
    "learners of one seed agree": _learners_repeat,
    "a step on a sample equals a step on the next one of a source": _sources_are_samples,
    "returned weights never change": _weights_stay,
    "a restored learner continues with the same numbers": _learner_continues,
}
