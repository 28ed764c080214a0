"""Modules that ship: actor-critics for every space, and their networks."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import nn

from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
from juggler.runtime.acting.acting_graph import ActingGraph, to_onnx
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.modules.layers import RecurrentCore
from juggler.runtime.modules.models import ActorCritic, Catalog, DeterministicActorCritic, QNetwork
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.wire.structures import to_tree, tree_map

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (10, 10, 3), np.uint8)
TWO = spaces.Discrete(2)
NESTED = spaces.Dict(image=IMAGE, rest=spaces.Tuple([spaces.Discrete(3, start=1), VECTOR]))
ACTIONS: list[gymnasium.Space[Any]] = [
    TWO,
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2, 3)),
    spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Tuple([TWO, spaces.Box(-2, 2, (1,))])),
]


def observations(space: gymnasium.Space[Any], *leading: int) -> Any:
    batched = space
    for size in reversed(leading):
        batched = gymnasium.vector.utils.batch_space(batched, size)
    batched.seed(0)
    sample = to_tree(space, batched.sample())
    return tree_map(lambda array: torch.from_numpy(np.asarray(array)), sample)


def initial_states(module: ActorCritic, rows: int) -> Any:
    return tree_map(lambda leaf: leaf.expand(rows, *leaf.shape).clone(), module.get_initial_state())


def build(
    observation_space: gymnasium.Space[Any] = VECTOR,
    action_space: gymnasium.Space[Any] = TWO,
    **model: Any,
) -> ActorCritic:
    module = build_module(None, observation_space, action_space, model)
    assert isinstance(module, ActorCritic)
    return module


@pytest.mark.parametrize(
    ("space", "action_space", "recurrent"),
    [
        (space, action_space, ["none", "lstm", "gru"][(i + j) % 3])  # each pair comes
        for i, space in enumerate([VECTOR, spaces.Discrete(3), IMAGE, NESTED])
        for j, action_space in enumerate(ACTIONS)
    ],
    ids=str,
)
def test_there_is_one_for_every_pair_of_spaces_with_and_without_a_memory(
    space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], recurrent: str
) -> None:
    module = build(space, action_space, recurrent=recurrent)
    module.check_specs = True
    leading = (3,) if recurrent == "none" else (3, 5)
    batch = {"observations": observations(space, *leading)}
    if recurrent != "none":
        batch["states"] = initial_states(module, 3)
    train = module.forward_train(batch)
    distribution = module.action_distribution()
    inputs = train["action_dist_inputs"]
    assert inputs.shape == (*leading, distribution.inputs_size)
    assert train["values"].shape == leading
    noise = distribution.draw_noise(leading, torch.Generator().manual_seed(0))
    actions = distribution(inputs).sample(noise)
    assert distribution(inputs).log_prob(actions).shape == leading
    for forward in (module.forward_inference, module.forward_exploration):
        acted = forward(batch)
        assert "values" not in acted  # acting needs none
        assert torch.equal(acted["action_dist_inputs"], inputs)
    (inputs.sum() + train["values"].sum()).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("space", "config", "shares"),
    [
        (VECTOR, {}, False),
        (spaces.Tuple([VECTOR, TWO]), {}, False),
        (VECTOR, {"shared_value_layers": True}, True),
        (IMAGE, {}, True),
        (NESTED, {}, True),
        (IMAGE, {"encoder": "mlp"}, False),
        (IMAGE, {"shared_value_layers": False}, False),
        (VECTOR, {"recurrent": "gru"}, True),
    ],
)
def test_the_value_function_shares_what_is_dear(
    space: gymnasium.Space[Any], config: dict[str, Any], shares: bool
) -> None:
    module = build(space, **config)
    assert (module.value_encoder is None) == shares
    assert module.training_only == (("value_head",) if shares else ("value_encoder", "value_head"))


def test_log_deviations_are_parameters_of_their_own_or_put_out_by_the_head() -> None:
    space = spaces.Box(-1, 1, (3,))
    free = build(action_space=space)
    with torch.no_grad():
        free.policy_head.log_std.copy_(torch.tensor([0.0, 1.0, 2.0]))
    batch = {"observations": torch.randn(5, 4)}
    inputs = free.forward_inference(batch)["action_dist_inputs"]
    assert torch.equal(inputs[:, 3:], torch.tensor([0.0, 1.0, 2.0]).expand(5, 3))
    put_out = build(action_space=space, free_log_std=False)
    inputs = put_out.forward_inference(batch)["action_dist_inputs"]
    assert inputs.shape == (5, 6)
    assert (inputs[0, 3:] != inputs[1, 3:]).all()


def test_free_log_deviations_of_nested_actions_get_to_their_places() -> None:
    module = build(action_space=ACTIONS[-1])
    at = module.action_distribution().log_std_inputs
    assert len(at) == 3
    with torch.no_grad():
        module.policy_head.log_std.copy_(torch.tensor([1.0, 2.0, 3.0]))
        module.policy_head.others.weight.zero_()
        module.policy_head.others.bias.copy_(torch.arange(5.0) + 10)
    inputs = module.forward_train({"observations": torch.randn(2, 4)})["action_dist_inputs"]
    others = [i for i in range(8) if i not in at]
    assert inputs[0, at].tolist() == [1, 2, 3]
    assert inputs[1, others].tolist() == [10, 11, 12, 13, 14]


# -- memory ---------------------------------------------------------------------------------------


# -- parts of one's own ---------------------------------------------------------------------------


def test_a_core_of_ones_own_may_have_any_tree_for_its_state() -> None:
    class Counter(nn.Module):
        size = 2

        def get_initial_state(self) -> Any:
            return {"deep": {"count": torch.zeros(())}}

        def forward(self, features: torch.Tensor, states: Any) -> Any:
            steps = torch.arange(1, features.shape[1] + 1)  # [T]
            count = states["deep"]["count"].unsqueeze(1) + steps  # [B, T]
            remembered = count.unsqueeze(-1).expand(-1, -1, 2)  # [B, T, 2]
            return remembered, {"deep": {"count": count[:, -1]}}

    class Counts(Catalog):
        def build_core(self, features: int) -> nn.Module:
            return Counter()

    module = build_module(Counts, VECTOR, TWO, {})
    assert isinstance(module, ActorCritic)
    batch = {"observations": observations(VECTOR, 3, 5), "states": initial_states(module, 3)}
    after = module.forward_train(batch)["states"]["deep"]["count"]
    assert torch.equal(after, torch.full((3,), 5.0))


# A recurrent layer remembers before it has learned to.


KINDS = ("lstm", "gru")
STEPS = 20


def core(kind: str, **keys: Any) -> RecurrentCore:
    torch.manual_seed(0)
    return RecurrentCore(8, ModelConfig.parse({"recurrent": kind, **keys}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [-1.0, 0, 2.0, 3.5])
def test_a_memory_that_nothing_adds_to_fades_with_the_gate(kind: str, bias: float) -> None:
    """With weights of 0, each step keeps sigmoid(bias) of the memory."""
    layer = core(kind, memory_bias=bias)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "weight" in name:
                parameter.zero_()
        states = {name: torch.full((1, layer.size), 0.5) for name in layer.get_initial_state()}
        _, after = layer(torch.zeros(1, STEPS, 8), states)
    kept = (1 / (1 + math.exp(-bias))) ** STEPS
    memory = after["cell" if kind == "lstm" else "hidden"]
    torch.testing.assert_close(memory, torch.full_like(memory, 0.5 * kept))


@pytest.mark.parametrize("bias", ["2", None, float("nan"), float("inf"), True])
def test_a_bias_that_is_no_number_is_refused(bias: object) -> None:
    with pytest.raises(ValueError, match="memory_bias"):
        ModelConfig.parse({"recurrent": "lstm", "memory_bias": bias})


# Dueling networks against NumPy, and the modules that have them.


Floats = NDArray[np.float64]
THREE = spaces.Discrete(3)


def drawn(module: torch.nn.Module) -> dict[str, Floats]:
    """Draw a module's parameters away from 0; return them by name."""
    generator = torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return {name: x.detach().double().numpy() for name, x in module.named_parameters()}


