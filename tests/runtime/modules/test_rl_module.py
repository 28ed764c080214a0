"""RLModule: passes around a subclass's, specs, masks and distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from juggler.runtime.modules.acting_part import acting_names, strip_to_acting
from juggler.runtime.modules.distributions.for_space import CategoricalSpec
from juggler.runtime.modules.rl_module import (
    AnyOf,
    Batch,
    Maybe,
    RLModule,
    Spec,
    SpecError,
    TensorSpec,
    check,
)

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
TWO = spaces.Discrete(2)
PASSES = ("inference", "exploration", "train")


class Scripted(RLModule):
    """Returns what a function makes of the batch."""

    def __init__(
        self,
        outputs: Callable[[Batch], dict[str, Any]],
        observation_space: gymnasium.Space[Any] = VECTOR,
        action_space: gymnasium.Space[Any] = TWO,
        state: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(observation_space, action_space, {})
        self.outputs, self.state = outputs, state or {}

    def get_initial_state(self) -> dict[str, Any]:
        return self.state

    def _forward(self, batch: Batch) -> dict[str, Any]:
        return self.outputs(batch)


def good(batch: Batch) -> dict[str, Any]:
    return {"action_dist_inputs": torch.zeros(len(batch["observations"]), 2)}


def observations(*shape: int) -> dict[str, Any]:
    return {"observations": torch.zeros(*shape)}


def test_a_module_without_a_forward_pass_says_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="RLModule must define _forward"):
        RLModule(VECTOR, TWO, {}).forward_train(observations(1, 4))


@pytest.mark.parametrize("use", PASSES)
def test_a_wrong_input_and_a_wrong_output_are_named_in_the_first_call(use: str) -> None:
    for outputs, batch, said in (
        (good, observations(3, 5), f"'observations' in the input of Scripted.forward_{use}"),
        (
            lambda _: {"action_dist_inputs": torch.zeros(4, 2)},
            observations(3, 4),
            f"the output of Scripted.forward_{use}",
        ),
        (lambda _: {"actions": torch.zeros(3, 1)}, observations(3, 4), "'actions' in the output"),
    ):
        with pytest.raises(SpecError) as caught:
            getattr(Scripted(outputs), f"forward_{use}")(batch)
        assert said in str(caught.value)


@pytest.mark.parametrize("use", ["inference", "exploration"])
def test_who_acts_must_return_actions_or_their_distribution(use: str) -> None:
    module = Scripted(lambda batch: {"logits": torch.zeros(3, 2)})
    with pytest.raises(SpecError) as caught:
        getattr(module, f"forward_{use}")(observations(3, 4))
    assert str(caught.value) == (
        f"the output of Scripted.forward_{use} must have 'action_dist_inputs', a tensor [b, 2] of "
        "dtype floating or 'actions', a tensor [b]; it has 'logits'"
    )


def test_actions_alone_do_where_no_distribution_is_there_for_the_space() -> None:
    whole = spaces.Box(-3, 3, (2,), np.int64)
    module = Scripted(lambda batch: {"actions": torch.zeros(3, 2)}, action_space=whole)
    assert module.forward_exploration(observations(3, 4))["actions"].shape == (3, 2)


def test_after_the_first_call_of_a_pass_nothing_is_checked_unless_asked() -> None:
    module = Scripted(good)
    wrong = observations(3, 5)
    module.forward_train(observations(3, 4))
    assert module.forward_train(wrong)["action_dist_inputs"].shape == (3, 2)
    with pytest.raises(SpecError):
        module.forward_inference(wrong)  # its first
    module.check_specs = True
    with pytest.raises(SpecError):
        module.forward_train(wrong)
    module.check_specs = False
    module.forward_train(wrong)


def test_a_first_call_that_failed_does_not_count() -> None:
    module = Scripted(good)
    for _ in range(2):
        with pytest.raises(SpecError):
            module.forward_train(observations(3, 5))


def test_specs_can_be_overridden() -> None:
    class Own(Scripted):
        def input_specs_train(self) -> Spec:
            return {"observations": TensorSpec("b, 4"), "goals": TensorSpec("b, g", g=2)}

        def output_specs_train(self) -> Spec:
            return ["q_values"]

    module = Own(lambda batch: {"q_values": 0} if batch["goals"].sum() else {})
    with pytest.raises(SpecError, match=r"must have 'goals', a tensor \[b, g=2\]"):
        module.forward_train(observations(3, 4))
    goals = {**observations(3, 4), "goals": torch.zeros(3, 2)}
    with pytest.raises(SpecError, match="must have 'q_values'; it has nothing"):
        module.forward_train(goals)
    module.forward_train({**goals, "goals": torch.ones(3, 2)})


def test_nested_observations_and_actions_are_checked_leaf_by_leaf() -> None:
    nested = spaces.Dict(pair=spaces.Tuple([VECTOR, TWO]))
    acts = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
    actions = {"0": torch.zeros(3, dtype=torch.int64), "1": torch.zeros(3, 2)}
    module = Scripted(lambda batch: {"actions": actions}, nested, acts)
    pair = {"0": torch.zeros(3, 4), "1": torch.zeros(3, dtype=torch.int64)}
    module.forward_exploration({"observations": {"pair": pair}})
    with pytest.raises(SpecError, match=r"'observations/pair' in .* must have '1'"):
        module.forward_train({"observations": {"pair": {"0": torch.zeros(3, 4)}}})
    del actions["1"]
    with pytest.raises(SpecError, match=r"'actions' in .* must have '1'"):
        module.forward_inference({"observations": {"pair": pair}})


def test_a_module_with_a_state_has_a_dimension_of_time_and_returns_its_state() -> None:
    def remember(batch: Batch) -> dict[str, Any]:
        seen = batch["states"]["sum"] + batch["observations"].sum(1)  # [B, 4]
        return {"action_dist_inputs": torch.zeros(3, 5, 2), "states": {"sum": seen}}

    module = Scripted(remember, state={"sum": torch.zeros(4)})
    batch = {**observations(3, 5, 4), "states": {"sum": torch.zeros(3, 4)}}
    assert module.forward_exploration(batch)["states"]["sum"].shape == (3, 4)
    with pytest.raises(SpecError, match="must have 'states'; it has 'observations'"):
        module.forward_train(observations(3, 5, 4))
    with pytest.raises(SpecError, match=r"must be a tensor \[b, t, 4\]"):
        module.forward_train(observations(3, 4))
    forgets = Scripted(
        lambda batch: {"action_dist_inputs": torch.zeros(3, 5, 2)}, state={"sum": torch.zeros(4)}
    )
    with pytest.raises(SpecError, match=r"the output of .* must have 'states'"):
        forgets.forward_exploration(batch)


MASKED = spaces.Dict(observation=VECTOR, action_mask=spaces.Box(0, 1, (2,), np.int8))


@pytest.mark.parametrize("use", PASSES)
def test_illegal_actions_get_no_probability_in_any_pass_and_any_call(use: str) -> None:
    module = Scripted(
        lambda batch: {"action_dist_inputs": torch.zeros(2, 2), "values": torch.zeros(2)}, MASKED
    )
    mask = torch.tensor([[1, 0], [1, 1]], dtype=torch.int8)
    batch = {"observations": {"observation": torch.zeros(2, 4), "action_mask": mask}}
    for _ in range(3):
        outputs = getattr(module, f"forward_{use}")(batch)
        probabilities = outputs["action_dist_inputs"].softmax(-1)
        assert torch.equal(probabilities, torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        assert outputs["values"].shape == (2,)


def three_of_two(action_space: Any, squash: bool = False) -> CategoricalSpec:
    assert isinstance(action_space, spaces.Discrete)
    return CategoricalSpec(3 + squash)


@pytest.mark.parametrize("make", [three_of_two, "test_rl_module:three_of_two"])
def test_a_distribution_of_ones_own_comes_with_the_model_config(make: object) -> None:
    assert RLModule(VECTOR, TWO, {"distribution": make}).action_distribution().inputs_size == 3
    squashed = RLModule(VECTOR, TWO, {"distribution": make, "squash": True})
    assert squashed.action_distribution().inputs_size == 4


def test_what_makes_no_distribution_is_refused() -> None:
    module = RLModule(VECTOR, TWO, {"distribution": lambda space: "Laplace"})
    with pytest.raises(TypeError, match="made a str: it must make a"):
        module.action_distribution()
    nowhere = RLModule(VECTOR, TWO, {"distribution": "test_rl_module:three_of_too"})
    with pytest.raises(ValueError, match="did you mean 'three_of_two'"):
        nowhere.action_distribution()


# Specs: what they accept, and what they say about what they do not.


SHAPED = TensorSpec("b, t, h", h=64)


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (torch.zeros(3, 5, 64), SHAPED),
        (torch.zeros(3, 64), TensorSpec("b, 64")),
        (torch.tensor(1.0), TensorSpec("")),
        (torch.zeros(2, dtype=torch.bfloat16), TensorSpec("b", dtype="floating")),
        (torch.zeros(2, dtype=torch.uint8), TensorSpec("b", dtype="integer")),
        (torch.zeros(2, dtype=torch.int64), TensorSpec("b", dtype=np.int64)),
        (torch.zeros(2, dtype=torch.int64), TensorSpec("b", dtype="int64")),
        ("text", str),
        ({"a": 1, "more": 2}, {"a": int}),
        ({}, {"a": Maybe(int)}),
        ({"a": {"b": object()}}, ["a", ("a", "b")]),
        ({"a": 1}, ["a", {"a": int}]),
        ({"b": 1}, AnyOf({"a": int, "b": int})),
        (object(), None),
    ],
)
def test_what_is_as_its_spec_says_passes(value: object, spec: Spec) -> None:
    check(value, spec, "it")


@pytest.mark.parametrize(
    ("value", "spec", "said"),
    [
        (torch.zeros(3, 5, 63), SHAPED, "it must be a tensor [b, t, h=64]"),
        (torch.zeros(3, 5), SHAPED, "but is a tensor [3, 5] of dtype float32"),
        (torch.zeros(3, 63), TensorSpec("b, 64"), "must be a tensor [b, 64], but is"),
        (np.zeros((3, 64)), TensorSpec("b, 64"), "but is a NumPy array [3, 64] of"),
        (
            torch.zeros(3, dtype=torch.int64),
            TensorSpec("b", dtype="floating"),
            "must be a tensor [b] of dtype",
        ),
        (torch.zeros(3), TensorSpec("b", dtype=torch.float64), "of dtype float64, but is a tensor"),
        (3, TensorSpec("b"), "it must be a tensor [b], but is"),
        (3, str, "it must be of type str, but is of type int"),
        (3, {"a": None}, "it must be a map with 'a', but is"),
        ({"b": 1}, {"a": None}, "it must have 'a'; it has 'b'"),
        ({}, ["a"], "it must have 'a'; it has nothing"),
        ({"a": {"c": 1}}, [("a", "b")], "'a' in it must have 'b'; it has 'c'"),
        (
            {"a": {"b": torch.zeros(2, 3)}},
            {"a": {"b": TensorSpec("b, 4")}},
            "'a/b' in it must be a tensor",
        ),
        ({"x": 1}, {"a": TensorSpec("b, d", d=4)}, "it must have 'a', a tensor"),
        ({"a": "one"}, {"a": Maybe(int)}, "'a' in it must be of type int"),
        ({"c": 1}, AnyOf({"a": TensorSpec("b"), "b": int}), "it must have 'a', a tensor [b] or"),
        (3, AnyOf({"a": int, "b": int}), "it must be a map with 'a' or 'b', but is of type int"),
        ({"a": "one", "b": 1}, AnyOf({"a": int, "b": int}), "'a' in it must be of type int"),
        ({"a": 1}, [{"a": int}, "b"], "it must have 'b'; it has 'a'"),
    ],
)
def test_a_violation_names_the_key_what_was_expected_and_what_came(
    value: object, spec: Spec, said: str
) -> None:
    with pytest.raises(SpecError) as caught:
        check(value, spec, "it")
    assert said in str(caught.value)


def test_dimensions_of_one_name_are_equal_within_one_check() -> None:
    spec = {"x": TensorSpec("b, f"), "y": {"z": TensorSpec("b")}}
    check({"x": torch.zeros(3, 2), "y": {"z": torch.zeros(3)}}, spec, "it")
    with pytest.raises(SpecError) as caught:
        check({"x": torch.zeros(3, 2), "y": {"z": torch.zeros(4)}}, spec, "it")
    said = str(caught.value)
    assert "'y/z' in it must be a tensor [b], but is a tensor [4]" in said
    assert said.endswith("b is 3 in 'x' in it")


@pytest.mark.parametrize(
    ("shape", "sizes", "said"),
    [
        ("b, t h", {}, "'t h' is neither a name nor a size"),
        ("b,, h", {}, "'' is neither a name nor a size"),
        ("b, -1", {}, "'-1' is neither"),
        ("b, t", {"h": 3}, "has no dimension 'h'"),
    ],
)
def test_a_shape_that_is_not_one_is_refused(shape: str, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TensorSpec(shape, **sizes)


def test_what_is_no_spec_is_told_apart_from_a_violation() -> None:
    wrong: Any = {"a": 3}
    with pytest.raises(TypeError, match="a spec of 'a' in it is of type int"):
        check({"a": 3}, wrong, "it")


# What is published for acting, and what a runner does without.


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


def test_a_part_that_is_not_there_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="no such part 'critik': did you mean 'critic'"):
        acting_names(WithCritic("critik"))
    with pytest.raises(ValueError, match=r"no such part 'critic.hat': did you mean 'critic.head'"):
        strip_to_acting(WithCritic("critic.hat"))


def test_a_shared_part_must_not_go_by_a_training_only_name() -> None:
    with pytest.raises(ValueError, match=r"shares 'critic.trunk.weight'.*'trunk.weight'"):
        acting_names(WithCritic("critic", shared="critic first"))
