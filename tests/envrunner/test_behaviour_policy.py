from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from support.scripted_environments import NativeScripted
from support.scripted_modules import LinearPolicy

from juggler.envrunner.behaviour_policy import BehaviourPolicy, require_log_probabilities
from juggler.envrunner.paced.gathered_policy import GatheredPolicy
from juggler.envrunner.process import numpy_in_one_thread
from juggler.envrunner.sampler import Sampler
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.connector import ActionConnector
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.numpy_pass import _Categorical
from juggler.runtime.modules.rl_module import RLModule

ROWS, STEPS = 5, 3
OBSERVATIONS = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE = gymnasium.spaces.Discrete(4, start=-1)
BOX = gymnasium.spaces.Box(-0.1, 0.2, (2,), np.float64)
UNBOUNDED = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
HALF = gymnasium.spaces.Box(
    np.array([-np.inf, -0.1], np.float32), np.array([0.1, np.inf], np.float32)
)


class Choosing(RLModule):
    """Returns actions, and the inputs of their distribution where told to."""

    def __init__(self, action_space: gymnasium.Space[Any], with_inputs: bool) -> None:
        super().__init__(OBSERVATIONS, action_space, {})
        self.with_inputs = with_inputs

    def _forward(self, batch):
        first = batch["observations"][:, 0]
        outputs = {"actions": (first.abs() * 10).long() % 3}
        if self.with_inputs:
            outputs["action_dist_inputs"] = torch.outer(first, torch.arange(4.0))
        return outputs


def observations() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 3, generator=generator) for _ in range(STEPS)]


