"""Environments as tensors on a device: their copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from support.scripted_environments import NativeScripted, Scripted, scripted_trees
from support.scripted_modules import LinearPolicy, Summing
from support.vectors import assert_recorded, seeds_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.device_sampler import DeviceSampler, why_on_host
from juggler.envrunner.environments.accepted_vector import AcceptedVector, tensors_on
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.evaluation import evaluate
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.contexts import FrameStack
from juggler.runtime.connectors.encoding import ClipActions, MeanStdFilter, OneHot
from juggler.runtime.connectors.learning import DiscountedReturns
from juggler.runtime.connectors.mergeable_state import Moments
from juggler.runtime.connectors.pipelines import EnvToModule, ModuleToEnv
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.rl_module import RLModule

DEVICE = torch.device("privateuseone:0")

if not hasattr(torch, "privateuseone"):
    _setup_privateuseone_for_python_backend()


class OnFakeDevice(Tensor):
    """A tensor on the device. Only copies reach its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnFakeDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"OnFakeDevice({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} outside of FakeDevice")


class FakeDevice(TorchDispatchMode):
    """Within it, tensors can be copied to DEVICE and back.

    As on a GPU, an operation with tensors of two devices is an error, unless one has no dimensions.

    Attributes:
        to_host: how often something was copied to the host, or asked for there.
        to_device: how often something was copied to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_host = self.to_device = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        there = [each for each in tensors if isinstance(each, OnFakeDevice)]
        aten = torch.ops.aten
        packet = function.overloadpacket
        goes = kwargs.pop("device", None) if "device" in kwargs else None
        target = None if goes is None else torch.device(goes).type
        inner = tree_map(_inner, args), tree_map(_inner, kwargs)
        if packet is aten.copy_:
            into, source = args[:2]
            self._count(isinstance(into, OnFakeDevice), isinstance(source, OnFakeDevice))
            _inner(into).copy_(_inner(source))
            return into
        if packet in (aten._local_scalar_dense, aten.item, aten.nonzero, aten.equal):
            self.to_host += bool(there)
        result = function(*inner[0], **inner[1])
        if packet is aten._to_copy:
            lands = bool(there) if target is None else target == DEVICE.type
            self._count(lands, bool(there))
            return OnFakeDevice(result) if lands else result
        if target == DEVICE.type:
            return OnFakeDevice(result)
        if not there:
            return result
        odd = [each for each in tensors if not isinstance(each, OnFakeDevice) and each.ndim]
        assert not odd, f"{function}: tensors are on two devices"
        if function._schema.is_mutable:
            return args[0]
        return tree_map(
            lambda each: OnFakeDevice(each) if isinstance(each, Tensor) else each, result
        )

    def _count(self, lands: bool, comes: bool) -> None:
        self.to_host += comes and not lands
        self.to_device += lands and not comes


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnFakeDevice) else value


def on_cpu(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy())


def on_fake_device(array: np.ndarray) -> Tensor:
    """As an environment on the device computes it, where nothing is copied."""
    return OnFakeDevice(torch.from_numpy(array.copy()))


class TensorVector(VectorWrapper):
    """The same environments in tensors, which take no arrays.

    Args:
        env: a vector in arrays.
        tensor: makes a tensor of an array.
        infos: numbers [N] of each step, beside those of `env`.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        tensor: Callable[[np.ndarray], Tensor] = on_cpu,
        infos: Callable[[], dict[str, np.ndarray]] = dict,
    ) -> None:
        super().__init__(env)
        self._tensor, self._infos = tensor, infos

    def reset(self, *, seed=None, options=None):
        if options:
            options = {"reset_mask": inner(options["reset_mask"]).numpy()}
        return self._tensors(self.env.reset(seed=seed, options=options))

    def step(self, actions):
        results = self.env.step(self._arrays(actions))
        *given, infos = results
        return self._tensors((*given, {**infos, **self._infos()}))

    def _arrays(self, actions):
        if isinstance(actions, dict):
            return {key: self._arrays(each) for key, each in actions.items()}
        if isinstance(actions, tuple):
            return tuple(map(self._arrays, actions))
        assert isinstance(actions, Tensor), "an array for environments on a device"
        return inner(actions).numpy()

    def _tensors(self, value):
        if isinstance(value, dict):
            return {key: self._tensors(each) for key, each in value.items()}
        if isinstance(value, tuple):
            return tuple(map(self._tensors, value))
        if isinstance(value, np.ndarray) and value.dtype != object:
            return self._tensor(value)
        return value


def inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, OnFakeDevice) else tensor


STEPS = 4
# Over 12 fragments of 4 steps, every kind of end falls on the first, a middle and the last step.
SCRIPTS = [
    ((4, "truncated"), (4, "terminated"), (4, "both")),
    ((5, "truncated"), (3, "terminated"), (1, "both"), (1, "truncated"), (1, "terminated")),
    ((30, "truncated"),),
]
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as device:
        yield device


def policy_parts(env, make_module=LinearPolicy):
    spaces = env.single_observation_space, env.single_action_space
    return make_module(*spaces), ModuleToEnv([ClipActions(*spaces)], spaces[1], spaces[1])


def on_device(env, steps: int = STEPS, make_module=LinearPolicy, connectors=None) -> DeviceSampler:
    module, to_env = policy_parts(env, make_module)
    policy = Actor(module, env.num_envs, steps, 0, to_env, connectors, device=DEVICE)
    return DeviceSampler(env, policy, steps, 5)


def on_host(env, steps: int = STEPS, make_module=LinearPolicy, connectors=None) -> Sampler:
    module, to_env = policy_parts(env, make_module)
    policy = Actor(module, env.num_envs, steps, 0, to_env, connectors)
    return Sampler(env, policy, steps, 5)


def vector(mode: AutoresetMode, box: bool = False, tensor=on_fake_device, **own) -> AcceptedVector:
    return AcceptedVector(TensorVector(NativeScripted(SCRIPTS, mode, box), tensor, **own), "it")


def assert_equal(batch: EpisodeBatch, other: EpisodeBatch) -> None:
    ours, theirs = batch.to_tree(), other.to_tree()
    _assert_equal(ours, theirs)


def _assert_equal(ours, theirs) -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            _assert_equal(ours[key], theirs[key])
    else:
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("make_module", [LinearPolicy, Summing])
@pytest.mark.parametrize("mode", MODES)
def test_batches_are_those_of_the_same_environments_in_arrays(device, mode, make_module) -> None:
    ours = on_device(vector(mode), make_module=make_module)
    theirs = on_host(NativeScripted(SCRIPTS, mode), make_module=make_module)
    for update in range(9):
        a, b = ours.sample((0, update)), theirs.sample((0, update))
        np.testing.assert_allclose(a.batch.action_logp, b.batch.action_logp, rtol=1e-5)
        a.batch.action_logp[:] = b.batch.action_logp
        assert_equal(a.batch, b.batch)
        assert a.episode_returns == b.episode_returns


def test_trees_of_observations_and_actions_stay_on_the_device(device) -> None:
    def vector_of(tensor=None):
        functions = [partial(scripted_trees, script) for script in SCRIPTS]
        env = SyncVectorEnv(functions, autoreset_mode=AutoresetMode.NEXT_STEP)
        return AcceptedVector(env if tensor is None else TensorVector(env, tensor), "it")

    a, b = on_device(vector_of(on_fake_device)), on_host(vector_of())
    for update in range(5):
        assert_equal(a.sample((0, update)).batch, b.sample((0, update)).batch)


@pytest.mark.parametrize("mode", MODES)
def test_columns_are_copied_once_in_a_fragment_however_many_steps_it_has(device, mode) -> None:
    def copies(steps: int) -> list[tuple[int, int]]:
        script = [((1000, "terminated"),)] * 3
        env = AcceptedVector(TensorVector(NativeScripted(script, mode), on_fake_device), "it")
        sampler = on_device(env, steps)
        counts = []
        for _ in range(3):
            before = device.to_host, device.to_device
            sampler.sample((0, 0))
            counts.append((device.to_host - before[0], device.to_device - before[1]))
        return counts

    assert copies(4) == copies(64)


