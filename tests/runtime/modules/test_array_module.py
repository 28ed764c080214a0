from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.array_modules import (
    ROWS,
    InTorch,
    WithoutTorch,
    built,
    only_numpy,
    only_traced,
    seen,
    sure,
)
from torch import Tensor, nn

from juggler.runtime.modules import array_module, numpy_pass
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.distributions.for_space import CategoricalSpec
from juggler.runtime.modules.models import (
    ActorCritic,
    Catalog,
    ImplicitActorCritic,
    QNetwork,
    SoftActorCritic,
    exploration_of,
    with_own_exploration,
)
from juggler.runtime.modules.numpy_pass import LiveWeights, _Categorical
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.tracing import TraceCache
from juggler.runtime.wire.structures import tree_map

NUMBERS = spaces.Box(-2, 2, (4,), np.float32)
TREE = spaces.Dict(
    {
        "which": spaces.Discrete(3, start=2),
        "parts": spaces.Tuple(
            [
                spaces.MultiBinary(3),
                spaces.MultiDiscrete([2, 3]),
                spaces.Box(0, 255, (5,), np.uint8),
                spaces.Box(-1, 1, (2, 3), np.float64),
            ]
        ),
    }
)
BOX = spaces.Box(np.float32([-1, -3]), np.float32([1, 5]))
ONE = spaces.Box(-2, 2, (), np.float64)
SOME_BOUNDS = spaces.Box(np.float32([-1, -np.inf, 0]), np.float32([1, 5, np.inf]))
SOME_NUMBERS = spaces.Box(-np.inf, np.inf, (17,), np.float64)
IMAGE = spaces.Box(0, 255, (12, 12, 1), np.uint8)
ACTIONS = {
    "discrete": spaces.Discrete(5, start=-1),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 4], start=[0, 5, -1]),
    "multi-binary": spaces.MultiBinary([2, 3]),
    "box": spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
    "dict": spaces.Dict({"a": spaces.Tuple([BOX, spaces.Discrete(3)]), "b": spaces.MultiBinary(2)}),
}


def masked(shape: Any) -> spaces.Dict:
    return spaces.Dict({"seen": NUMBERS, "action_mask": shape})