def fragment(policy: BehaviourPolicy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the environment got [N, T, …], what was chosen [N, T, …], log-probabilities [N, T]."""
    policy.begin()
    sent = np.stack([policy.act(x.numpy(), t) for t, x in enumerate(observations())], 1)
    actions, logp, states = policy.finish()
    assert states == {}
    return sent, actions, logp


def policy_for(space: gymnasium.Space[Any], seed: int = 0) -> BehaviourPolicy:
    return BehaviourPolicy(LinearPolicy(OBSERVATIONS, space), ROWS, STEPS, seed)


@pytest.mark.parametrize("space", [BOX, HALF])
def test_actions_are_clipped_for_the_environment_and_kept_as_chosen_in_the_episode(space) -> None:
    sent, actions, logp = fragment(policy_for(space))
    assert all(space.contains(action) for action in sent.reshape(-1, 2))
    assert (actions != sent).any()
    np.testing.assert_array_equal(sent, np.clip(actions.astype(space.dtype), space.low, space.high))
    inputs = LinearPolicy(OBSERVATIONS, space)._forward(
        {"observations": torch.stack(observations(), 1)}
    )["action_dist_inputs"]
    mean, log_std = inputs.chunk(2, -1)
    expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(torch.tensor(actions))
    np.testing.assert_allclose(logp, expected.sum(-1), rtol=1e-4, atol=1e-5)


def test_an_action_space_without_bounds_clips_nothing() -> None:
    sent, actions, _ = fragment(policy_for(UNBOUNDED))
    np.testing.assert_array_equal(sent, actions)
    assert np.abs(actions).max() > 1


def test_discrete_actions_are_those_of_the_space() -> None:
    sent, actions, logp = fragment(policy_for(DISCRETE))
    np.testing.assert_array_equal(sent, actions)
    assert actions.dtype == np.int64
    assert set(actions.ravel()) <= {-1, 0, 1, 2}
    assert len(set(actions.ravel())) > 1
    assert (logp < 0).all()


def test_an_environment_that_writes_into_its_actions_does_not_change_the_episode() -> None:
    class Greedy(NativeScripted):
        def step(self, actions):
            results = super().step(actions)
            actions[...] = 77
            return results

    env = Greedy([((3, "terminated"),)] * ROWS, AutoresetMode.SAME_STEP)
    module = LinearPolicy(env.single_observation_space, env.single_action_space)
    batch = Sampler(env, BehaviourPolicy(module, ROWS, STEPS, 0), STEPS, 0).sample((0, 0)).batch
    assert batch.actions.max() < 3


def test_the_seed_decides_the_noise() -> None:
    policy = policy_for(UNBOUNDED, seed=3)
    first, second = fragment(policy)[1], fragment(policy)[1]
    assert (first != second).all()
    policy.seed(3)
    np.testing.assert_array_equal(fragment(policy)[1], first)
    assert (fragment(policy_for(UNBOUNDED, seed=4))[1] != first).all()


def test_actions_that_the_module_chose_are_used_as_they_are() -> None:
    expected = torch.stack([(x[:, 0].abs() * 10).long() % 3 for x in observations()], 1)
    for with_inputs in (True, False):
        policy = BehaviourPolicy(Choosing(DISCRETE, with_inputs), ROWS, STEPS, 0)
        sent, actions, logp = fragment(policy)
        np.testing.assert_array_equal(sent, expected)
        np.testing.assert_array_equal(actions, expected)
        logits = torch.einsum(
            "ntf,a->nta", torch.stack(observations(), 1)[..., :1], torch.arange(4.0)
        )
        categorical = torch.distributions.Categorical(logits=logits)
        given = categorical.log_prob(expected + 1) if with_inputs else torch.zeros(ROWS, STEPS)
        np.testing.assert_allclose(logp, given, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(
            policy.act_deterministically(observations()[0].numpy()), expected[:, 0]
        )


def test_to_act_deterministically_is_to_take_the_mode_clipped() -> None:
    x = observations()[0]
    inputs = LinearPolicy(OBSERVATIONS, BOX)._forward({"observations": x})["action_dist_inputs"]
    expected = np.clip(inputs.chunk(2, -1)[0].double().numpy(), BOX.low, BOX.high)
    np.testing.assert_array_equal(policy_for(BOX).act_deterministically(x.numpy()), expected)
    logits = LinearPolicy(OBSERVATIONS, DISCRETE)._forward({"observations": x})
    np.testing.assert_array_equal(
        policy_for(DISCRETE).act_deterministically(x.numpy()),
        logits["action_dist_inputs"].argmax(-1) - 1,
    )


class Halved(ActionConnector):
    def __call__(self, actions):
        return actions * np.float32(0.5)


def test_what_stands_between_module_and_environment_may_be_something_else() -> None:
    halved = ModuleToEnv([Halved(OBSERVATIONS, BOX)], BOX, BOX)
    policy = BehaviourPolicy(LinearPolicy(OBSERVATIONS, BOX), ROWS, STEPS, 0, module_to_env=halved)
    sent, actions, _ = fragment(policy)
    np.testing.assert_array_equal(sent, actions * np.float32(0.5))
    np.testing.assert_array_equal(actions, fragment(policy_for(BOX))[1])


def test_within_dicts_and_tuples_each_box_is_clipped_to_its_own_bounds() -> None:
    space = gymnasium.spaces.Dict(
        {"far": gymnasium.spaces.Tuple([UNBOUNDED, BOX]), "which": DISCRETE}
    )
    policy = policy_for(space)
    policy.begin()
    sent = [policy.act(x.numpy(), t) for t, x in enumerate(observations())]
    actions, logp, _ = policy.finish()
    assert logp.shape == (ROWS, STEPS)
    for t, values in enumerate(sent):
        assert isinstance(values["far"], tuple)
        np.testing.assert_array_equal(values["far"][0], actions["far"]["0"][:, t])
        chosen = actions["far"]["1"][:, t].astype(np.float64)
        np.testing.assert_array_equal(values["far"][1], np.clip(chosen, BOX.low, BOX.high))
        np.testing.assert_array_equal(values["which"], actions["which"][:, t])
        assert not np.shares_memory(values["which"], actions["which"])
    assert np.abs(actions["far"]["1"]).max() > 0.2


def test_a_module_that_returns_nothing_of_use_is_refused() -> None:
    class Mute(RLModule):
        def _forward(self, batch):
            return {"logits": batch["observations"]}

    with pytest.raises(ValueError, match=r"output of Mute.forward_exploration must .*'logits'"):
        BehaviourPolicy(Mute(OBSERVATIONS, DISCRETE, {}), ROWS, STEPS, 0)


@pytest.mark.parametrize("name", ["actions", "action_dist_inputs"])
def test_outputs_of_the_wrong_shape_are_refused(name) -> None:
    class Askew(RLModule):
        def _forward(self, batch):
            return {name: batch["observations"][:, :2]}

    with pytest.raises(ValueError, match=rf"'{name}' in the output of Askew.*\[5, 2\]"):
        BehaviourPolicy(Askew(OBSERVATIONS, DISCRETE, {}), ROWS, STEPS, 0)


def test_weights_are_taken_by_name_and_refused_when_they_are_another_modules() -> None:
    policy = BehaviourPolicy(build_module(None, OBSERVATIONS, DISCRETE, {}), ROWS, STEPS, 0)
    other = build_module(None, OBSERVATIONS, DISCRETE, {})
    weights = {name: tensor.numpy() for name, tensor in other.state_dict().items()}
    for array in weights.values():
        array.flags.writeable = False  # as they come from the wire
    policy.load(weights)
    first = fragment(policy)
    second = fragment(BehaviourPolicy(other, ROWS, STEPS, 0))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)

    name = next(iter(weights))
    with pytest.raises(ValueError, match=r"only one side has \['extra'\]"):
        policy.load(weights | {"extra": np.zeros(1)})
    with pytest.raises(ValueError, match=rf"'{name}' has shape \[1\]"):
        policy.load(weights | {name: np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="one array"):
        policy.load(np.zeros(3))


def test_the_module_acts_without_dropout() -> None:
    class Dropping(LinearPolicy):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.dropout = torch.nn.Dropout(0.5)

        def _forward(self, batch):
            return super()._forward({"observations": self.dropout(batch["observations"])})

    dropping = BehaviourPolicy(Dropping(OBSERVATIONS, UNBOUNDED), ROWS, STEPS, 0)
    np.testing.assert_array_equal(fragment(dropping)[1], fragment(policy_for(UNBOUNDED))[1])


def test_no_run_acts_with_a_module_that_does_not_say_how_probable_its_actions_are() -> None:
    """A learner would take each of them for a certain one."""
    words = r"Choosing returns 'actions' without 'action_dist_inputs' where it explores"
    silent, telling = (Choosing(DISCRETE, with_inputs) for with_inputs in (False, True))
    with pytest.raises(ValueError, match=words):
        require_log_probabilities(silent, BehaviourPolicy(silent, 1, 1, 0).knows_log_probabilities)
    require_log_probabilities(telling, BehaviourPolicy(telling, 1, 1, 0).knows_log_probabilities)
    connectors, module_to_env = build_runner_pipelines(
        ConnectorsConfig.parse({}), OBSERVATIONS, DISCRETE
    )
    with pytest.raises(ValueError, match=words):
        GatheredPolicy(silent, connectors, module_to_env, 0)
    GatheredPolicy(telling, connectors, module_to_env, 0)


def test_it_is_said_once_that_a_module_acts_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = BehaviourPolicy(ActorCritic(OBSERVATIONS, DISCRETE, {}), ROWS, STEPS, 0)
    assert policy.take_notes() == []
    monkeypatch.setattr(_Categorical, "sample", lambda self, inputs, noise: self.mode(-inputs))
    fragment(policy)
    (note,) = policy.take_notes()
    assert note.text.startswith("ActorCritic acts in torch")
    assert note.warning
    fragment(policy)
    assert policy.take_notes() == []


class LastSeen(RLModule):
    """Acts on how its observations changed, which it remembers as they are."""

    def get_initial_state(self):
        return {"last": torch.zeros(3)}

    def _forward(self, batch):
        x, last = batch["observations"], batch["states"]["last"]
        return {"action_dist_inputs": x - last[:, None], "states": {"last": x[:, 0]}}


def test_states_outlive_the_memory_of_observations() -> None:
    """Environments may write each observation to the same memory."""
    policy = BehaviourPolicy(LastSeen(OBSERVATIONS, gymnasium.spaces.Discrete(3), {}), 1, 1, 0)
    memory = np.zeros((1, 3), np.float32)
    for t in range(4):
        memory[:] = 0
        memory[0, t % 2] = 1
        assert policy.act_deterministically(memory, np.array([t == 0])) == [t % 2]


class Fixed(RLModule):
    """Returns parameters as they are."""

    def __init__(self, *given):
        super().__init__(*given)
        self.logits = torch.nn.Parameter(torch.zeros(3))

    def get_initial_state(self):
        return {"h": self.logits}

    def _forward(self, batch):
        rows = self.logits.expand(batch["observations"].shape[0], -1)
        return {"action_dist_inputs": rows[:, None], "states": {"h": rows}}


def test_what_a_module_returns_does_not_change_with_its_weights() -> None:
    arrays = ArrayModule(Fixed(OBSERVATIONS, gymnasium.spaces.Discrete(3), {}), 1)
    see, noise = np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32)
    before = arrays.explore(see, arrays.initial_states(1), noise)
    arrays.load({"logits": np.ones(3, np.float32)})
    assert not before.inputs.any()
    assert not before.states["h"].any()


def test_learned_initial_states_follow_shared_weights() -> None:
    module = Fixed(OBSERVATIONS, gymnasium.spaces.Discrete(3), {})
    arrays = ArrayModule(module, shared=True)
    assert not arrays.initial_states(1)["h"].any()
    module.logits.data.fill_(1)
    assert arrays.initial_states(1)["h"].all()


def test_numpy_has_one_thread_in_an_envrunner() -> None:
    mapped = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in mapped if "scipy_openblas64" in line}
    if not paths:
        pytest.skip("NumPy has another library here")
    (path,) = paths
    library = ctypes.CDLL(path)
    library.scipy_openblas_set_num_threads64_(2)
    numpy_in_one_thread()
    assert library.scipy_openblas_get_num_threads64_() == 1
