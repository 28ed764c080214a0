"""NumPy is believed only after torch has said the same."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.array_modules import ROWS, InTorch, built, only_numpy, seen
from torch import nn

from juggler.runtime.modules import numpy_pass
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.numpy_pass import LiveWeights, _Categorical

NUMBERS = spaces.Box(-2, 2, (6,), np.float32)
THREE = spaces.Discrete(3)
NOISE = 9 * np.sin(np.arange(3.0 * ROWS, dtype=np.float32)).reshape(ROWS, 3)


def same_as_torch(arrays: ArrayModule, twin: Any, step: int) -> bool:
    got = arrays.explore(seen(NUMBERS, step), {}, NOISE)
    expected = InTorch(twin).step("exploration", seen(NUMBERS, step), None, NOISE)
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
    module, twin = built(None, NUMBERS, THREE)
    monkeypatch.setitem(numpy_pass._LAYERS, nn.Linear, off_by(0.01, [*range(99)]))
    arrays = ArrayModule(module)
    assert all(same_as_torch(arrays, twin, step) for step in range(5))
    assert arrays.differed
    expected = "ActorCritic acts in torch from now on, since NumPy did something else: "
    assert arrays.note == expected + "its inputs differ by 0.01"


def test_a_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = built(None, NUMBERS, THREE)
    monkeypatch.setitem(numpy_pass._LAYERS, nn.Linear, off_by(1e-5, [*range(99)]))
    arrays = ArrayModule(module)
    for step in range(3):
        arrays.explore(seen(NUMBERS, step), {}, NOISE)
    assert not arrays.note


def test_a_single_difference_is_a_rounding_that_decided_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, twin = built(None, NUMBERS, THREE)
    monkeypatch.setitem(numpy_pass._LAYERS, nn.Linear, off_by(0.01, [0]))
    arrays = ArrayModule(module)
    assert all(same_as_torch(arrays, twin, step) for step in range(3))
    assert not arrays.note
    only_numpy(arrays)
    assert same_as_torch(arrays, twin, 3)


def test_a_distribution_that_draws_something_else_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, twin = built(None, NUMBERS, THREE)
    monkeypatch.setattr(_Categorical, "sample", lambda self, inputs, noise: self.mode(inputs))
    arrays = ArrayModule(module)
    assert all(same_as_torch(arrays, twin, step) for step in range(3))
    assert "its actions differ by" in arrays.note


def test_a_pass_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(layer: Any, live: Any) -> Any:
        return lambda x: x.nothing

    module, twin = built(None, NUMBERS, THREE)
    monkeypatch.setitem(numpy_pass._LAYERS, nn.Linear, fails)
    arrays = ArrayModule(module)
    assert all(same_as_torch(arrays, twin, step) for step in range(3))
    assert "NumPy fails (AttributeError" in arrays.note


def other_weights(module: Any, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.normal(0, 0.5, tensor.shape).astype(np.float32)
        for name, tensor in module.state_dict().items()
    }


def test_weights_that_do_not_reach_numpy_are_found_with_the_first_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, twin = built(None, NUMBERS, THREE)
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
    assert arrays.differed


@pytest.mark.parametrize("in_place", [False, True])
def test_new_weights_are_used_and_compared_ever_more_seldom(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, twin = built(None, NUMBERS, THREE)
    arrays, compared = ArrayModule(module), []
    compare = arrays._compared
    monkeypatch.setattr(arrays, "_compared", lambda *a: compared.append(update) or compare(*a))
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
    """Whoever reads the log-probabilities finds out."""
    module, twin = built(None, NUMBERS, spaces.Box(-1, 1, (2,), np.float32))
    for each in (module, twin):
        each.get_parameter("policy_head.log_std").data.fill_(100.0)
    arrays, noise = ArrayModule(module), NOISE[:, :2]
    for step in range(2):
        got = arrays.explore(seen(NUMBERS, step), {}, noise).actions
        expected = InTorch(twin).step("exploration", seen(NUMBERS, step), None, noise)[0]
        np.testing.assert_array_equal(got, expected)
        assert not np.isfinite(got).all()
    assert not arrays.note


def test_a_copy_has_weights_of_its_own() -> None:
    module, twin = built(None, NUMBERS, THREE)
    arrays = ArrayModule(module)
    copy = deepcopy(arrays)
    arrays.load(other_weights(module, 1))
    assert same_as_torch(copy, twin, 0)
    only_numpy(copy)
    assert same_as_torch(copy, twin, 1)
    assert not same_as_torch(arrays, twin, 1)


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
    module, twin = built(None, NUMBERS, THREE)
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
    module, twin = built(None, NUMBERS, THREE)
    arrays = ArrayModule(module)
    assert same_as_torch(arrays, twin, 0)
    monkeypatch.setattr(_Categorical, "sample", lambda *_: [][0])
    assert same_as_torch(arrays, twin, 1)
    assert arrays.differed
    assert "NumPy fails (IndexError" in arrays.note


def test_specs_may_be_checked_later() -> None:
    module, _ = built(None, NUMBERS, THREE)
    arrays = ArrayModule(module)
    arrays.explore(seen(NUMBERS, 0), {}, NOISE)
    module.check_specs = True
    with pytest.raises(ValueError, match="must be a tensor"):
        arrays.explore(seen(NUMBERS, 0).astype(np.float64), {}, NOISE)


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
def test_no_rows_are_fine_in_numpy(recurrent: str) -> None:
    module, _ = built(None, NUMBERS, THREE, recurrent=recurrent)
    arrays = ArrayModule(module)
    arrays.infer(seen(NUMBERS, 0), arrays.initial_states(ROWS))
    only_numpy(arrays)
    assert arrays.infer(seen(NUMBERS, 0)[:0], arrays.initial_states(0)).actions.shape == (0,)
    assert not arrays.note
