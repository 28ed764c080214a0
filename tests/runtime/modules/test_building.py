"""Building modules by name, class, factory, catalog and spec, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.by_name import ImportFailed
from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.distributions import CategoricalSpec
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.model_config import ModelConfig
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.module_spec import RLModuleSpec
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.modules.specs import SpecError

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
TWO = spaces.Discrete(2)


class Constant(RLModule):
    """The same answer in all passes."""

    def _forward(self, batch: Batch) -> dict[str, Any]:
        return {"action_dist_inputs": torch.zeros(len(batch["observations"]), 2)}


def not_a_module(observation_space: Any, action_space: Any, model_config: Any) -> Any:
    return torch.nn.Linear(1, 1)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Python module on the path with parts in it and a broken one beside it."""
    (tmp_path / "my_modules_for_test.py").write_text(
        "from juggler.runtime.modules.catalog import Catalog\n"
        "from juggler.runtime.modules.models import ActorCritic\n"
        "class Mine(ActorCritic): ...\n"
        "class MyCatalog(Catalog):\n"
        "    def build_encoder(self):\n"
        "        return MyEncoder(self.observation_space, self.config)\n"
        "import torch\n"
        "class MyEncoder(torch.nn.Linear):\n"
        "    size = 5\n"
        "    def __init__(self, space, config): super().__init__(space.shape[0], 5)\n"
        "number = 3\n"
    )
    (tmp_path / "my_broken_modules_for_test.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_modules_for_test"
    sys.modules.pop("my_modules_for_test", None)


def test_a_module_is_imported_by_name(package: str) -> None:
    module = build_module(f"{package}:Mine", VECTOR, TWO, {"hidden_sizes": [8]})
    assert type(module).__name__ == "Mine"
    assert isinstance(module, ActorCritic)


def test_a_class_or_a_callable_makes_a_module() -> None:
    assert isinstance(build_module(Constant, VECTOR, TWO, {"any": "thing"}), Constant)
    assert isinstance(build_module(lambda o, a, c: Constant(o, a, c), VECTOR, TWO, {}), Constant)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (torch.nn.Linear, "the class Linear derives from neither juggler.RLModule nor"),
        ("torch.nn:Linear", "module 'torch.nn:Linear': the class Linear derives from neither"),
        (torch.nn.Linear(4, 2), "this Linear is built already, and each worker builds its own"),
        (Constant(VECTOR, TWO, {}), "this Constant is built already"),
    ],
)
def test_what_makes_no_module_is_told_before_it_is_called(module: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build_module(module, VECTOR, TWO, {})


def test_a_catalog_is_taken_where_a_module_is_by_name_or_class(package: str) -> None:
    named = build_module(f"{package}:MyCatalog", VECTOR, TWO, {})
    assert isinstance(named, ActorCritic)
    assert type(named.encoder).__name__ == "MyEncoder"
    assert named.policy_head.in_features == 5
    assert named.forward_train({"observations": torch.zeros(3, 4)})["values"].shape == (3,)
    assert isinstance(build_module(Catalog, VECTOR, TWO, {}), ActorCritic)


def test_an_encoder_is_imported_by_name(package: str) -> None:
    module = build_module(None, VECTOR, TWO, {"encoder": f"{package}:MyEncoder"})
    assert isinstance(module, ActorCritic)
    assert type(module.encoder).__name__ == "MyEncoder"


def test_specs_are_checked_in_every_call_if_asked() -> None:
    module = build_module(Constant, VECTOR, TWO, {}, check_specs=True)
    module.forward_train({"observations": torch.zeros(3, 4)})
    with pytest.raises(SpecError):
        module.forward_train({"observations": torch.zeros(3, 5)})


def test_a_distribution_is_handed_to_the_module() -> None:
    module = build_module(None, VECTOR, TWO, {}, distribution=lambda space: CategoricalSpec(7))
    outputs = module.forward_train({"observations": torch.zeros(3, 4)})
    assert outputs["action_dist_inputs"].shape == (3, 7)


@pytest.mark.parametrize("what", ["module", "encoder", "distribution"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_package_here:Mine", "no Python module 'no_such_package_here' here"),
        ("mine.py:Mine", "names a file, and a Python module is wanted: write 'mine:Mine'$"),
        ("./mine:Mine", "write 'mine:Mine'$"),
        ("parts/mine.py:Mine", "write 'mine:Mine', with 'parts' on PYTHONPATH"),
        ("my_modules_for_test:Yours", "has no 'Yours'"),
        ("my_modules_for_test:Mien", "has no 'Mien': did you mean 'Mine'"),
        ("my_modules_for_test:number", "is of type int: it cannot be called"),
        ("my_modules_for_test", "named as 'package.module:Class'"),
        (":Mine", "named as"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_is_missing(
    package: str, what: str, name: str, said: str
) -> None:
    module, config = (name, {}) if what == "module" else (None, {what: name})
    with pytest.raises(ValueError, match=said) as caught:
        build_module(module, VECTOR, TWO, config)
    assert f"{what} {name!r}" in str(caught.value)


def test_a_dependency_that_a_named_module_lacks_is_not_taken_for_the_module(package: str) -> None:
    with pytest.raises(
        ImportFailed, match=r"ModuleNotFoundError: .* 'no_such_dependency'"
    ) as error:
        build_module("my_broken_modules_for_test:Mine", VECTOR, TWO, {})
    assert error.value.traceback.count("File") == 1, "the line of the broken module alone"


def test_what_is_not_an_rlmodule_is_refused() -> None:
    with pytest.raises(TypeError, match="made a Linear: it must make an RLModule"):
        build_module(not_a_module, VECTOR, TWO, {})


# -- specs of modules -----------------------------------------------------------------------------


def test_a_spec_given_in_part_is_completed_from_environment_and_config() -> None:
    spec = RLModuleSpec(module=ActorCritic, model_config={"hidden_sizes": [8]})
    module = spec.completed(VECTOR, TWO, {"hidden_sizes": [99], "activation": "relu"}).build()
    assert isinstance(module, ActorCritic)
    assert module.model_config == {"hidden_sizes": [8], "activation": "relu"}
    assert module.observation_space is VECTOR
    assert RLModuleSpec().completed(VECTOR, TWO).build().model_config == {}


def test_what_a_spec_says_goes_before_what_it_is_completed_with() -> None:
    own = spaces.Box(-1, 1, (7,))
    spec = RLModuleSpec(observation_space=own).completed(VECTOR, TWO)
    assert spec.observation_space is own
    assert spec.action_space is TWO


def test_a_spec_is_taken_where_a_module_is() -> None:
    spec = RLModuleSpec(model_config={"hidden_sizes": [8]})
    module = build_module(spec, VECTOR, TWO, {"activation": "relu"}, check_specs=True)
    assert module.model_config == {"hidden_sizes": [8], "activation": "relu"}
    assert module.check_specs


@pytest.mark.parametrize("missing", ["observation_space", "action_space"])
def test_a_spec_without_a_space_says_which(missing: str) -> None:
    given: dict[str, Any] = {"observation_space": VECTOR, "action_space": TWO}
    del given[missing]
    with pytest.raises(ValueError, match=f"RLModuleSpec has no {missing}"):
        RLModuleSpec(**given).build()


# -- model_config ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hiden_sizes": [8]}, "has no key 'hiden_sizes': did you mean 'hidden_sizes'"),
        ({"zzz": 1}, "known are .*hidden_sizes"),
        ({"hidden_sizes": 64}, r"hidden_sizes must be a list of .* such as \[128\], not 64"),
        ({"hidden_sizes": [0]}, "positive integers"),
        ({"activation": "gelu"}, "activation must be one of tanh, relu, not 'gelu'"),
        ({"activation": ["tanh"]}, "one of tanh, relu"),
        ({"shared_value_layers": "yes"}, "shared_value_layers must be true or false, not 'yes'"),
        ({"shared_value_layers": 1}, "true or false, not 1"),
        ({"free_log_std": 1}, "free_log_std must be true or false, not 1"),
        ({"squash": "no"}, "squash must be true or false"),
        ({"recurrent": "rnn"}, "recurrent must be one of none, lstm, gru, not 'rnn'"),
        ({"recurrent_size": 1.5}, "recurrent_size must be a positive integer, not 1.5"),
        ({"initializer": "xavier"}, "initializer must be one of orthogonal, default"),
        ({"encoder": "resnet"}, "no encoder 'resnet': did you mean 'impala_resnet'"),
        ({"recurrent": "gru", "shared_value_layers": False}, "does not go with recurrent = 'gru'"),
    ],
)
def test_a_wrong_model_config_is_told_apart(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_module(None, VECTOR, TWO, config)


def test_a_catalog_may_have_keys_of_its_own() -> None:
    @dataclass(frozen=True, kw_only=True)
    class WithDepth(ModelConfig):
        depth: int = 1

    class Deep(Catalog):
        config_class = WithDepth

    assert Deep(VECTOR, TWO, {"depth": 3}).config.depth == 3
    with pytest.raises(ValueError, match="did you mean 'depth'"):
        build_module(Deep, VECTOR, TWO, {"dept": 3})


def test_a_space_that_nobody_encodes_is_named_with_the_reason() -> None:
    refused: list[tuple[gymnasium.Space[Any], str]] = [
        (spaces.Text(5), "there is no encoding for the space Text"),
        (spaces.Text(5), "give their characters as numbers"),
        (spaces.Sequence(TWO), "pad them to the longest"),
        (spaces.Graph(VECTOR, None), "pad nodes and edges"),
        (spaces.OneOf([TWO, VECTOR]), "give all of its spaces in a Tuple"),
        (spaces.Dict(a=VECTOR, b=spaces.Text(5)), "'b'"),
        (spaces.Box(0, 1, (0,)), "no elements"),
        (spaces.Dict(), "has nothing in it"),
        (spaces.Dict(action_mask=spaces.MultiBinary(2)), "nothing but an action mask"),
    ]
    for space, said in refused:
        with pytest.raises(UnsupportedSpace) as caught:
            build_module(None, space, TWO, {})
        assert said in str(caught.value)


class OnlyConfig(Constant):
    def __init__(self, config: Any) -> None: ...


class Forgetful(Constant):
    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        self.layer = torch.nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (OnlyConfig, r"OnlyConfig.__init__ must take \(observation_space.*it takes \(config: "),
        (Forgetful, r"Forgetful.__init__ must begin with super\(\).__init__\(observation_space"),
    ],
)
def test_a_constructor_that_does_not_suit_is_named_with_what_it_should_be(
    wrong: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build_module(wrong, VECTOR, TWO, {})
