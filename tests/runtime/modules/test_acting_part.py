"""What is published for acting, and what a runner does without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from juggler.runtime.modules.acting_part import acting_names, strip_to_acting
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import Batch, RLModule

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
TWO = spaces.Discrete(2)
BATCH = {"observations": torch.ones(3, 4)}


class WithCritic(RLModule):
    """Policy, critic and a temperature; `training_only` is the test's to say."""

    def __init__(self, *training_only: str, shared: str = "") -> None:
        super().__init__(VECTOR, TWO, {})
        self.training_only = training_only
        trunk = nn.Linear(4, 4)
        if shared == "critic first":
            self.critic = nn.ModuleDict({"trunk": trunk, "head": nn.Linear(4, 1)})
        self.trunk = trunk
        self.policy = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))
        if shared != "critic first":
            critic_trunk = trunk if shared else nn.Linear(4, 4)
            self.critic = nn.ModuleDict({"trunk": critic_trunk, "head": nn.Linear(4, 1)})
        self.temperature = nn.Parameter(torch.ones(()))

    def _forward(self, batch: Batch) -> dict[str, Any]:
        return {"action_dist_inputs": self.policy(self.trunk(batch["observations"]))}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        values = self.critic["head"](self.critic["trunk"](batch["observations"])).squeeze(-1)
        return {**self._forward(batch), "values": values * self.temperature}


ACTING = {"trunk.weight", "trunk.bias", "policy.weight", "policy.bias", "seen"}


def test_everything_is_for_acting_unless_the_module_says_otherwise() -> None:
    module = WithCritic()
    assert len(acting_names(module)) == 10
    strip_to_acting(module)
    assert module.forward_train(BATCH)["values"].shape == (3,)


@pytest.mark.parametrize("shared", ["", "policy first"])
def test_what_training_alone_needs_is_not_among_the_acting_names(shared: str) -> None:
    assert set(acting_names(WithCritic("critic", "temperature", shared=shared))) == ACTING
    names = acting_names(WithCritic("critic.head", shared=shared))
    assert ("critic.trunk.weight" in names) == (not shared)
    assert "critic.head.weight" not in names


def test_a_stripped_module_has_the_acting_names_and_acts_as_before() -> None:
    module = WithCritic("critic", "temperature")
    before = module.forward_exploration(BATCH)["action_dist_inputs"]
    names = acting_names(module)
    strip_to_acting(module)
    left = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    assert left == names == acting_names(module)
    assert torch.equal(module.eval().forward_exploration(BATCH)["action_dist_inputs"], before)
    strip_to_acting(module)  # once more changes nothing


@pytest.mark.parametrize("part", ["critic", "critic.head", "critic.head.weight", "temperature"])
def test_a_pass_that_uses_a_stripped_part_says_so(part: str) -> None:
    module = WithCritic(part)
    strip_to_acting(module)
    with pytest.raises((RuntimeError, AttributeError, TypeError)) as caught:
        module.forward_train(BATCH)
    assert f"WithCritic.{part} is in training_only" in str(caught.value)


def test_the_default_module_acts_without_values() -> None:
    module = build_module(None, VECTOR, TWO, {})
    assert all(not name.startswith("value_") for name in acting_names(module))
    strip_to_acting(module)
    assert module.forward_inference(BATCH)["action_dist_inputs"].shape == (3, 2)
    with pytest.raises(RuntimeError, match=r"ActorCritic.value_encoder is in"):
        module.forward_train(BATCH)


def test_a_part_that_is_not_there_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="no such part 'critik': did you mean 'critic'"):
        acting_names(WithCritic("critik"))
    with pytest.raises(ValueError, match=r"no such part 'critic.hat': did you mean 'critic.head'"):
        strip_to_acting(WithCritic("critic.hat"))


def test_a_shared_part_must_not_go_by_a_training_only_name() -> None:
    with pytest.raises(ValueError, match=r"shares 'critic.trunk.weight'.*'trunk.weight'"):
        acting_names(WithCritic("critic", shared="critic first"))
