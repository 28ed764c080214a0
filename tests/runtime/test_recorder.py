"""Recorded operations give what their function gives, bit for bit, or are not used at all."""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.algorithms import needs_memory
from support.cores import MakeBatch, make_core, samples_of
from torch import Tensor, nn

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.learner import Learner
from juggler.runtime import recorder
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.recorder import SLOW, Recordings
from juggler.runtime.wire.structures import tree_map


def learner_of(core: GradientCore, often: int | None) -> Learner:
    """A learner that records what comes so often, or nothing."""
    core._recordings = None if often is None else Recordings(often, math.inf)
    return Learner(core, seed=1)


def assert_equal(one: Any, other: Any) -> None:
    tree_map(
        lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True), one, other
    )


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [*((name, 1) for name in ALGORITHMS), ("impala", 2), ("ppo", 2), ("dqn", 2)],
)
def test_every_algorithm_learns_the_same_bit_for_bit(
    make_batch: MakeBatch, name: str, micro_batches: int
) -> None:
    plain, recorded = (
        learner_of(make_core(name, micro_batches=micro_batches), often) for often in (None, 2)
    )
    for sample in samples_of(make_batch, 8):
        assert_equal(plain.step(sample), recorded.step(sample))
    assert_equal(plain.state, recorded.state)
    recordings = recorded.core._recordings
    assert not recordings._is_off
    # A module with a state is unrolled for as many steps as the longest segment has.
    assert bool(recordings._recorded) != needs_memory(name)


def test_an_update_follows_values_in_the_place_of_schedules(make_batch: MakeBatch) -> None:
    plain, recorded = (learner_of(make_core("ppo"), often) for often in (None, 2))
    for update, sample in enumerate(samples_of(make_batch, 8)):
        for learner in (plain, recorded):
            learner.use_values({"entropy_coefficient": 0.1 * (update // 4)})
            learner.core.config.clip = 0.2 if update < 6 else 0.01
        assert_equal(plain.step(sample), recorded.step(sample))
    assert_equal(plain.state, recorded.state)


@pytest.mark.parametrize("name", ["impala", "appo"])
def test_segments_that_only_modules_with_a_state_read_make_no_other_shapes(
    make_batch: MakeBatch, name: str
) -> None:
    learner = learner_of(make_core(name), often=1)
    (sample,) = samples_of(make_batch, 1)
    fewer = {key: x[:1] if key in c.SEGMENTS else x for key, x in sample.items()}
    assert len(fewer[c.SEGMENT_ROWS]) < len(sample[c.SEGMENT_ROWS])
    for each in (sample, fewer):
        learner.step(each)
    assert len(learner.core._recordings._calls) == 1


class Own(ActorCritic):
    """A user's own module, which may read what it likes."""


def test_a_users_own_code_is_called_each_time() -> None:
    assert make_core("ppo", Own)._recordings is None
    assert make_core("ppo")._recordings is not None


def gradient_of_a_network(network: nn.Module) -> Callable[[Any], Any]:
    def function(inputs: Any) -> Any:
        loss = network(inputs["x"]).square().mean()  # []
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        return {"loss": loss.detach(), "gradients": dict(enumerate(gradients))}

    return function


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2), nn.Tanh()),
        nn.Sequential(nn.Conv1d(3, 4, 1), nn.ELU(), nn.Flatten(), nn.Linear(4, 2), nn.Softmax(-1)),
        nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.BatchNorm1d(4)).eval(),
    ],
)
def test_gradients_are_among_the_operations(network: nn.Sequential) -> None:
    recordings, function = Recordings(1, math.inf), gradient_of_a_network(network)
    for seed in range(6):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))  # [B, F]
        x = x.unsqueeze(-1) if isinstance(network[0], nn.Conv1d) else x
        assert_equal(recordings(function, {"x": x}, None), function({"x": x}))
    assert recordings._recorded == 1
    with torch.no_grad():  # without a graph there could be no gradient: nothing of this is called
        recordings(function, {"x": x}, None)


def test_other_shapes_kinds_and_names_are_other_calls() -> None:
    recordings, calls = Recordings(1, math.inf), []

    def function(inputs: Any) -> Any:
        calls.append(None)
        return {name: x.sum(0) * len(x) for name, x in inputs.items()}

    x = torch.arange(6.0).view(2, 3)  # [2, 3]
    for inputs in ({"a": x}, {"b": x}, {"a": x.t()}, {"a": x.double()}, {"a": x, "b": x + 1}):
        for _ in range(6):  # a call that is recorded, three that are compared, and two
            assert_equal(
                recordings(function, inputs, None),
                {name: each.sum(0) * len(each) for name, each in inputs.items()},
            )
    assert len(calls) == 5 * 4


