"""Users' modules act in torch, traced if their author allows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.array_modules import ROWS, InTorch, built, only_numpy, only_traced, seen, sure
from torch import Tensor, nn

from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.distributions.for_space import CategoricalSpec
from juggler.runtime.modules.models import ActorCritic, Catalog
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.tracing import TraceCache

NUMBERS = spaces.Box(-2, 2, (6,), np.float32)
THREE = spaces.Discrete(3)
NOISE = np.linspace(-1, 1, 3 * ROWS, dtype=np.float32).reshape(ROWS, 3)


def traced(module: Any) -> ArrayModule:
    """Traces the first call of each shape."""
    arrays = ArrayModule(module)
    assert arrays._traces is not None
    arrays._traces = TraceCache(1, math.inf)
    return arrays


class Calling(RLModule):
    """Does something with observations x [B, 6], and adds it to logits."""

    may_act_in_numpy = True
    what: Callable[[Any, Tensor], Tensor]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.linear = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.rand(6))
        self.register_buffer("shift", torch.rand(()))

    def _forward(self, batch: Any) -> Any:
        x = batch["observations"]
        y = type(self).what(self, x)
        y = y.reshape(x.shape[0], -1).float()[:, :1]
        return {"action_dist_inputs": self.linear(x) + y}


def calling(what: Callable[[Any, Tensor], Tensor]) -> type[Calling]:
    return type("Calling", (Calling,), {"what": what})


class Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.SiLU())

    def forward(self, features: Tensor) -> Tensor:
        return features + self.layers(features)


class Sequential(ActorCritic):
    """The default module with other parts."""

    may_act_in_numpy = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        size: Any = self.encoder.size
        more = nn.Sequential(nn.Linear(size, size), nn.ELU(), nn.Dropout(0.5), Residual(size))
        self.encoder = nn.Sequential(self.encoder, more)


class Cells(RLModule):
    """Remembers with a cell of torch, and calls its step."""

    may_act_in_numpy = True
    cell: type[nn.LSTMCell | nn.GRUCell] = nn.LSTMCell

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.step, self.head = self.cell(6, 5), nn.Linear(5, 3)

    def get_initial_state(self) -> Any:
        return {name: torch.zeros(5) for name in ("hidden", "memory")}

    def _forward(self, batch: Any) -> Any:
        x, states = batch["observations"].squeeze(1), batch["states"]
        memory = states["memory"]
        if self.cell is nn.LSTMCell:
            hidden, memory = self.step(x, (states["hidden"], memory))
        else:
            hidden = self.step(x, states["hidden"])
        inputs = self.head(hidden).unsqueeze(1)
        return {"action_dist_inputs": inputs, "states": {"hidden": hidden, "memory": memory}}


@pytest.mark.parametrize("kind", [Sequential, Cells])
def test_parts_of_torch_are_traced_wherever_they_are(kind: Any) -> None:
    module, twin = built(kind, NUMBERS, THREE)
    arrays, reference = traced(module), InTorch(twin)
    only_traced(arrays, seen(NUMBERS, 0), NOISE)
    states = arrays.initial_states(ROWS)
    for step in range(3):
        first = np.arange(ROWS) == step
        states = arrays.restarted(states, first)
        inputs, states = arrays.explore(seen(NUMBERS, step), states, NOISE)[1:]
        expected = reference.step("exploration", seen(NUMBERS, step), first, NOISE)[1]
        np.testing.assert_array_equal(inputs, expected)


class Chooser(Calling):
    """Chooses actions itself where it explores."""

    def _forward_exploration(self, batch: Any) -> Any:
        inputs = self.linear(batch["observations"])
        return {"actions": inputs.argmax(-1), "action_dist_inputs": inputs}

    def _forward_inference(self, batch: Any) -> Any:
        return {"action_dist_inputs": -self.linear(batch["observations"])}


def test_a_module_may_choose_actions_itself_in_one_pass_and_not_in_the_other() -> None:
    module, twin = built(Chooser, NUMBERS, THREE)
    arrays = traced(module)
    assert not arrays.draws
    only_traced(arrays, seen(NUMBERS, 0), None)
    x = seen(NUMBERS, 1)
    with torch.no_grad():
        logits = twin.linear(torch.from_numpy(x))  # type: ignore[operator]
    np.testing.assert_array_equal(arrays.explore(x, {}).actions, logits.argmax(-1))
    np.testing.assert_array_equal(arrays.infer(x, {}).actions, logits.argmin(-1))


def test_a_distribution_of_ones_own_draws_in_torch_behind_a_pass_in_numpy() -> None:
    class Cold(CategoricalSpec):
        def __call__(self, inputs: Tensor) -> Any:
            return super().__call__(inputs * 5)

    module, _ = built(None, NUMBERS, THREE, distribution=lambda space: Cold(3))
    arrays, noise = ArrayModule(module), 7 * np.sin(50 * NOISE)
    sure(arrays, seen(NUMBERS, 0), noise)
    only_numpy(arrays)
    got = arrays.explore(seen(NUMBERS, 1), {}, noise)
    np.testing.assert_array_equal(got.actions, (5 * got.inputs + noise).argmax(-1))
    assert (got.actions != (got.inputs + noise).argmax(-1)).any()


@pytest.mark.parametrize("kind", [None, calling(lambda module, x: x)])
def test_whoever_wants_specs_checked_in_each_call_gets_torch_without_a_word(kind: Any) -> None:
    module, _ = built(kind, NUMBERS, THREE)
    module.check_specs = True
    arrays = ArrayModule(module)
    arrays.explore(seen(NUMBERS, 0), {}, NOISE)
    assert not arrays.note
    with pytest.raises(ValueError, match="must be a tensor"):
        arrays.explore(np.zeros((ROWS, 7), np.float32), {}, NOISE)


def _in_place(module: Any) -> None:
    for each in module.parameters():
        each.data.mul_(-1)


def _assigned(module: Any) -> None:
    module.load_state_dict({k: -each for k, each in module.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [_in_place, _assigned])
def test_traced_operations_read_new_weights(change: Any) -> None:
    module, twin = built(Sequential, NUMBERS, THREE)
    arrays = ArrayModule(module, shared=change is _assigned)
    arrays._traces = TraceCache(1, math.inf)
    for step in range(12):
        if step in (5, 6):
            for each in (module, twin):
                change(each)
        got = arrays.explore(seen(NUMBERS, step), {}, NOISE).inputs
        expected = InTorch(twin).step("exploration", seen(NUMBERS, step), None, NOISE)[1]
        np.testing.assert_array_equal(got, expected)
    assert arrays._traces._traced == 1
    assert not arrays._traces._is_off


class Told(Residual):
    may_act_in_numpy = True


class Silent(RLModule):
    """Made of known parts, whose author says nothing."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.body, self.head = Residual(6), nn.Linear(6, 3)

    def _forward(self, batch: Any) -> Any:
        return {"action_dist_inputs": self.head(self.body(batch["observations"]))}


