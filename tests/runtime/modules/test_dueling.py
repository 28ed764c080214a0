"""Dueling networks against what they are in NumPy, and who has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
from juggler.runtime.modules.dueling import DuelingHead
from juggler.runtime.modules.model_config import ModelConfig, QNetworkConfig
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.q_network import QNetwork

Floats = NDArray[np.float64]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(3), "seen": VECTOR})
THREE = spaces.Discrete(3)


def drawn(module: torch.nn.Module) -> dict[str, Floats]:
    """Give a module parameters that are all away from 0 -> them, by name."""
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


@pytest.mark.parametrize("numbers", [1, 5])
def test_a_head_adds_advantages_less_their_mean_to_the_value(numbers: int) -> None:
    head = DuelingHead(6, 3, numbers, QNetworkConfig())
    named = drawn(head)
    features = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    expected = slow_head(features.double().numpy(), named, numbers).reshape(7, -1)
    found = head(features).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    again = head(features.view(7, 1, 6)).detach().numpy()  # [B, T, F]
    np.testing.assert_allclose(again[:, 0], found, rtol=1e-5, atol=1e-5)


def test_what_all_advantages_have_in_common_changes_no_value() -> None:
    head = DuelingHead(6, 3, 1, QNetworkConfig())
    drawn(head)
    features = torch.randn(7, 6)
    before = head(features).detach()
    head.advantages[3].bias.data += 5.0
    torch.testing.assert_close(head(features).detach(), before, rtol=1e-4, atol=1e-4)


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


def test_a_mask_changes_no_value_of_an_action_that_is_legal() -> None:
    module = QNetwork(MASKED, THREE, {"hidden_sizes": [8], "dueling": True})
    drawn(module)
    seen = torch.randn(2, 4)

    def values(mask: list[int]) -> Any:
        batch = {"seen": seen, "action_mask": torch.tensor([mask] * 2, dtype=torch.int8)}
        return module.forward_train({"observations": batch})["action_dist_inputs"].detach()

    every, some = values([1, 1, 1]), values([1, 0, 1])
    torch.testing.assert_close(some[:, [0, 2]], every[:, [0, 2]])
    assert (some[:, 1] < -1e10).all()


def test_without_the_key_the_network_is_as_it_was() -> None:
    names = QNetwork(VECTOR, THREE, {"hidden_sizes": [8]}).state_dict().keys()
    assert {name for name in names if name.startswith("value_head")} == {
        "value_head.weight",
        "value_head.bias",
    }


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
        with pytest.raises(
            ValueError, match="model has no key 'dueling': only networks that value"
        ):
            build()


def test_what_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.dueling must be true or false, not 1"):
        QNetwork(VECTOR, THREE, {"dueling": 1})


def test_so_are_the_other_keys_of_networks_that_value_actions() -> None:
    # Only dqn learns the probabilities of returns.
    with pytest.raises(ValueError, match=r"no key 'atoms': only networks.*, or choose dqn$"):
        ActorCritic(VECTOR, THREE, {"atoms": 51})
    with pytest.raises(ValueError, match="model has no key 'atom'"):
        ModelConfig.parse({"atom": 51})