#: By name: module, observation space, action space, model.
CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    **{name: (None, NUMBERS, space, {}) for name, space in ACTIONS.items()},
    "squashed": (None, NUMBERS, BOX, {"squash": True, "free_log_std": False}),
    "squashed dict": (None, NUMBERS, ACTIONS["dict"], {"squash": True}),
    "some bounds": (None, SOME_NUMBERS, SOME_BOUNDS, {"squash": True}),
    "an image without convolutions": (None, IMAGE, ACTIONS["discrete"], {"encoder": "mlp"}),
    "shared layers": (None, NUMBERS, ONE, {"shared_value_layers": True}),
    "iql": (ImplicitActorCritic, NUMBERS, BOX, {"initializer": "default"}),
    "no hidden layers": (None, NUMBERS, ACTIONS["box"], {"hidden_sizes": []}),
    "relu": (None, NUMBERS, ACTIONS["box"], {"activation": "relu", "hidden_sizes": [8]}),
    "tree": (None, TREE, ACTIONS["discrete"], {}),
    "discrete observations": (None, spaces.Discrete(4, start=1), ACTIONS["discrete"], {}),
    "lstm": (None, NUMBERS, ACTIONS["discrete"], {"recurrent": "lstm"}),
    "gru of a tree": (None, TREE, ACTIONS["dict"], {"recurrent": "gru", "recurrent_size": 7}),
    "mask": (None, masked(spaces.MultiBinary(5)), ACTIONS["discrete"], {}),
    "mask, lstm": (
        None,
        masked(spaces.MultiBinary(9)),
        ACTIONS["multi-discrete"],
        {"recurrent": "lstm"},
    ),
    "mask of bits": (None, masked(spaces.MultiBinary([2, 3])), ACTIONS["multi-binary"], {}),
    "mask of a dict": (
        None,
        masked(spaces.Dict({"b": spaces.MultiBinary(2)})),
        ACTIONS["dict"],
        {},
    ),
    "dqn": (QNetwork, NUMBERS, ACTIONS["discrete"], {}),
    "dqn, mask": (QNetwork, masked(spaces.MultiBinary(5)), ACTIONS["discrete"], {}),
    "dqn, atoms": (QNetwork, masked(spaces.MultiBinary(5)), ACTIONS["discrete"], {"atoms": 11}),
    "dqn, dueling": (
        QNetwork,
        masked(spaces.MultiBinary(5)),
        ACTIONS["discrete"],
        {"dueling": True, "activation": "relu"},
    ),
    "dqn, dueling, atoms, lstm": (
        QNetwork,
        NUMBERS,
        ACTIONS["discrete"],
        {"dueling": True, "atoms": 11, "recurrent": "lstm"},
    ),
    "dqn, gru": (QNetwork, NUMBERS, ACTIONS["discrete"], {"recurrent": "gru"}),
    "sac": (SoftActorCritic, TREE, BOX, {}),
    "sac, discrete": (SoftActorCritic, NUMBERS, ACTIONS["discrete"], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_module_in_numpy_does_what_it_does_in_torch(case: str) -> None:
    kind, space, actions, model = CASES[case]
    module, twin = built(kind, space, actions, **model)
    arrays, reference = ArrayModule(module, ROWS), InTorch(twin)
    spec = twin.action_distribution()
    generator = torch.Generator().manual_seed(1)
    sure(arrays, seen(space, 99), spec.draw_noise((ROWS,), generator).numpy())
    only_numpy(arrays)
    states = arrays.initial_states(ROWS)
    for step in range(6):
        use = "exploration" if step < 4 else "inference"
        observations = seen(space, step)
        first = np.arange(ROWS) % 3 == step % 3
        noise = spec.draw_noise((ROWS,), generator).numpy()
        states = arrays.restarted(states, first)
        if use == "exploration":
            got = arrays.explore(observations, states, noise)
        else:
            got = arrays.infer(observations, states)
        states = got.states
        expected = reference.step(use, observations, first, noise)
        tree_map(alike, by_name(got), by_name(expected))
        with torch.inference_mode():
            chosen = tree_map(torch.tensor, got.actions)
            logp, its = (
                spec(torch.tensor(inputs)).log_prob(chosen) for inputs in (got.inputs, expected[1])
            )
        np.testing.assert_allclose(logp, its, rtol=1e-4, atol=1e-4)
    with WithoutTorch():  # not even one operation of a distribution
        arrays.explore(observations, states, noise)
        arrays.infer(observations, states)


def by_name(step: Any) -> dict[str, Any]:
    return dict(zip(("actions", "inputs", "states"), step, strict=True))


def alike(one: Any, other: Any) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_observations_that_are_not_in_the_space_are_refused() -> None:
    module, _ = built(None, spaces.Discrete(4, start=1), ACTIONS["discrete"])
    arrays, noise = ArrayModule(module, 2), np.zeros((2, 5), np.float32)
    arrays.explore(np.array([1, 4]), {}, noise)
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="not in Discrete"):
            arrays.explore(np.array([1, wrong]), {}, noise)
    only_numpy(arrays)
    arrays.explore(np.array([1, 4]), {}, noise)


class Own(ActorCritic):
    def _forward(self, batch: Any) -> Any:
        return super()._forward(batch)


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def _with_a_part_of_ones_own(module: Any) -> None:
    module.encoder = nn.Sequential(module.encoder, Halved())


def _with_a_hook(module: Any) -> None:
    module.encoder[0].register_forward_hook(lambda layer, given, output: output.sin())


def _with_a_forward_of_its_own(module: Any) -> None:
    module.encoder.forward = module.encoder.forward


CHANGES = [_with_a_part_of_ones_own, _with_a_hook, _with_a_forward_of_its_own]


