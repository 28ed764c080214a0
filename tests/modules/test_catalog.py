"""Building modules: the default model, modules by name, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from juggler.runtime.modules.catalog import build_module
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, OBSERVATIONS, VALUES
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.models import MLPActorCritic
from juggler.runtime.modules.rl_module import Batch, RLModule

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
TWO = spaces.Discrete(2)


class Constant(RLModule):
    """The same answer in all passes, from one `_forward`."""

    def _forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {ACTION_DIST_INPUTS: torch.zeros(len(batch[OBSERVATIONS]), 2)}


def not_a_module(observation_space: Any, action_space: Any, model_config: Any) -> Any:
    return torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    "space", [VECTOR, spaces.Box(0, 255, (4,), np.uint8), spaces.Box(0, 1, ())], ids=str
)
@pytest.mark.parametrize("action_space", [TWO, spaces.Box(-1, 1, (2, 3))], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_the_default_model_serves_vectors_of_any_dtype(
    space: spaces.Box, action_space: gymnasium.Space, shared: bool
) -> None:
    module = build_module(None, space, action_space, {"shared_value_layers": shared})
    observations = torch.as_tensor(np.stack([space.sample() for _ in range(7)]))
    train = module.forward_train({OBSERVATIONS: observations})
    assert train[ACTION_DIST_INPUTS].shape == (7, module.action_distribution().inputs_size)
    assert train[ACTION_DIST_INPUTS].dtype == torch.float32
    assert train[VALUES].shape == (7,)
    for forward in (module.forward_inference, module.forward_exploration):
        acted = forward({OBSERVATIONS: observations})
        assert acted.keys() == {ACTION_DIST_INPUTS}  # who acts needs no values
        assert torch.equal(acted[ACTION_DIST_INPUTS], train[ACTION_DIST_INPUTS])


def test_the_default_policy_is_nearly_uniform_at_first() -> None:
    module = build_module(None, VECTOR, spaces.Discrete(3), {})
    probabilities = module.forward_inference({OBSERVATIONS: torch.randn(50, 4)})[
        ACTION_DIST_INPUTS
    ].softmax(-1)
    torch.testing.assert_close(probabilities, torch.full((50, 3), 1 / 3), atol=0.02, rtol=0)


def test_the_log_deviations_of_a_box_policy_are_parameters_of_their_own() -> None:
    module = build_module(None, VECTOR, spaces.Box(-1, 1, (3,)), {})
    with torch.no_grad():
        dict(module.named_parameters())["log_std"].copy_(torch.tensor([0.0, 1.0, 2.0]))
    inputs = module.forward_inference({OBSERVATIONS: torch.randn(5, 4)})[ACTION_DIST_INPUTS]
    assert torch.equal(inputs[:, 3:], torch.tensor([0.0, 1.0, 2.0]).expand(5, 3))


def test_hidden_layers_are_those_of_the_config() -> None:
    module = build_module(None, VECTOR, TWO, {"hidden_sizes": [8], "activation": "relu"})
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes["policy_layers.0.weight"] == (8, 4)
    assert shapes["value_head.weight"] == (1, 8)
    assert len(shapes) == 8
    assert any(isinstance(layer, torch.nn.ReLU) for layer in module.modules())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hiden_sizes": [8]}, "did you mean 'hidden_sizes'"),
        ({"zzz": 1}, "known are hidden_sizes"),
        ({"hidden_sizes": 64}, "positive integers, not 64"),
        ({"hidden_sizes": [0]}, "positive integers"),
        ({"activation": "gelu"}, "one of tanh, relu"),
        ({"activation": ["tanh"]}, "one of tanh, relu"),
        ({"shared_value_layers": "yes"}, "true or false, not 'yes'"),
    ],
)
def test_a_wrong_model_config_is_told_apart(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_module(None, VECTOR, TWO, config)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (84, 84, 3), np.uint8),
        spaces.Dict(a=VECTOR),
        spaces.Discrete(4),
        spaces.Box(0, 1, (0,)),
    ],
    ids=str,
)
def test_an_observation_space_that_nothing_serves_is_named(space: gymnasium.Space) -> None:
    with pytest.raises(UnsupportedSpace) as caught:
        build_module(None, space, TWO, {})
    assert str(space) in str(caught.value)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Python module on the path with a module class in it and a broken one beside it."""
    (tmp_path / "my_modules_for_test.py").write_text(
        "from juggler.runtime.modules.models import MLPActorCritic\n"
        "class Mine(MLPActorCritic): ...\n"
        "number = 3\n"
    )
    (tmp_path / "my_broken_modules_for_test.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_modules_for_test"
    sys.modules.pop("my_modules_for_test", None)


def test_a_module_is_imported_by_name(package: str) -> None:
    module = build_module(f"{package}:Mine", VECTOR, TWO, {"hidden_sizes": [8]})
    assert type(module).__name__ == "Mine"
    assert isinstance(module, MLPActorCritic)


def test_a_class_or_a_callable_makes_a_module() -> None:
    assert isinstance(build_module(Constant, VECTOR, TWO, {"any": "thing"}), Constant)
    assert isinstance(build_module(lambda o, a, c: Constant(o, a, c), VECTOR, TWO, {}), Constant)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_package_here:Mine", "no Python module 'no_such_package_here' here"),
        ("my_modules_for_test:Yours", "has no 'Yours'"),
        ("my_modules_for_test:number", "is of type int: it cannot be called"),
        ("my_modules_for_test", "must be named as 'package.module:Class'"),
        (":Mine", "must be named as"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_is_missing(package: str, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        build_module(name, VECTOR, TWO, {})
    assert repr(name) in str(caught.value)


def test_a_dependency_that_a_named_module_lacks_is_not_taken_for_the_module(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        build_module("my_broken_modules_for_test:Mine", VECTOR, TWO, {})


def test_what_is_not_an_rlmodule_is_refused() -> None:
    with pytest.raises(TypeError, match="made a Linear: it must make an RLModule"):
        build_module(not_a_module, VECTOR, TWO, {})


def test_a_module_without_a_forward_pass_says_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="RLModule must define _forward"):
        RLModule(VECTOR, TWO, {}).forward_train({OBSERVATIONS: torch.zeros(1, 4)})


def test_every_pass_falls_back_on_forward() -> None:
    module = Constant(VECTOR, TWO, {})
    batch = {OBSERVATIONS: torch.zeros(3, 4)}
    for forward in (
        module.forward_inference,
        module.forward_exploration,
        module.forward_train,
        module,
    ):
        assert forward(batch)[ACTION_DIST_INPUTS].shape == (3, 2)
