"""The default module: an actor-critic for every space."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.models import ActorCritic
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


@pytest.mark.parametrize("space", [VECTOR, spaces.Discrete(3), IMAGE, NESTED], ids=str)
@pytest.mark.parametrize("action_space", ACTIONS, ids=str)
@pytest.mark.parametrize("recurrent", ["none", "lstm", "gru"])
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
        assert "values" not in acted  # who acts needs none
        assert torch.equal(acted["action_dist_inputs"], inputs)
    (inputs.sum() + train["values"].sum()).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_for_vectors_it_is_two_perceptrons_drawn_in_this_order() -> None:
    torch.manual_seed(5)
    module = build(hidden_sizes=[64, 64])
    torch.manual_seed(5)
    expected = []
    for sizes, head, gain in (((4, 64, 64), 2, 0.01), ((4, 64, 64), 1, 1.0)):
        layers = [(a, b, math.sqrt(2)) for a, b in itertools.pairwise(sizes)]
        for inputs, outputs, scale in [*layers, (64, head, gain)]:
            layer = nn.Linear(inputs, outputs)
            expected += [nn.init.orthogonal_(layer.weight, scale), torch.zeros(outputs)]
    for parameter, value in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter, value)
    x = torch.randn(7, 4)
    hidden = torch.tanh(torch.tanh(x @ expected[0].T) @ expected[2].T)
    outputs = module.forward_train({"observations": x})
    torch.testing.assert_close(outputs["action_dist_inputs"], hidden @ expected[4].T)
    value_hidden = torch.tanh(torch.tanh(x @ expected[6].T) @ expected[8].T)
    torch.testing.assert_close(outputs["values"], (value_hidden @ expected[10].T).squeeze(-1))


def test_the_policy_is_nearly_uniform_at_first() -> None:
    module = build(action_space=spaces.Discrete(3))
    inputs = module.forward_inference({"observations": torch.randn(50, 4)})["action_dist_inputs"]
    torch.testing.assert_close(inputs.softmax(-1), torch.full((50, 3), 1 / 3), atol=0.02, rtol=0)


def test_hidden_layers_are_those_of_the_config() -> None:
    module = build(hidden_sizes=[8], activation="relu")
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes["encoder.0.weight"] == (8, 4)
    assert shapes["value_head.weight"] == (1, 8)
    assert len(shapes) == 8
    assert any(isinstance(layer, torch.nn.ReLU) for layer in module.modules())
    assert build(hidden_sizes=[]).policy_head.in_features == 4


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


def test_squashed_actions_stay_within_their_bounds() -> None:
    module = build(action_space=spaces.Box(-2, 3, (2,)), squash=True)
    distribution = module.action_distribution()
    inputs = module.forward_train({"observations": torch.randn(50, 4)})["action_dist_inputs"]
    noise = 10 * distribution.draw_noise((50,), torch.Generator().manual_seed(0))
    actions = distribution(inputs).sample(noise)
    assert (actions >= -2).all()
    assert (actions <= 3).all()


def test_the_default_initializer_is_torchs_own() -> None:
    torch.manual_seed(1)
    module = build(initializer="default")
    torch.manual_seed(1)
    layer = nn.Linear(4, 64)
    assert torch.equal(module.encoder[0].weight, layer.weight)
    assert torch.equal(module.encoder[0].bias, layer.bias)


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
@pytest.mark.parametrize("space", [VECTOR, NESTED], ids=str)
def test_a_sequence_at_once_is_the_same_as_step_by_step(
    recurrent: str, space: gymnasium.Space[Any]
) -> None:
    module = build(space, recurrent=recurrent, recurrent_size=16)
    batch = {"observations": observations(space, 3, 6), "states": initial_states(module, 3)}
    at_once = module.forward_train(batch)
    states = batch["states"]
    for t in range(6):
        now = tree_map(lambda leaf, t=t: leaf[:, t : t + 1], batch["observations"])
        step = module.forward_exploration({"observations": now, "states": states})
        torch.testing.assert_close(
            step["action_dist_inputs"], at_once["action_dist_inputs"][:, t : t + 1]
        )
        states = step["states"]
    for name, last in at_once["states"].items():
        assert last.shape == (3, 16)
        torch.testing.assert_close(states[name], last)


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
def test_what_was_seen_before_matters_and_rows_do_not_mix(recurrent: str) -> None:
    module = build(recurrent=recurrent)
    x = observations(VECTOR, 2, 3)
    other = x.clone()
    other[0, 0] += 1  # the first row's first step
    states = initial_states(module, 2)
    one, two = (
        module.forward_train({"observations": each, "states": states})["values"]
        for each in (x, other)
    )
    assert (one[0] != two[0]).all()
    assert torch.equal(one[1], two[1])


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
def test_a_recurrent_module_trains_under_functional_call_with_parameters_of_one_vector(
    recurrent: str,
) -> None:
    module = build(recurrent=recurrent)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    batch = {"observations": observations(VECTOR, 2, 3), "states": initial_states(module, 2)}

    def loss(vector: torch.Tensor) -> torch.Tensor:
        pieces = vector.split([math.prod(shape) for shape in shapes.values()])
        named = {
            name: piece.view(shape)
            for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
        }
        outputs = torch.func.functional_call(module, named, (batch,))
        return (outputs["values"].square() + outputs["action_dist_inputs"].sum(-1)).sum()

    vector = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(vector), vector)
    assert gradient.isfinite().all()
    direction = gradient / gradient.norm()
    with torch.no_grad():
        slope = (loss(flat + 1e-3 * direction) - loss(flat - 1e-3 * direction)) / 2e-3
    torch.testing.assert_close(slope, gradient.norm(), rtol=0.02, atol=0)


# -- parts of one's own ---------------------------------------------------------------------------


class TwiceAsWide(Catalog):
    def build_value_head(self, features: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 2 * features), nn.ReLU(), nn.Linear(128, 1))


def test_one_part_can_be_swapped_in_a_catalog_and_the_rest_stays() -> None:
    class Mine(ActorCritic):
        catalog_class = TwiceAsWide

    for factory in (TwiceAsWide, Mine):
        module = build_module(factory, VECTOR, TWO, {})
        assert isinstance(module, ActorCritic)
        assert len(module.value_head) == 3
        assert module.forward_train({"observations": torch.zeros(3, 4)})["values"].shape == (3,)


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