@pytest.mark.parametrize("kind", ["an image", Own, *CHANGES])
def test_convolutions_and_code_of_ones_own_act_in_torch_without_a_word(kind: Any) -> None:
    space = IMAGE if kind == "an image" else NUMBERS
    module, twin = built(Own if kind is Own else None, space, ACTIONS["discrete"])
    if kind in CHANGES:
        kind(module)
        kind(twin)
    arrays, observations = ArrayModule(module, ROWS), seen(space, 0)
    noise = np.zeros((ROWS, 5), np.float32)
    expected = InTorch(twin).step("exploration", observations, None, noise)
    for _ in range(2):
        got = arrays.explore(observations, {}, noise)
        np.testing.assert_array_equal(got.inputs, expected[1])
    assert not arrays.note
    only_numpy(arrays)
    with pytest.raises(AssertionError, match="torch acted"):
        arrays.infer(observations, {})


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("case", ["dqn", "dqn, mask", "dqn, gru"])
def test_rows_that_explore_each_in_their_own_way_need_no_torch(case: str, rows: int) -> None:
    kind, space, actions, model = CASES[case]
    module, _ = built(kind, space, actions, **model)
    with_own_exploration(module, rows)
    module.get_buffer(exploration_of(module)).uniform_(0.1, 0.9)
    arrays = ArrayModule(module, rows)
    noise = module.action_distribution().draw_noise((rows,)).numpy()
    sure(arrays, seen(space, 1, rows), noise, rows)
    states = arrays.initial_states(rows)
    with WithoutTorch():
        arrays.explore(seen(space, 2, rows), states, noise)
        arrays.infer(seen(space, 2, rows), states)
    assert not arrays.note


# NumPy is believed only after torch has said the same.


SIX = spaces.Box(-2, 2, (6,), np.float32)
THREE = spaces.Discrete(3)
NOISE = 9 * np.sin(np.arange(3.0 * ROWS, dtype=np.float32)).reshape(ROWS, 3)


def same_as_torch(arrays: ArrayModule, twin: Any, step: int) -> bool:
    got = arrays.explore(seen(SIX, step), {}, NOISE)
    expected = InTorch(twin).step("exploration", seen(SIX, step), None, NOISE)
    alike = np.allclose(got.inputs, expected[1], rtol=1e-5, atol=1e-5)
    return bool(alike and (got.actions == expected[0]).all())


def off_by(amount: float, calls: list[int]) -> Any:
    """A linear layer that is wrong in the calls with these numbers."""
    right, count = numpy_pass._LAYERS[nn.Linear], iter(range(99))

    def make(layer: Any, live: Any) -> Any:
        run = right(layer, live)
        return lambda x: run(x) + np.float32(amount if next(count) in calls else 0)

    return make


def test_a_pass_that_does_something_else_is_given_up_before_it_has_acted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, twin = built(None, SIX, THREE)
    monkeypatch.setitem(numpy_pass._LAYERS, nn.Linear, off_by(0.01, [*range(99)]))
    arrays = ArrayModule(module)
    assert all(same_as_torch(arrays, twin, step) for step in range(5))
    assert arrays.note
    expected = "ActorCritic acts in torch from now on, since NumPy gave other results: "
    assert arrays.note == expected + "its inputs differ by 0.01"


def test_a_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = built(None, SIX, THREE)
    monkeypatch.setitem(numpy_pass._LAYERS, nn.Linear, off_by(1e-5, [*range(99)]))
    arrays = ArrayModule(module)
    for step in range(3):
        arrays.explore(seen(SIX, step), {}, NOISE)
    assert not arrays.note


def test_a_single_difference_is_a_rounding_that_decided_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, twin = built(None, SIX, THREE)
    monkeypatch.setitem(numpy_pass._LAYERS, nn.Linear, off_by(0.01, [0]))
    arrays = ArrayModule(module)
    assert all(same_as_torch(arrays, twin, step) for step in range(3))
    assert not arrays.note
    only_numpy(arrays)
    assert same_as_torch(arrays, twin, 3)


def other_weights(module: Any, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.normal(0, 0.5, tensor.shape).astype(np.float32)
        for name, tensor in module.state_dict().items()
    }


def test_weights_that_do_not_reach_numpy_are_found_with_the_first_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, twin = built(None, SIX, THREE)
    arrays = ArrayModule(module)
    assert same_as_torch(arrays, twin, 0)
    assert not arrays.note
    follow = LiveWeights.follow

    def forgets(self: LiveWeights) -> bool:
        monkeypatch.setattr(self, "_transposed", [])
        return follow(self)

    monkeypatch.setattr(LiveWeights, "follow", forgets)
    weights = other_weights(module, 1)
    arrays.load(weights)
    twin.load_state_dict({name: torch.tensor(each) for name, each in weights.items()})
    assert all(same_as_torch(arrays, twin, step) for step in range(3))
    assert arrays.note


