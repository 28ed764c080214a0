"""Whether an algorithm of your own does what Juggler expects of it: checks for your tests.

    from juggler.testing import check_core, sample_for

    def test_my_core_conforms():
        make_module = partial(MyModule, observation_space, action_space, {})
        make_core = lambda: MyCore({"default": make_module}, MyConfig())
        check_core(make_core, {"default": sample_for(make_module())})

A check raises an AssertionError that names the rule that is broken, and says where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.sampler import Sampler
from juggler.learner.core.learner_core import Columns, LearnerCore, Sample
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.config import ConnectorsConfig
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

#: Makes a core, the same one every time; makes a learner from a seed.
MakeCore = Callable[[], LearnerCore[Any]]
MakeLearner = Callable[[int], Learner]


def check_core(make: MakeCore, sample: Sample) -> None:
    """Whether a core is a function of its state, as `LearnerCore` says.

    Args:
        make: makes the core, the same one every time.
        sample: what it can learn from. With more than one module it is also checked that modules
            without a part in a sample stay as they are.

    Raises:
        AssertionError: names the rule that is broken, and says where.
    """
    name = make().name
    for rule, check in _CORE_RULES.items():
        if len(sample) > 1 or check is not _others_stay:
            _checked(f"core {name!r}: {rule}", partial(check, make, sample))


def check_learner(make: MakeLearner, samples: Sequence[Sample]) -> None:
    """Whether a learner repeats itself from the same seed, and goes on from what it saved.

    Args:
        make: makes the learner from a seed.
        samples: for its `step`; two or more.

    Raises:
        AssertionError: names the rule that is broken, and says where.
    """
    for rule, check in _LEARNER_RULES.items():
        _checked(f"{type(make(0)).__name__}: {rule}", partial(check, make, samples))


def sample_for(module: RLModule, rows: int = 4, steps: int = 8, seed: int = 0) -> Columns:
    """One module's part of a sample, which it sampled in an environment that shows anything of the
    module's observation space, with episodes of 2 to 12 steps.

    Args:
        module: acts.
        rows: N
        steps: T
        seed: of what is shown and done.
    """
    observations, actions = module.observation_space, module.action_space
    config = EnvRunnerConfig(envs_per_runner=rows, fragment_steps=steps, vectorize="sync")
    env = make_vector_env(config, partial(AnythingEnv, observations, actions))
    env_to_module, module_to_env = build_runner_pipelines(ConnectorsConfig(), observations, actions)
    policy = BehaviourPolicy(module, rows, steps, seed, module_to_env)
    return collate([Sampler(env, policy, steps, seed, env_to_module).sample((0, 0)).batch])


class AnythingEnv(gymnasium.Env[Any, Any]):
    """Shows anything of a space. Where that has action masks, at least one action is legal, and
    illegal ones are an error."""

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
    """Two trees of tensors or arrays are equal bit for bit, NaNs included.

    Raises:
        AssertionError: says where they differ.
    """
    if isinstance(one, Mapping):
        _must(one.keys() == other.keys(), f"{where}: {sorted(one)} and {sorted(other)}")
        for key, branch in one.items():
            assert_same(branch, other[key], f"{where}/{key}")
        return
    _must(one.dtype == other.dtype, f"{where}: dtypes are {one.dtype} and {other.dtype}")
    try:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    except AssertionError as error:
        raise AssertionError(f"{where}: {str(error).strip()}") from None


def differ(one: Any, other: Any) -> bool:
    """Whether two trees are not the same."""
    try:
        assert_same(one, other)
    except AssertionError:
        return True
    return False


def copied(tree: Any) -> Any:
    """A tree of tensors or arrays with memory of its own."""
    if isinstance(tree, Mapping):
        return {key: copied(branch) for key, branch in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else np.array(tree)


def _checked(where: str, check: Callable[[], None]) -> None:
    try:
        check()
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error


def _must(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


def _after(core: LearnerCore[Any], state: Any, sample: Sample, steps: int = 3) -> Any:
    """The state that some updates lead to, from a copy of one."""
    state = copied(state)
    for _ in range(steps):
        state = core.step(state, sample).state
    return state


# -- cores -----------------------------------------------------------------------------------------


def _same_from_seed(make: MakeCore, sample: Sample) -> None:
    core = make()
    first = core.init(3)
    assert_same(first, core.init(3), "init(3), twice")
    assert_same(first, make().init(3), "init(3) of two cores")
    other = core.get_params(core.init(4))
    _must(differ(core.get_params(first), other), "init(3) and init(4) draw the same parameters")


def _learns(make: MakeCore, sample: Sample) -> None:
    core = make()
    state = core.init(0)
    after = core.get_params(_after(core, state, sample))
    _must(differ(core.get_params(state), after), "three steps left all parameters as they were")


def _repeats(make: MakeCore, sample: Sample) -> None:
    core = make()
    state = _after(core, core.init(0), sample, steps=2)
    one, other = (core.step(copied(state), sample) for _ in range(2))
    assert_same(one.state, other.state, "state")
    assert_same(one.metrics, other.metrics, "metrics")


def _remembers_nothing(make: MakeCore, sample: Sample) -> None:
    fresh, used = make(), make()
    state = fresh.init(0)
    _after(used, used.init(7), sample)
    expected = _after(fresh, state, sample)
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        before = torch.get_rng_state()
        assert_same(_after(used, state, sample), expected, "state, of a new core and a used one")
        same = torch.equal(before, torch.get_rng_state())
        _must(same, "a step drew from torch's random generator; keep a key in the state instead")


def _grads_changes_nothing(make: MakeCore, sample: Sample) -> None:
    core = make()
    state = _after(core, core.init(0), sample, steps=1)
    before, columns = copied(state), copied(sample)
    one = core.grads(state, sample)[0]
    assert_same(state, before, "state")
    assert_same(sample, columns, "sample")
    assert_same(one, core.grads(state, sample)[0], "gradients, found twice")


def _step_keeps_inputs(make: MakeCore, sample: Sample) -> None:
    core = make()
    columns = copied(sample)
    core.step(core.init(0), sample)
    assert_same(sample, columns, "sample")
    state = core.init(0)
    grads, aux = core.grads(state, sample)
    before = copied(grads)
    core.apply(state, grads, aux)
    assert_same(grads, before, "gradients")


def _params_stay(make: MakeCore, sample: Sample) -> None:
    core = make()
    state = core.init(0)
    params = core.get_params(state)
    before = copied(params)
    for _ in range(3):
        state = core.step(state, sample).state
    assert_same(params, before, "parameters")


def _goes_on_from_a_tree(make: MakeCore, sample: Sample) -> None:
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


def _metrics_are_numbers(make: MakeCore, sample: Sample) -> None:
    core = make()
    metrics = core.step(core.init(0), sample).metrics
    _must(bool(metrics), "there are none")
    for module_id, values in metrics.items():
        _must(bool(values), f"module {module_id!r} has none")
        for name, value in values.items():
            where = f"{name!r} of module {module_id!r}"
            _must(isinstance(value, Tensor), f"{where} is a {type(value).__name__}, not a tensor")
            _must(value.shape == (), f"{where} has shape {tuple(value.shape)}, not ()")
            _must(not value.requires_grad, f"{where} takes a gradient: detach it")
            _must(bool(value.isfinite()), f"{where} is {value}")


def _others_stay(make: MakeCore, sample: Sample) -> None:
    core = make()
    module_id = next(iter(sample))
    state = _after(core, core.init(0), sample, steps=1)
    before = copied(core.get_params(state))
    output = core.step(state, {module_id: sample[module_id]})
    params = core.get_params(output.state)
    trained = output.metrics.keys()
    _must(trained < params.keys(), f"metrics are of {sorted(trained)}, not of {module_id!r} alone")
    for each in params:
        changed = differ(params[each], before[each])
        _must(changed == (each in trained), f"{each!r} {'changed' if changed else 'stayed'}")


_CORE_RULES: dict[str, Callable[[MakeCore, Sample], None]] = {
    "a seed gives the same state every time": _same_from_seed,
    "a step changes parameters": _learns,
    "the same state and sample give the same result": _repeats,
    "nothing is remembered outside the state": _remembers_nothing,
    "grads changes neither state nor sample": _grads_changes_nothing,
    "step and apply leave sample and gradients as they are": _step_keeps_inputs,
    "parameters that were given out stay as they were": _params_stay,
    "a saved state goes on with the same numbers": _goes_on_from_a_tree,
    "metrics are finite 0-d tensors": _metrics_are_numbers,
    "modules without a part in the sample stay as they are": _others_stay,
}


# -- learners --------------------------------------------------------------------------------------


def _stepped(learner: Learner, samples: Sequence[Sample]) -> list[Any]:
    return [fetch_metrics(learner.step(sample)) for sample in samples]


def _agree(one: Learner, other: Learner, samples: Sequence[Sample]) -> None:
    same = _stepped(one, samples) == _stepped(other, samples)
    _must(same, "metrics differ")
    assert_same(one.get_weights(), other.get_weights(), "weights")


def _learners_repeat(make: MakeLearner, samples: Sequence[Sample]) -> None:
    one = make(0)
    _agree(one, make(0), samples)
    _must(one.updates == len(samples), f"{len(samples)} steps are counted as {one.updates}")
    other = make(1).get_weights()
    _must(differ(one.get_weights(), other), "seeds 0 and 1 give the same weights")


def _sources_are_samples(make: MakeLearner, samples: Sequence[Sample]) -> None:
    given, sourced = make(0), make(0)
    sourced.source = iter(samples)
    for sample in samples:
        same = fetch_metrics(given.step(sample)) == fetch_metrics(sourced.step())
        _must(same, "metrics differ between step(sample) and step() with a source")
    assert_same(given.get_weights(), sourced.get_weights(), "weights")
    for learner, error in ((sourced, StopIteration), (given, ValueError)):
        try:
            learner.step()
        except error:
            continue
        raise AssertionError(f"step() without a sample must raise {error.__name__}")


def _weights_stay(make: MakeLearner, samples: Sequence[Sample]) -> None:
    learner = make(0)
    params, weights = learner.get_params(), learner.get_weights()
    before = copied(params), copied(weights)
    _stepped(learner, samples)
    assert_same(params, before[0], "get_params()")
    assert_same(weights, before[1], "get_weights()")
    _must(differ(learner.get_params(), params), "no step changed them")


def _learner_goes_on(make: MakeLearner, samples: Sequence[Sample]) -> None:
    learner, restored = make(0), make(9)
    _stepped(learner, samples)
    # What is kept for further use is not saved, and both are to begin without it.
    learner.forget()
    tree, extras = learner.save()
    before = copied(tree)
    restored.restore(tree, extras)
    _must(restored.updates == learner.updates, "updates are not restored")
    assert_same(restored.get_weights(), learner.get_weights(), "restored weights")
    _agree(restored, learner, samples)
    assert_same(tree, before, "what was saved")


_LEARNER_RULES: dict[str, Callable[[MakeLearner, Sequence[Sample]], None]] = {
    "learners of one seed agree": _learners_repeat,
    "a step on a sample is one on the next of a source": _sources_are_samples,
    "weights that were given out stay as they were": _weights_stay,
    "a restored learner goes on with the same numbers": _learner_goes_on,
}
