"""MultiRLModule: modules by id, alone or with parts that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.module_spec import RLModuleSpec
from juggler.runtime.modules.multi_rl_module import MultiRLModule, MultiRLModuleSpec
from juggler.runtime.modules.rl_module import Batch, RLModule

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
TWO, THREE = spaces.Discrete(2), spaces.Discrete(3)
GLOBAL_LOCAL = spaces.Dict({"global": VECTOR, "local": spaces.Box(-1, 1, (2,), np.float32)})


class GlobalLocal(RLModule):
    """The global part through an encoder that others have too, the local part through its own."""

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
    with pytest.raises(ValueError, match="there is a module 'left' already"):
        multi.add("left", default())
    wrong: Any = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="module 'right' is a Linear, not an RLModule"):
        multi.add("right", wrong)
    with pytest.raises(KeyError, match="no module 'lift': did you mean 'left'"):
        multi({"lift": seen()})
    with pytest.raises(KeyError, match="no module 'lift'"):
        multi.remove("lift")


def test_independent_modules_share_nothing() -> None:
    multi = MultiRLModule({"a": default(), "b": default(), "c": default()})
    assert multi.shared_parts() == {}


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
    for multi_module in (SharedEncoder, "test_multi_rl_module:SharedEncoder"):
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