def reads_a_number(x: Tensor) -> Tensor:
    return x * 2 if float(x.sum()) > 0 else x


def has_a_shape_by_numbers(x: Tensor) -> Tensor:
    return x[x > 0].sum()


def draws(x: Tensor) -> Tensor:
    return nn.functional.dropout(x)


@pytest.mark.parametrize("operation", [reads_a_number, has_a_shape_by_numbers, draws])
def test_what_other_inputs_could_change_is_not_recorded(
    operation: Callable[[Tensor], Tensor],
) -> None:
    recordings = Recordings(1, math.inf)
    for seed in range(6):
        x = torch.randn(8, generator=torch.Generator().manual_seed(seed))  # [8]
        torch.manual_seed(0)
        found = recordings(lambda inputs: {"y": operation(inputs["x"])}, {"x": x}, None)
        torch.manual_seed(0)
        assert_equal(found["y"], operation(x))
    assert recordings._recorded == 0


def test_what_the_function_decides_by_a_number_is_recorded_apart() -> None:
    recordings, calls = Recordings(1, math.inf), []

    def function(inputs: Any) -> Any:
        calls.append(None)
        return {"y": reads_a_number(inputs["x"])}

    for count in range(20):
        x = torch.full((2,), float(count % 2) - 0.5)  # [2]
        found = recordings(function, {"x": x}, None, decided=bool(x.sum() > 0))
        assert_equal(found["y"], reads_a_number(x))
    assert len(calls) == 2 * 4


def test_a_function_that_reads_more_than_its_inputs_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recordings, calls = Recordings(1, math.inf), []

    def function(inputs: Any) -> Any:
        calls.append(None)
        return {"y": inputs["x"] * len(calls)}

    with caplog.at_level(logging.WARNING):
        for count in range(1, 8):
            found = recordings(function, {"x": torch.ones(2)}, None)
            assert_equal(found["y"], torch.full((2,), float(count)))
    assert caplog.text.count("gave other results") == 1


@pytest.mark.parametrize(
    "operation", [lambda x: torch.zeros(2).scatter(0, x, 1.0), lambda x: torch.zeros(2)[x]]
)
def test_an_index_out_of_bounds_is_told_by_the_function(
    operation: Callable[[Tensor], Tensor],
) -> None:
    recordings = Recordings(1, math.inf)

    def function(inputs: Any) -> Any:
        try:
            return {"y": operation(inputs["x"])}
        except (RuntimeError, IndexError) as error:
            raise ValueError("there is no such place") from error

    for _ in range(5):
        recordings(function, {"x": torch.tensor([1])}, None)
    assert recordings._recorded == 1
    with pytest.raises(ValueError, match="no such place"):
        recordings(function, {"x": torch.tensor([2])}, None)


def test_numbers_that_the_function_makes_stay_its_own() -> None:
    """A caller may change what it gets, without changing what others get."""
    recordings = Recordings(1, math.inf)

    def function(inputs: Any) -> Any:
        two = torch.full((2,), 2.0)  # [2]
        return {"two": two, "view": torch.ones(2, 1).view(2), "y": inputs["x"] * two}

    x = torch.ones(2)  # [2]
    for _ in range(7):
        found = recordings(function, {"x": x}, None)
        assert_equal(found, {"two": torch.full((2,), 2.0), "view": torch.ones(2), "y": 2 * x})
        for each in found.values():
            each.add_(1)