@pytest.mark.parametrize("in_place", [False, True])
def test_new_weights_are_used_and_compared_ever_more_seldom(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, twin = built(None, SIX, THREE)
    arrays, compared = ArrayModule(module), []
    compare = array_module._difference
    monkeypatch.setattr(
        array_module, "_difference", lambda *a: compared.append(update) or compare(*a)
    )
    for update in range(20):
        if update:
            weights = other_weights(module, update)
            twin.load_state_dict({name: torch.tensor(each) for name, each in weights.items()})
            if in_place:
                module.load_state_dict(twin.state_dict())
            else:
                arrays.load(weights)
        for step in range(2):
            assert same_as_torch(arrays, twin, step)
    assert compared == [0, 1, 2, 4, 8, 16]


def test_what_is_not_finite_passes_as_in_torch() -> None:
    """Reading the log-probabilities raises the error."""
    module, twin = built(None, SIX, spaces.Box(-1, 1, (2,), np.float32))
    for each in (module, twin):
        each.get_parameter("policy_head.log_std").data.fill_(100.0)
    arrays, noise = ArrayModule(module), NOISE[:, :2]
    for step in range(2):
        got = arrays.explore(seen(SIX, step), {}, noise).actions
        expected = InTorch(twin).step("exploration", seen(SIX, step), None, noise)[0]
        np.testing.assert_array_equal(got, expected)
        assert not np.isfinite(got).all()
    assert not arrays.note


def _through_data(module: Any) -> None:
    for each in module.parameters():
        each.data.mul_(-1)


def _from_a_vector(module: Any) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(-vector, module.parameters())


def _assigned(module: Any) -> None:
    module.load_state_dict({k: -each for k, each in module.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [_through_data, _from_a_vector, _assigned])
def test_shared_weights_may_change_in_any_way(change: Any) -> None:
    module, twin = built(None, SIX, THREE)
    arrays = ArrayModule(module, shared=True)
    for step in range(2):
        assert same_as_torch(arrays, twin, step)
    for each in (module, twin):
        change(each)
    for step in range(3):
        assert same_as_torch(arrays, twin, step)
    assert not arrays.note
    only_numpy(arrays)
    assert same_as_torch(arrays, twin, 3)


def test_a_failure_of_numpy_alone_goes_on_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module, twin = built(None, SIX, THREE)
    arrays = ArrayModule(module)
    assert same_as_torch(arrays, twin, 0)
    monkeypatch.setattr(_Categorical, "sample", lambda *_: [][0])
    assert same_as_torch(arrays, twin, 1)
    assert arrays.note
    assert "NumPy fails (IndexError" in arrays.note


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
def test_no_rows_are_fine_in_numpy(recurrent: str) -> None:
    module, _ = built(None, SIX, THREE, recurrent=recurrent)
    arrays = ArrayModule(module)
    arrays.infer(seen(SIX, 0), arrays.initial_states(ROWS))
    only_numpy(arrays)
    assert arrays.infer(seen(SIX, 0)[:0], arrays.initial_states(0)).actions.shape == (0,)
    assert not arrays.note


# Users' modules act in torch, traced if their author allows it.


RISING = np.linspace(-1, 1, 3 * ROWS, dtype=np.float32).reshape(ROWS, 3)


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
    module, twin = built(kind, SIX, THREE)
    arrays, reference = traced(module), InTorch(twin)
    only_traced(arrays, seen(SIX, 0), RISING)
    states = arrays.initial_states(ROWS)
    for step in range(3):
        first = np.arange(ROWS) == step
        states = arrays.restarted(states, first)
        inputs, states = arrays.explore(seen(SIX, step), states, RISING)[1:]
        expected = reference.step("exploration", seen(SIX, step), first, RISING)[1]
        np.testing.assert_array_equal(inputs, expected)


class Chooser(Calling):
    """Chooses actions itself where it explores."""

    def _forward_exploration(self, batch: Any) -> Any:
        inputs = self.linear(batch["observations"])
        return {"actions": inputs.argmax(-1), "action_dist_inputs": inputs}

    def _forward_inference(self, batch: Any) -> Any:
        return {"action_dist_inputs": -self.linear(batch["observations"])}


def test_a_module_may_choose_actions_itself_in_one_pass_and_not_in_the_other() -> None:
    module, twin = built(Chooser, SIX, THREE)
    arrays = traced(module)
    assert not arrays.draws
    only_traced(arrays, seen(SIX, 0), None)
    x = seen(SIX, 1)
    with torch.no_grad():
        logits = twin.linear(torch.from_numpy(x))  # type: ignore[operator]
    np.testing.assert_array_equal(arrays.explore(x, {}).actions, logits.argmax(-1))
    np.testing.assert_array_equal(arrays.infer(x, {}).actions, logits.argmin(-1))


def test_a_distribution_of_ones_own_draws_in_torch_behind_a_pass_in_numpy() -> None:
    class Cold(CategoricalSpec):
        def __call__(self, inputs: Tensor) -> Any:
            return super().__call__(inputs * 5)

    module, _ = built(None, SIX, THREE, distribution=lambda space: Cold(3))
    arrays, noise = ArrayModule(module), 7 * np.sin(50 * RISING)
    sure(arrays, seen(SIX, 0), noise)
    only_numpy(arrays)
    got = arrays.explore(seen(SIX, 1), {}, noise)
    np.testing.assert_array_equal(got.actions, (5 * got.inputs + noise).argmax(-1))
    assert (got.actions != (got.inputs + noise).argmax(-1)).any()


@pytest.mark.parametrize("kind", [None, calling(lambda module, x: x)])
def test_whoever_wants_specs_checked_in_each_call_gets_torch_without_a_word(kind: Any) -> None:
    module, _ = built(kind, SIX, THREE)
    module.check_specs = True
    arrays = ArrayModule(module)
    arrays.explore(seen(SIX, 0), {}, RISING)
    assert not arrays.note
    with pytest.raises(ValueError, match="must be a tensor"):
        arrays.explore(np.zeros((ROWS, 7), np.float32), {}, RISING)


def _in_place(module: Any) -> None:
    for each in module.parameters():
        each.data.mul_(-1)


@pytest.mark.parametrize("change", [_in_place, _assigned])
def test_traced_operations_read_new_weights(change: Any) -> None:
    module, twin = built(Sequential, SIX, THREE)
    arrays = ArrayModule(module, shared=change is _assigned)
    arrays._traces = TraceCache(1, math.inf)
    for step in range(12):
        if step in (5, 6):
            for each in (module, twin):
                change(each)
        got = arrays.explore(seen(SIX, step), {}, RISING).inputs
        expected = InTorch(twin).step("exploration", seen(SIX, step), None, RISING)[1]
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
    module, twin = built(kind, SIX, THREE)
    arrays = traced(module)
    only_traced(arrays, seen(SIX, 0), RISING)
    for use in ("explore", "infer"):
        noise = (RISING,) if use == "explore" else ()
        got = getattr(arrays, use)(seen(SIX, 1), {}, *noise)
        expected = InTorch(twin).step(
            "exploration" if noise else "inference", seen(SIX, 1), None, RISING
        )
        np.testing.assert_allclose(got.inputs, expected[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got.actions, expected[0])


@pytest.mark.parametrize("kind", [Silent, WithSilent])
def test_code_whose_author_does_not_say_so_acts_in_torch_each_time(kind: Any) -> None:
    module, twin = built(kind, SIX, THREE)
    arrays = ArrayModule(module)
    acts, rounds = module.forward_exploration, []
    module.__dict__["forward_exploration"] = lambda batch: rounds.append(1) or acts(batch)
    for step in range(25):
        got = arrays.explore(seen(SIX, step), {}, RISING)
        expected = InTorch(twin).step("exploration", seen(SIX, step), None, RISING)
        np.testing.assert_array_equal(got.inputs, expected[1])
    assert len(rounds) == 25
    assert not arrays.note