class Talking(Silent):
    """Its word is for its parts, too."""

    may_act_in_numpy = True


class WithTold(Catalog):
    part: type[Residual] = Told

    def build_policy_head(self, features: int, distribution: Any) -> nn.Module:
        return nn.Sequential(self.part(features), super().build_policy_head(features, distribution))


class WithSilent(WithTold):
    part = Residual


@pytest.mark.parametrize("kind", [Talking, WithTold])
def test_code_whose_author_says_so_is_traced(kind: Any) -> None:
    module, twin = built(kind, NUMBERS, THREE)
    arrays = traced(module)
    only_traced(arrays, seen(NUMBERS, 0), NOISE)
    for use in ("explore", "infer"):
        noise = (NOISE,) if use == "explore" else ()
        got = getattr(arrays, use)(seen(NUMBERS, 1), {}, *noise)
        expected = InTorch(twin).step(
            "exploration" if noise else "inference", seen(NUMBERS, 1), None, NOISE
        )
        np.testing.assert_allclose(got.inputs, expected[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got.actions, expected[0])


@pytest.mark.parametrize("kind", [Silent, WithSilent])
def test_code_whose_author_does_not_say_so_acts_in_torch_each_time(kind: Any) -> None:
    module, twin = built(kind, NUMBERS, THREE)
    arrays = ArrayModule(module)
    acts, rounds = module.forward_exploration, []
    module.__dict__["forward_exploration"] = lambda batch: rounds.append(1) or acts(batch)
    for step in range(25):
        got = arrays.explore(seen(NUMBERS, step), {}, NOISE)
        expected = InTorch(twin).step("exploration", seen(NUMBERS, step), None, NOISE)
        np.testing.assert_array_equal(got.inputs, expected[1])
    assert len(rounds) == 25
    assert not arrays.note