def of_a_product(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """What may be written over products, and what reads them twice or has another shape."""
    twice = x @ w  # [B, H]
    whole = (10 * x).long() @ (10 * w).long()  # [B, H]
    return {
        "relu": (x @ w).relu(),
        "tanh": (x @ w).tanh(),
        "mul": (x @ w) * 3,
        "square": (x @ w).square() * (x @ w),
        "by rows": (x @ w) * x[:, :1],
        "wider": (x[:1] @ w) * w.sum(0, keepdim=True).expand(4, -1),
        "tanh backward": torch.ops.aten.tanh_backward(x @ w, w[:1].tanh().expand(5, -1)),
        "threshold backward": torch.ops.aten.threshold_backward(x @ w, x[:, :1].expand(5, 2), 0),
        "twice": torch.ops.aten.threshold_backward(twice, twice.relu(), 0) + twice * 2,
        "halves of whole numbers": whole * 0.5,
        "product": twice,
    }


def test_what_is_written_over_products_is_read_by_nobody_else() -> None:
    recordings = Recordings(1, math.inf)
    for seed in range(7):
        generator = torch.Generator().manual_seed(seed)
        x, w = torch.randn(5, 3, generator=generator), torch.randn(3, 2, generator=generator)
        given = {"x": x.clone(), "w": w.clone()}
        found = recordings(lambda inputs: of_a_product(inputs["x"], inputs["w"]), given, None)
        assert_equal(found, of_a_product(x, w))
        assert_equal(given, {"x": x, "w": w})
    assert recordings._recorded == 1
    assert not recordings._is_off


def test_a_common_shape_is_recorded_and_stays_so_among_any_number_of_others() -> None:
    recordings, calls = Recordings(3, math.inf), []

    def function(inputs: Any) -> Any:
        calls.append(len(inputs["x"]))
        return {"y": inputs["x"] + 1}

    def call(length: int) -> None:
        x = torch.ones(length)  # [length]
        assert_equal(recordings(function, {"x": x}, None), {"y": x + 1})

    others = iter(range(10, 2000))
    for _ in range(600):
        call(next(others))
    for _ in range(10):
        call(2)
        call(next(others))
    assert calls.count(2) == 3 + 3, "until it is recorded, and to compare"
    for _ in range(600):
        call(next(others))
    call(2)
    assert calls.count(2) == 6
    assert len(recordings._calls) <= 256


def compute(seconds: float) -> None:
    """Keep this thread's processor busy for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize(("take", "is_recorded"), [(time.sleep, True), (compute, False)])
def test_a_call_is_slow_by_its_processor_time_and_not_by_how_long_it_waits_for_a_processor(
    take: Callable[[float], None], is_recorded: bool
) -> None:
    recordings = Recordings(often=4)

    def function(inputs: Any) -> Any:
        take(1.5 * SLOW)  # as long as others have the processor, or as it computes
        return {"y": inputs["x"] + 1}

    for _ in range(4):
        recordings(function, {"x": torch.ones(2)}, None)
    assert recordings._recorded == is_recorded


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Take away a private name of torch that recordings stand on."""
    if name == "TorchDispatchMode":
        monkeypatch.setattr(recorder, "_Mode", object)
        return
    holder: Any = torch
    *path, last = name.split(".")
    for each in path:
        holder = getattr(holder, each)
    monkeypatch.delattr(holder, last)


@pytest.mark.parametrize("name", [*recorder._PRIVATE, "TorchDispatchMode"])
def test_without_torchs_private_names_a_learner_trains_with_the_same_numbers(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = learner_of(make_core("ppo"), None)
    samples = samples_of(make_batch, 4)
    expected = [plain.step(sample) for sample in samples]
    without(monkeypatch, name)
    learner = learner_of(make_core("ppo"), 2)
    for sample, each in zip(samples, expected, strict=True):
        assert_equal(learner.step(sample), each)
    assert_equal(learner.state, plain.state)
    assert not learner.core._recordings._recorded


def test_where_torch_has_no_modes_the_recorder_is_imported_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = recorder.__spec__
    assert place is not None
    assert place.origin is not None
    monkeypatch.setitem(sys.modules, "torch.utils._python_dispatch", None)
    spec = importlib.util.spec_from_file_location("another_recorder", place.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "another_recorder", module)
    spec.loader.exec_module(module)
    assert not module.can_record()
    recordings, x = module.Recordings(1, math.inf), torch.ones(2)  # [2]
    for _ in range(3):
        assert_equal(
            recordings(lambda inputs: {"y": inputs["x"] + 1}, {"x": x}, None), {"y": x + 1}
        )


def test_private_names_that_mean_something_else_stop_recordings(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch._C, "_create_function_from_graph", lambda graph: graph.nothing)
    plain, learner = (learner_of(make_core("ppo"), often) for often in (None, 2))
    for sample in samples_of(make_batch, 4):
        assert_equal(plain.step(sample), learner.step(sample))
    assert_equal(learner.state, plain.state)
    assert learner.core._recordings._is_off
    assert caplog.text.count("torch cannot record operations here") == 1
