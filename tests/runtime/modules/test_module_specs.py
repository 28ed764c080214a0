"""Modules by name, class, factory, catalog and spec; errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.runtime.modules.config import ModelConfig, ModuleConfig
from juggler.runtime.modules.distributions.for_space import CategoricalSpec
from juggler.runtime.modules.import_by_name import ImportFailed
from juggler.runtime.modules.models import ActorCritic, Catalog
from juggler.runtime.modules.module_specs import (
    MultiRLModule,
    MultiRLModuleSpec,
    RLModuleSpec,
    build_module,
)
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.errors import UnsupportedSpace

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
TWO = spaces.Discrete(2)


def not_a_module(observation_space: Any, action_space: Any, model_config: Any) -> Any:
    return torch.nn.Linear(1, 1)


class Constant(RLModule):
    """The same answer in all passes."""

    def _forward(self, batch: Batch) -> dict[str, Any]:
        return {"action_dist_inputs": torch.zeros(len(batch["observations"]), 2)}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Python module on the path, with a broken one beside it."""
    (tmp_path / "my_modules_for_test.py").write_text(
        "from juggler.runtime.modules.models import Catalog\n"
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


def test_a_module_that_ships_is_found_under_the_name_that_earlier_versions_wrote() -> None:
    name = ModuleConfig(module="juggler.runtime.modules.soft_actor_critic:SoftActorCritic").module
    assert name == "juggler:SoftActorCritic" == ALGORITHMS["sac"].module
    assert type(build_module(name, VECTOR, TWO, {})).__name__ == "SoftActorCritic"


def test_a_class_or_a_callable_makes_a_module() -> None:
    assert isinstance(build_module(Constant, VECTOR, TWO, {"any": "thing"}), Constant)
    assert isinstance(build_module(lambda o, a, c: Constant(o, a, c), VECTOR, TWO, {}), Constant)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (torch.nn.Linear, "the class Linear derives from"),
        ("torch.nn:Linear", "module 'torch.nn:Linear': the"),
        (torch.nn.Linear(4, 2), "this Linear is already built, and"),
        (Constant(VECTOR, TWO, {}), "this Constant is already built"),
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


def test_a_distribution_is_handed_to_the_module() -> None:
    module = build_module(None, VECTOR, TWO, {}, distribution=lambda space: CategoricalSpec(7))
    outputs = module.forward_train({"observations": torch.zeros(3, 4)})
    assert outputs["action_dist_inputs"].shape == (3, 7)


@pytest.mark.parametrize("what", ["module", "encoder", "distribution"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_package_here:Mine", "no Python module"),
        ("mine.py:Mine", "names a file instead of a Python module"),
        ("./mine:Mine", "write 'mine:Mine'$"),
        ("parts/mine.py:Mine", "write 'mine:Mine', with 'parts'"),
        ("my_modules_for_test:Yours", "has no 'Yours'"),
        ("my_modules_for_test:Mien", "has no 'Mien': did you mean 'Mine'"),
        ("my_modules_for_test:numbr", "has no 'numbr'$"),
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
    with pytest.raises(ImportFailed, match="ModuleNotFoundError") as error:
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


def test_an_encoder_that_does_not_ship_is_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="no encoder 'resnet': did you mean"):
        build_module(None, VECTOR, TWO, {"encoder": "resnet"})


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
        (spaces.Sequence(TWO), "pad them to the maximum"),
        (spaces.Graph(VECTOR, None), "pad nodes and edges"),
        (spaces.OneOf([TWO, VECTOR]), "give all of its spaces in a Tuple"),
        (spaces.Dict(a=VECTOR, b=spaces.Text(5)), "'b'"),
        (spaces.Box(0, 1, (0,)), "no elements"),
        (spaces.Dict(), "has nothing in it"),
        (spaces.Dict(action_mask=spaces.MultiBinary(2)), "only an action mask"),
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
    [(OnlyConfig, "OnlyConfig.__init__ must take"), (Forgetful, "Forgetful.__init__ must begin")],
)
def test_a_constructor_that_does_not_suit_is_named_with_what_it_should_be(
    wrong: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build_module(wrong, VECTOR, TWO, {})


# MultiRLModule: modules by id, alone or with parts that they share.


THREE = spaces.Discrete(3)
GLOBAL_LOCAL = spaces.Dict({"global": VECTOR, "local": spaces.Box(-1, 1, (2,), np.float32)})


class GlobalLocal(RLModule):
    """The global part in a shared encoder, the local one beside it."""

    def __init__(
        self, observation_space: Any, action_space: Any, model_config: Any, shared: nn.Module
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.shared = shared
        self.local = nn.Linear(2, 8)
        self.policy = nn.Linear(16, self.action_distribution().inputs_size)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        seen = batch["observations"]
        features = torch.cat([self.shared(seen["global"]), self.local(seen["local"])], -1)
        return {"action_dist_inputs": self.policy(features)}


class SharedEncoder(MultiRLModule):
    """One encoder for the global part of all modules."""

    def build(self, specs: Mapping[str, RLModuleSpec]) -> dict[str, RLModule]:
        shared = nn.Linear(4, 8)
        return {
            module_id: GlobalLocal(
                spec.observation_space, spec.action_space, spec.model_config, shared
            )
            for module_id, spec in specs.items()
        }


def default(action_space: Any = TWO, **model: Any) -> RLModuleSpec:
    return RLModuleSpec(observation_space=VECTOR, action_space=action_space, model_config=model)


def seen(rows: int = 3) -> dict[str, Any]:
    return {"observations": torch.ones(rows, 4)}


def test_modules_have_their_own_spaces_and_configs_and_pass_by_id() -> None:
    multi = MultiRLModule({"a": default(hidden_sizes=[8]), "b": default(THREE)})
    assert multi["a"].model_config == {"hidden_sizes": [8]}
    for forward in (multi.forward_inference, multi.forward_exploration, multi.forward_train, multi):
        outputs = forward({"a": seen(3), "b": seen(5)})
        assert outputs["a"]["action_dist_inputs"].shape == (3, 2)
        assert outputs["b"]["action_dist_inputs"].shape == (5, 3)
    assert multi({"b": seen()}).keys() == {"b"}


@pytest.mark.parametrize("module_id", ["forward", "keys", "a.b", "", "training", "id_a", "é %2E"])
def test_ids_are_any_strings_and_clash_with_nothing_of_torchs(module_id: str) -> None:
    multi = MultiRLModule({module_id: default()})
    multi.add("a%2Eb", default())
    assert multi({module_id: seen()})[module_id]["values"].shape == (3,)
    assert list(multi) == multi.keys() == [module_id, "a%2Eb"]
    assert len(list(multi.parameters())) == 2 * len(list(multi[module_id].parameters()))


def test_modules_come_and_go() -> None:
    multi = MultiRLModule({"default": default().build()})
    assert multi.keys() == ["default"]
    module = default(THREE).build()
    multi.add("new", module)
    assert multi["new"] is module
    assert "new" in multi
    assert multi.remove("new") is module
    assert "new" not in multi
    assert len(multi) == 1
    assert all("new" not in name for name, _ in multi.named_parameters())
    multi.add("new", default())


def test_what_cannot_be_held_is_refused() -> None:
    multi = MultiRLModule({"left": default()})
    with pytest.raises(ValueError, match="module 'left' already exists"):
        multi.add("left", default())
    wrong: Any = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="module 'right' is a Linear, not"):
        multi.add("right", wrong)
    with pytest.raises(KeyError, match="no module 'lift': did you mean 'left'"):
        multi({"lift": seen()})
    with pytest.raises(KeyError, match="no module 'lift'"):
        multi.remove("lift")


def test_a_subclass_builds_a_part_that_its_modules_share() -> None:
    spec = RLModuleSpec(observation_space=GLOBAL_LOCAL, action_space=TWO)
    multi = SharedEncoder({"a": spec, "b": spec, "alone": default().build()})
    assert multi.shared_parts() == {key: ["a", "b"] for key in ["shared.weight", "shared.bias"]}
    batch = {"observations": {"global": torch.randn(3, 4), "local": torch.randn(3, 2)}}
    outputs = multi({"a": batch, "b": batch})
    sum(each["action_dist_inputs"].sum() for each in outputs.values()).backward()
    assert multi["a"].shared is multi["b"].shared
    assert multi["a"].shared.weight.grad.abs().sum() > 0
    assert not torch.equal(multi["a"].local.weight, multi["b"].local.weight)


def test_parts_are_shared_name_by_name() -> None:
    modules = {name: default().build() for name in "abc"}
    modules["c"].policy_head = modules["b"].policy_head
    shared = MultiRLModule(modules).shared_parts()
    assert shared == {key: ["b", "c"] for key in ["policy_head.weight", "policy_head.bias"]}


def test_a_spec_of_several_is_completed_module_by_module() -> None:
    spec = MultiRLModuleSpec(
        modules={"a": RLModuleSpec(model_config={"hidden_sizes": [8]}), "b": RLModuleSpec()}
    )
    own = spaces.Box(-1, 1, (7,))
    multi = spec.completed({"a": VECTOR, "b": own}, TWO, {"activation": "relu"}).build()
    assert multi["a"].model_config == {"hidden_sizes": [8], "activation": "relu"}
    assert multi["b"].observation_space is own
    assert multi["b"].action_space is TWO
    assert isinstance(multi["b"], ActorCritic)
    # A Dict space is a mapping too, and still one space for all.
    nested = spec.completed(GLOBAL_LOCAL, TWO)
    assert all(each.observation_space is GLOBAL_LOCAL for each in nested.modules.values())


def test_a_spec_builds_a_class_of_ones_own_by_class_or_name() -> None:
    modules = {"a": RLModuleSpec(), "b": RLModuleSpec()}
    for multi_module in (SharedEncoder, "test_module_specs:SharedEncoder"):
        spec = MultiRLModuleSpec(modules=modules, multi_module=multi_module)
        multi = spec.completed(GLOBAL_LOCAL, TWO).build()
        assert type(multi).__name__ == "SharedEncoder"
        assert set(map(tuple, multi.shared_parts().values())) == {("a", "b")}


def test_a_spec_that_is_not_complete_or_makes_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="RLModuleSpec has no action_space"):
        MultiRLModuleSpec(modules={"a": RLModuleSpec()}).completed(VECTOR).build()
    wrong: Any = dict
    with pytest.raises(TypeError, match="made a dict, not a MultiRLModule"):
        MultiRLModuleSpec(modules={}, multi_module=wrong).build()