def linear(x: Floats, named: dict[str, Floats], layer: str) -> Floats:
    found: Floats = x @ named[f"{layer}.weight"].T + named[f"{layer}.bias"]
    return found


def normalized(x: Floats, named: dict[str, Floats], layer: str) -> Floats:
    apart = x - x.mean(-1, keepdims=True)
    scaled = apart / np.sqrt((apart**2).mean(-1, keepdims=True) + 1e-5)
    found: Floats = scaled * named[f"{layer}.weight"] + named[f"{layer}.bias"]
    return found


def slow_stream(x: Floats, named: dict[str, Floats], stream: str) -> Floats:
    hidden = np.tanh(linear(x, named, f"{stream}.0"))
    return linear(normalized(hidden, named, f"{stream}.2"), named, f"{stream}.3")


def slow_head(x: Floats, named: dict[str, Floats], numbers: int, head: str = "") -> Floats:
    """[B, n, K], one action after the other."""
    value = slow_stream(x, named, f"{head}value")  # [B, K]
    flat = slow_stream(x, named, f"{head}advantages")  # [B, n K]
    apart = [flat[:, at : at + numbers] for at in range(0, flat.shape[1], numbers)]  # n [B, K]
    return np.stack([value + each - sum(apart) / len(apart) for each in apart], 1)