def test_numbers_in_infos_are_summed_up_over_episodes(device) -> None:
    ticks = iter(range(1000))

    def numbers() -> dict[str, np.ndarray]:
        return {"tick": np.full(len(SCRIPTS), next(ticks), np.float32), "other": np.zeros((3, 2))}

    sampler = on_device(vector(AutoresetMode.NEXT_STEP, infos=numbers))
    fragments = [sampler.sample((0, 0)) for _ in range(2)]
    # Row 0 ends after 4 steps, row 1 after 5; row 2 goes on.
    first, second = [dict(each.infos)["tick"] for each in fragments]
    assert [tuple(each) for each in first] == [(1.5, 0, 3)]
    assert (2.0, 0, 4) in [tuple(each) for each in second]


def test_new_weights_act_from_the_next_fragment_on(device) -> None:
    sampler = on_device(vector(AutoresetMode.NEXT_STEP))
    policy = sampler._policy
    weights = {"weight": policy.weights()["weight"].copy()}
    assert sampler.sample((0, 0)).batch.action_logp.std() > 0.01
    policy.load({"weight": np.zeros_like(weights["weight"])})
    logp = sampler.sample((0, 1)).batch.action_logp
    np.testing.assert_allclose(logp, np.log(1 / 3), rtol=1e-6)
    policy.load(weights)
    assert sampler.sample((0, 2)).batch.action_logp.std() > 0.01


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("tensor", [on_fake_device, on_cpu])
def test_whoever_acts_with_arrays_gets_arrays(device, mode, tensor) -> None:
    sampler = on_host(vector(mode, tensor=tensor))
    fragments = [sampler.sample((3, f)) for f in range(12)]
    assert_recorded(fragments, SCRIPTS, seeds_of("native", 5, len(SCRIPTS)))


def test_evaluations_are_those_of_the_same_environments_in_arrays(device) -> None:
    results = []
    for env in (vector(MODES[0]), NativeScripted(SCRIPTS, MODES[0])):
        module, to_env = policy_parts(env)
        policy = Actor(module, env.num_envs, STEPS, 0, to_env)
        results.append(evaluate(env, policy, 7, 3))
    assert results[0] == results[1]


def filters(env) -> EnvToModule:
    made = MeanStdFilter(*_spaces(env))
    return EnvToModule({"filter": made}, {}, env.single_observation_space)


def _spaces(env):
    return env.single_observation_space, env.single_action_space


@pytest.mark.parametrize("mode", MODES)
def test_observations_are_filtered_on_the_device_and_learned_from_on_the_host(device, mode) -> None:
    ours, theirs = vector(mode), NativeScripted(SCRIPTS, mode)
    a = on_device(ours, connectors=filters(ours))
    b = on_host(theirs, connectors=filters(theirs))
    for update in range(4):
        mine, other = a.sample((0, update)), b.sample((0, update))
        _assert_equal(mine.connector_delta, other.connector_delta)
        moments = Moments(np.array(100.0), np.array([1, 2, 0.1]), np.array([400.0, 900, 100]))
        state = {"filter": moments.to_tree()}
        np.testing.assert_allclose(mine.batch.observations, other.batch.observations, rtol=1e-6)
        finals = mine.batch.final_observations, other.batch.final_observations
        np.testing.assert_allclose(*finals, rtol=1e-6)
        a._connectors.set_state(state)
        b._connectors.set_state(state)
    assert abs(mine.batch.observations).max() <= 10


@pytest.mark.parametrize("mode", MODES)
def test_contexts_that_only_the_learner_sees_are_those_of_steps_in_arrays(device, mode) -> None:
    def contexts(env):
        made = DiscountedReturns(*_spaces(env), gamma=0.9)
        return EnvToModule({}, {"returns": made}, env.single_observation_space)

    ours, theirs = vector(mode), NativeScripted(SCRIPTS, mode)
    ours.reset()
    assert why_on_host(ours, contexts(ours), policy_parts(ours)[1], DEVICE) == ""
    a = on_device(vector(mode), connectors=contexts(ours))
    b = on_host(theirs, connectors=contexts(theirs))
    for update in range(6):
        mine, other = a.sample((0, update)).batch.states, b.sample((0, update)).batch.states
        _assert_equal(mine, other)
        assert mine["connectors"]["returns"].any() or not update


