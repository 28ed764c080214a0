from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.scripted_modules import LinearPolicy

from juggler.envrunner.sampling_worker import numpy_in_one_thread
from juggler.runtime.acting.actor import Actor, RandomActions
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.numpy_pass import _Categorical
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import from_tree, tree_map

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


def fragment(policy: Actor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Environment's and module's actions [N, T, …], and log-probabilities [N, T]."""
    sent, actions, inputs = zip(*(policy.act(x.numpy()) for x in observations()), strict=True)
    assert policy.states_before() == {}
    chosen, logp = np.stack(actions, 1), np.zeros((ROWS, STEPS))
    if policy.knows_log_probabilities:
        logp = policy.log_probabilities(np.stack(inputs, 1), chosen)
    return np.stack(sent, 1), chosen, logp


def best(policy: Actor, seen: torch.Tensor) -> np.ndarray:
    return policy.act(seen.numpy(), explore=False).sent


def policy_for(space: gymnasium.Space[Any], seed: int = 0) -> Actor:
    return Actor(LinearPolicy(OBSERVATIONS, space), ROWS, STEPS, seed)


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


def test_actions_that_the_module_chose_are_used_as_they_are() -> None:
    expected = torch.stack([(x[:, 0].abs() * 10).long() % 3 for x in observations()], 1)
    for with_inputs in (True, False):
        policy = Actor(Choosing(DISCRETE, with_inputs), ROWS, STEPS, 0)
        sent, actions, logp = fragment(policy)
        np.testing.assert_array_equal(sent, expected)
        np.testing.assert_array_equal(actions, expected)
        logits = torch.einsum(
            "ntf,a->nta", torch.stack(observations(), 1)[..., :1], torch.arange(4.0)
        )
        categorical = torch.distributions.Categorical(logits=logits)
        given = categorical.log_prob(expected + 1) if with_inputs else torch.zeros(ROWS, STEPS)
        np.testing.assert_allclose(logp, given, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(best(policy, observations()[0]), expected[:, 0])


def test_to_act_deterministically_is_to_take_the_mode_clipped() -> None:
    x = observations()[0]
    inputs = LinearPolicy(OBSERVATIONS, BOX)._forward({"observations": x})["action_dist_inputs"]
    expected = np.clip(inputs.chunk(2, -1)[0].double().numpy(), BOX.low, BOX.high)
    np.testing.assert_array_equal(best(policy_for(BOX), x), expected)
    logits = LinearPolicy(OBSERVATIONS, DISCRETE)._forward({"observations": x})
    np.testing.assert_array_equal(
        best(policy_for(DISCRETE), x), logits["action_dist_inputs"].argmax(-1) - 1
    )


def test_weights_are_taken_by_name_and_refused_when_they_are_another_modules() -> None:
    policy = Actor(build_module(None, OBSERVATIONS, DISCRETE, {}), ROWS, STEPS, 0)
    other = build_module(None, OBSERVATIONS, DISCRETE, {})
    weights = {name: tensor.numpy() for name, tensor in other.state_dict().items()}
    for array in weights.values():
        array.flags.writeable = False  # as they come from the wire
    policy.load(weights)
    first = fragment(policy)
    second = fragment(Actor(other, ROWS, STEPS, 0))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)

    name = next(iter(weights))
    with pytest.raises(ValueError, match=r"of another module, with 'extra'$"):
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

    dropping = Actor(Dropping(OBSERVATIONS, UNBOUNDED), ROWS, STEPS, 0)
    np.testing.assert_array_equal(fragment(dropping)[1], fragment(policy_for(UNBOUNDED))[1])


def test_no_run_acts_with_a_module_that_does_not_say_how_probable_its_actions_are() -> None:
    """A learner would take each of them for a certain one."""
    words = r"Choosing returns 'actions' without 'action_dist_inputs' when it explores"
    silent, telling = (Choosing(DISCRETE, with_inputs) for with_inputs in (False, True))
    with pytest.raises(ValueError, match=words):
        Actor(silent).require_log_probabilities()
    for each in (telling, RandomActions(DISCRETE)):
        Actor(each).require_log_probabilities()


def test_a_module_that_returns_nothing_of_use_is_refused() -> None:
    class Mute(RLModule):
        def _forward(self, batch):
            return {"logits": batch["observations"]}

    with pytest.raises(ValueError, match=r"output of Mute.forward_exploration must .*'logits'"):
        Actor(Mute(OBSERVATIONS, DISCRETE, {}), ROWS, STEPS, 0)


@pytest.mark.parametrize("name", ["actions", "action_dist_inputs"])
def test_outputs_of_the_wrong_shape_are_refused(name) -> None:
    class Askew(RLModule):
        def _forward(self, batch):
            return {name: batch["observations"][:, :2]}

    with pytest.raises(ValueError, match=rf"'{name}' in the output of Askew.*\[5, 2\]"):
        Actor(Askew(OBSERVATIONS, DISCRETE, {}), ROWS, STEPS, 0)


def test_it_is_said_once_that_a_module_acts_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Actor(ActorCritic(OBSERVATIONS, DISCRETE, {}), ROWS, STEPS, 0)
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
    policy = Actor(LastSeen(OBSERVATIONS, gymnasium.spaces.Discrete(3), {}), 1, 1, 0)
    memory = np.zeros((1, 3), np.float32)
    for t in range(4):
        memory[:] = 0
        memory[0, t % 2] = 1
        assert policy.act(memory, first=np.array([t == 0]), explore=False).sent == [t % 2]


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


SPACES: list[spaces.Space[Any]] = [
    spaces.Discrete(3),
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.Box(-np.inf, np.inf, (1,), np.float32),
    spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (2,), np.float32)}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_action_is_one_of_the_space_and_repeats_with_the_seed(
    space: spaces.Space[Any],
) -> None:
    drawn, again = (RandomActions(space, 4).draw(20, None) for _ in range(2))
    np.testing.assert_equal(drawn, again)
    for k in range(20):
        one = {"a": drawn["a"][k], "b": drawn["b"][k]} if isinstance(drawn, dict) else drawn[k]  # type: ignore[index]
        assert space.contains(from_tree(space, one))
    actions = RandomActions(space, 5)
    with pytest.raises(AssertionError):
        np.testing.assert_equal(actions.draw(20, None), drawn)
    actions.seed(4)
    np.testing.assert_equal(actions.draw(20, None), drawn)


def test_only_legal_actions_are_drawn_and_these_uniformly() -> None:
    masks = np.tile(np.array([[0, 1, 1], [1, 0, 0]], np.int8), (10_000, 1))  # [B, 3]
    seen = {"observation": np.zeros((20_000, 2), np.float32), "action_mask": masks}
    drawn: Any = RandomActions(spaces.Discrete(3), 0).draw(20_000, seen)
    assert masks[np.arange(20_000), drawn].all()
    assert set(drawn[1::2]) == {0}
    assert abs((drawn[::2] == 1).mean() - 0.5) < 0.02


def test_the_policy_draws_in_evaluations_too() -> None:
    policy = Actor(RandomActions(spaces.Discrete(3)))
    policy.grow(300)
    seen, places, first = np.zeros((300, 2)), np.arange(300), np.ones(300, np.bool_)
    assert set(policy.act(seen, places, first, explore=False).sent) == {0, 1, 2}
    sent, chosen, inputs = policy.act(seen, places, first)
    np.testing.assert_array_equal(sent, chosen)
    assert inputs.shape == (300, *policy.blank_inputs.shape)


# -- rows and places, arrays and tensors ----------------------------------------------------------


class Adding(RLModule):
    """Adds up what it sees, and draws from the sum."""

    def get_initial_state(self):
        return {"sum": torch.full((WIDE,), 0.5)}

    def _forward(self, batch):
        seen = batch["observations"]
        parts = seen["observation"], seen["previous_action"][..., None]
        seen = torch.cat([*parts, seen["previous_reward"][..., None]], -1)  # [N, 1, 6]
        sums = batch["states"]["sum"] + seen[:, 0]
        return {"action_dist_inputs": sums[:, None, :3], "states": {"sum": sums}}


WIDE = 6  # two frames (2 each), the previous action and reward
SEEN = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def remembering(**kept: Any) -> Actor:
    """An actor with a recurrent state and contexts."""
    given = {"env_to_module": [{"use": "frame_stack", "k": 2}, "previous_actions_and_rewards"]}
    pipelines = build_runner_pipelines(ConnectorsConfig.parse(given), SEEN, spaces.Discrete(3))
    seen = pipelines[0].module_observation_space
    module = Adding(seen, spaces.Discrete(3), {})
    return Actor(module, 3, 1, 0, pipelines[1], pipelines[0], **kept)


def walk() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Observations, first steps and rewards of six steps of three rows."""
    random = np.random.default_rng(3)
    firsts = random.random((6, 3)) < 0.3  # [T, N]
    firsts[0] = True
    return [
        (random.normal(size=(3, 2)).astype(np.float32), first, random.normal(size=3))
        for first in firsts
    ]


def oracle(steps, chosen) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The sums after each step, and before it, row by row."""
    after, before = np.zeros((6, 3, WIDE)), np.zeros((6, 3, WIDE))
    for n in range(3):
        for t, (seen, first, _) in enumerate(steps):
            action, reward, last = 0, 0.0, seen[n]
            if first[n]:
                state = np.full(WIDE, 0.5)
            else:
                action, reward = chosen[t - 1][n], steps[t - 1][2][n]
                last = steps[t - 1][0][n]
            before[t, n] = state
            state = state + np.concatenate([last, seen[n], [action, reward]])
            after[t, n] = state
    return after, before


@pytest.mark.parametrize("how", ["rows", "gathered", "one by one", "followed"])
def test_states_and_contexts_are_of_each_row_and_begin_with_its_episodes(how: str) -> None:
    actor, steps = remembering(), walk()
    actor.grow(5)
    places = np.array([4, 0, 2])
    chosen: list[np.ndarray] = []
    found: list[Any] = []
    before: list[Any] = []
    for seen, first, rewards in steps:
        if how == "rows":
            acted = actor.act(seen, first=first)
            before.append(actor.states_before())
            actor.rewarded(rewards)
            found.append((acted.chosen, acted.inputs))
        elif how == "gathered":
            acted = actor.act(seen, places, first)
            before.append(actor.states_before(places))
            actor.rewarded(rewards, places)
            found.append((acted.chosen, acted.inputs))
        elif how == "one by one":
            each, states = [], []
            for n in (2, 0, 1):
                now, at = slice(n, n + 1), places[n : n + 1]
                each.append(actor.act(seen[now], at, first[now]))
                states.append(actor.states_before(at))
                actor.rewarded(rewards[now], at)
            order = [1, 2, 0]
            chosen_ = np.concatenate([each[k].chosen for k in order])
            found.append((chosen_, np.concatenate([each[k].inputs for k in order])))
            parts = [states[k] for k in order]
            before.append(tree_map(lambda *leaves: np.concatenate(leaves), *parts))
        else:
            given = np.array([0, 2, 1])
            parts = [
                actor.follow(
                    int(place),
                    seen[n : n + 1],
                    given[n : n + 1],
                    rewards[n : n + 1].astype(np.float32),
                    bool(first[n]),
                )
                for n, place in enumerate(places)
            ]
            before.append(tree_map(lambda *leaves: np.concatenate(leaves), *parts))
            found.append((given, None))
        chosen.append(found[-1][0])
    after, expected = oracle(steps, chosen)
    for t, (_, inputs) in enumerate(found):
        if inputs is not None:
            np.testing.assert_allclose(inputs, after[t, :, :3], rtol=1e-4, atol=1e-5)
        state = before[t]["module"]["sum"]
        np.testing.assert_allclose(state, expected[t], rtol=1e-4, atol=1e-5)
        assert before[t]["connectors"].keys() == {"frame_stack", "previous_actions_and_rewards"}


@pytest.mark.parametrize("kind", [LinearPolicy, LastSeen])
def test_tensors_on_a_device_give_the_actions_of_arrays(kind: Any) -> None:
    space = DISCRETE if kind is LinearPolicy else spaces.Discrete(3)
    made = (OBSERVATIONS, space) if kind is LinearPolicy else (OBSERVATIONS, space, {})
    module = kind(*made)
    on_host = Actor(module, ROWS, STEPS, 0)
    there = Actor(module, ROWS, STEPS, 0, device=torch.device("cpu"))
    for t, x in enumerate(observations()):
        first = np.arange(ROWS) % 2 == t
        with torch.no_grad():
            tensors = there.act(x, first=torch.from_numpy(first | (t == 0)))
        arrays = on_host.act(x.numpy(), first=first | (t == 0))
        assert isinstance(tensors.sent, torch.Tensor)
        np.testing.assert_array_equal(tensors.sent.numpy(), arrays.sent)
        np.testing.assert_allclose(tensors.inputs.numpy(), arrays.inputs, rtol=1e-5, atol=1e-6)
        logp = there.log_probabilities(tensors.inputs, tensors.chosen)
        np.testing.assert_allclose(
            logp, on_host.log_probabilities(arrays.inputs, arrays.chosen), rtol=1e-4, atol=1e-5
        )
        states = [actor.states_before() for actor in (there, on_host)]
        tree_map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *states)
    x = observations()[0]
    everywhere = np.ones(ROWS, np.bool_)
    with torch.no_grad():
        one = there.act(x, first=torch.from_numpy(everywhere), explore=False).sent
    other = on_host.act(x.numpy(), first=everywhere, explore=False).sent
    np.testing.assert_array_equal(one, other)


def test_given_actions_are_those_of_the_step_and_draw_no_noise() -> None:
    actor, other = policy_for(DISCRETE), policy_for(DISCRETE)
    x, given = observations()[0].numpy(), np.array([0, 1, 2, -1, 0])
    acted = actor.act(x, given=given)
    np.testing.assert_array_equal(acted.chosen, given)
    assert acted.inputs is None
    np.testing.assert_array_equal(actor.act(x).chosen, other.act(x).chosen)


def test_a_memory_of_its_own_leaves_the_actor_as_it_was() -> None:
    actor, steps = remembering(), walk()
    seen, first, rewards = steps[0]
    actor.act(seen, first=first)
    kept = tree_map(np.copy, actor.memory.trees)
    other = actor.with_memory(actor.memory.trees)
    other.rewarded(rewards)
    other.act(steps[1][0], first=np.array([True, False, True]))
    np.testing.assert_equal(actor.memory.trees, kept)