def test_a_dueling_network_values_actions_as_in_numpy() -> None:
    module = QNetwork(VECTOR, THREE, {"hidden_sizes": [8], "dueling": True})
    named = drawn(module)
    seen = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    features = np.tanh(linear(seen.double().numpy(), named, "encoder.0"))
    features = normalized(features, named, "normalize")
    expected = slow_head(features, named, 1, "value_head.")[:, :, 0]  # [B, n]
    outputs = module.forward_train({"observations": seen})
    found = outputs["action_dist_inputs"].detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(outputs["values"].detach(), expected.max(1), rtol=1e-4, atol=1e-4)


def test_logits_of_returns_duel_for_each_return() -> None:
    model = {"hidden_sizes": [8], "dueling": True, "atoms": 5, "v_min": -1.0, "v_max": 1.0}
    module = QNetwork(VECTOR, THREE, model)
    named = drawn(module)
    seen = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    features = np.tanh(linear(seen.double().numpy(), named, "encoder.0"))
    features = normalized(features, named, "normalize")
    logits = slow_head(features, named, 5, "value_head.")  # [B, n, K]
    likely = np.exp(logits - logits.max(-1, keepdims=True))
    likely /= likely.sum(-1, keepdims=True)
    outputs = {k: x.detach() for k, x in module.forward_train({"observations": seen}).items()}
    np.testing.assert_allclose(outputs["return_logits"], logits, rtol=1e-4, atol=1e-4)
    means = likely @ np.linspace(-1, 1, 5)  # [B, n]
    np.testing.assert_allclose(outputs["action_dist_inputs"], means, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_values_no_actions_by_such_a_network_refuses_the_key(algorithm: str) -> None:
    def build() -> None:
        model = {"hidden_sizes": [8], "dueling": True}
        if algorithm == "r2d2":
            model["recurrent"] = "gru"
        acts = spaces.Box(-1, 1, (1,), np.float32) if algorithm == "td3" else THREE
        build_learner({"algorithm": algorithm}, None, VECTOR, acts, model)

    if algorithm in ("dqn", "pqn", "r2d2"):
        build()
    else:
        with pytest.raises(ValueError, match="model has no key 'dueling': only"):
            build()


def test_what_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.dueling: expected true or false, not 1"):
        QNetwork(VECTOR, THREE, {"dueling": 1})


def test_so_are_the_other_keys_of_networks_that_value_actions() -> None:
    # Only dqn learns the probabilities of returns.
    with pytest.raises(ValueError, match=r"no key 'atoms': only networks.*, or choose dqn$"):
        ActorCritic(VECTOR, THREE, {"atoms": 51})
    with pytest.raises(ValueError, match="model has no key 'atom'"):
        ModelConfig.parse({"atom": 51})


# How a deterministic policy explores, and what its critics see.


UNEVEN = spaces.Box(np.array([-1, 100], np.float32), np.array([3, 101], np.float32))
LOW, HIGH = torch.from_numpy(UNEVEN.low), torch.from_numpy(UNEVEN.high)
SMALL = {"hidden_sizes": [8]}


def greedy_of(module: DeterministicActorCritic, batch: dict[str, Any]) -> torch.Tensor:
    actions: torch.Tensor = module.action_distribution()(
        module.forward_inference(batch)["action_dist_inputs"]
    ).mode()
    return actions


def test_noise_is_of_the_size_asked_for_within_bounds_and_none_in_greedy_play() -> None:
    torch.manual_seed(0)
    module = DeterministicActorCritic(VECTOR, UNEVEN, SMALL)
    batch = {"observations": torch.randn(1, 4).expand(20_000, 4)}
    greedy = greedy_of(module, batch)
    assert (greedy == greedy[0]).all()
    torch.testing.assert_close(greedy[0], (LOW + HIGH) / 2, rtol=0.05, atol=0.1)
    for noise in (0.1, 1.0):
        module.exploration_noise.fill_(noise)
        outputs = module.forward_exploration(batch)
        spec = module.action_distribution()
        drawn = spec.draw_noise((20_000,), torch.Generator().manual_seed(1))
        actions = spec(outputs["action_dist_inputs"]).sample(drawn)
        assert ((actions >= LOW) & (actions <= HIGH)).all()
        shares = (actions - greedy) / ((HIGH - LOW) / 2)
        if noise == 0.1:
            torch.testing.assert_close(shares.std(0), torch.full((2,), 0.1), rtol=0.03, atol=0)
        else:  # all over the box, and at its bounds
            assert ((actions < LOW + 0.01 * (HIGH - LOW)).float().mean(0) > 0.1).all()
            assert ((actions > HIGH - 0.01 * (HIGH - LOW)).float().mean(0) > 0.1).all()
    module.exploration_noise.fill_(0.0)
    outputs = module.forward_exploration(batch)
    distribution = spec(outputs["action_dist_inputs"])
    torch.testing.assert_close(distribution.sample(drawn), greedy)
    assert distribution.log_prob(greedy).isfinite().all()


def test_a_model_for_simulators_draws_uniform_actions_too_until_learning_begins() -> None:
    module = DeterministicActorCritic(VECTOR, UNEVEN, SMALL)
    strip_to_acting(module)
    connectors = build_runner_pipelines(ConnectorsConfig.parse({}), VECTOR, UNEVEN, None)
    graph = ActingGraph(module.eval(), *connectors, VECTOR, UNEVEN, explores=True)
    model = to_onnx(graph, optimize=False).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(model)
    generator = np.random.default_rng(0)
    given = {
        "observation": generator.uniform(-1, 1, (20_000, 4)).astype(np.float32),
        "uniform": generator.random((20_000, 2, 2), np.float32),
    }
    action, logp = session.run(["action", "action_logp"], given)
    for element in ((action - UNEVEN.low) / (UNEVEN.high - UNEVEN.low)).T:
        np.testing.assert_allclose(np.histogram(element, 10, (0, 1))[0] / 20_000, 0.1, rtol=0.07)
    np.testing.assert_allclose(logp, -np.log(UNEVEN.high - UNEVEN.low).sum(), rtol=1e-5)


def test_actions_of_different_bounds_are_the_same_to_the_values() -> None:
    torch.manual_seed(0)
    one = DeterministicActorCritic(VECTOR, spaces.Box(-4, 4, (2,), np.float32), SMALL)
    other = DeterministicActorCritic(VECTOR, spaces.Box(0, 1, (2,), np.float32), SMALL)
    other.load_state_dict(one.state_dict())
    seen, share = torch.randn(5, 4), torch.rand(5, 2)
    values = [
        module.forward_train({"observations": seen, "actions": low + width * share})["q_values"]
        for module, low, width in ((one, -4, 8), (other, 0, 1))
    ]
    torch.testing.assert_close(*values)


class Misspelled(Catalog):
    def build_value_haed(self, features: int) -> nn.Module:
        return nn.Linear(features, 1)


class WithHelper(Catalog):
    def build_value_heads(self, features: int) -> nn.Module:
        return nn.Linear(features, 1)

    def build_value_head(self, features: int) -> nn.Module:
        return self.build_value_heads(features)


def test_a_misspelled_method_of_a_catalog_is_named_and_a_helper_is_not() -> None:
    box, two = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
    with pytest.raises(ValueError, match=r"Misspelled.build_value_haed .* 'build_value_head'"):
        build_module(Misspelled, box, two, {})
    assert isinstance(build_module(WithHelper, box, two, {}), ActorCritic)


@pytest.mark.parametrize(
    ("space", "model", "unused"),
    [
        (spaces.Discrete(2), {"squash": True, "free_log_std": False}, ["squash", "free_log_std"]),
        (spaces.Discrete(2), {"squash": False}, []),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), {"squash": True}, ["squash"]),
        (spaces.Box(-1, 1, (2,), np.float32), {"squash": True, "free_log_std": True}, []),
        (spaces.Discrete(2), {}, []),
    ],
)
def test_keys_that_an_action_space_cannot_use_are_noted_once(
    space: spaces.Space[Any], model: dict[str, Any], unused: list[str]
) -> None:
    module = build_module(None, spaces.Box(-1, 1, (3,), np.float32), space, model)
    actor = Actor(module)
    notes = [note.text for note in actor.take_notes()]
    assert [key for key in ("squash", "free_log_std") if f"model.{key}" in "".join(notes)] == unused
    assert len(notes) == bool(unused)
    assert not actor.take_notes()