class Pairs(Scripted):
    """Shows its neighbour's number after the second environment's step."""

    def __init__(self, wrong: bool) -> None:
        super().__init__(((9, "terminated"),))
        self.observation_space, self.action_space = spaces.MultiDiscrete([3, 3]), spaces.Discrete(4)
        self.wrong = wrong

    def observation(self) -> np.ndarray:
        return np.array([3 if self.wrong and self.steps == 2 else 0, 1])


def test_choices_outside_their_space_are_found_after_connectors_of_the_device(device) -> None:
    env = SyncVectorEnv([lambda: Pairs(False), lambda: Pairs(True)])
    vector = AcceptedVector(TensorVector(env, on_fake_device), "it")
    connectors = EnvToModule({"one_hot": OneHot(*_spaces(vector))}, {}, _spaces(vector)[0])
    sampler = on_device(vector, make_module=Zeros, connectors=connectors)
    with pytest.raises(EnvironmentFailed, match=r"environment 1 .* step 2 .* holds 3, which"):
        sampler.sample((0, 0))


class Zeros(RLModule):
    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, action_space, {})

    def _forward(self, batch):
        seen = batch["observations"]
        return {"action_dist_inputs": seen.float().reshape(len(seen), -1)[:, :1].expand(-1, 4) * 0}


class FailsThere(OneHot):
    def __call__(self, observations):
        raise RuntimeError("tensors are on two devices\nand so on")


def test_what_keeps_steps_from_staying_on_the_device_is_told(device) -> None:
    env = vector(MODES[0])
    env.reset()
    assert tensors_on(env) == DEVICE
    space, to_env = env.single_observation_space, policy_parts(env)[1]
    assert why_on_host(env, filters(env), to_env, DEVICE) == ""
    disabled = vector(AutoresetMode.DISABLED)
    none = EnvToModule({}, {}, space)
    assert "let the environments reset themselves" in why_on_host(disabled, none, to_env, DEVICE)
    stack = EnvToModule({}, {"stack": FrameStack(*_spaces(env), 2)}, space)
    said = why_on_host(env, stack, to_env, DEVICE)
    assert said == "the connector FrameStack works on the host"
    odd = EnvToModule({"odd": FailsThere(spaces.Discrete(2), spaces.Discrete(2))}, {}, space)
    said = why_on_host(env, odd, to_env, DEVICE)
    assert said == "connectors fail there: RuntimeError: tensors are on two devices"
    assert why_on_host(RecordedLike(env), none, to_env, DEVICE) == "every step is recorded"
    assert tensors_on(RecordedLike(env)) == DEVICE
    assert tensors_on(NativeScripted(SCRIPTS, MODES[0])) is None


class WithMasks(NativeScripted):
    """Observations have a mask, in their infos or in themselves."""

    def __init__(self, observed: bool, num_envs: int = len(SCRIPTS)) -> None:
        super().__init__(SCRIPTS[:num_envs], MODES[0])
        self._observed = observed
        if observed:
            masks = spaces.MultiBinary(int(self.single_action_space.n))
            plain = self.single_observation_space
            self.single_observation_space = spaces.Dict(observation=plain, action_mask=masks)
            self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, **arguments):
        observations, infos = super().reset(**arguments)
        masks = np.ones((self.num_envs, self.single_action_space.n), np.int8)
        if self._observed:
            return {"observation": observations, "action_mask": masks}, infos
        return observations, {**infos, "action_mask": masks}


@pytest.mark.parametrize("observed", [False, True])
def test_action_masks_bring_each_step_to_the_host_and_that_is_told(device, observed) -> None:
    config = EnvRunnerConfig(env="masked", envs_per_runner=len(SCRIPTS))
    env = make_vector_env(config, lambda: TensorVector(WithMasks(observed), on_fake_device))
    assert tensors_on(env) == DEVICE
    none = EnvToModule({}, {}, env.single_observation_space)
    actions = env.single_action_space
    said = why_on_host(env, none, ModuleToEnv([], actions, actions), DEVICE)
    assert said == "action masks are checked on the host"


class RecordedLike(VectorWrapper):
    pass
