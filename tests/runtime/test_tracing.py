"""Recorded operations give their function's results, bitwise, or are not used."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.small_cores import MakeBatch, make_core, needs_memory, samples_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core import gradient_core
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.learner import Learner
from juggler.learner.optim import optimizers
from juggler.runtime import tracing
from juggler.runtime.modules import columns as c
from juggler.runtime.tracing import (
    SLOW,
    DeviceGraphs,
    TraceCache,
    _captured_constants,
    _read,
    _Watch,
)
from juggler.runtime.wire.structures import tree_map


def learner_of(core: GradientCore, often: int | None) -> Learner:
    """A learner that traces what comes so often, or nothing."""
    core._traces = None if often is None else TraceCache(often, math.inf)
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
    plain, traced = (
        learner_of(make_core(name, micro_batches=micro_batches), often) for often in (None, 2)
    )
    for sample in samples_of(make_batch, 8):
        assert_equal(plain.step(sample), traced.step(sample))
    assert_equal(plain.state, traced.state)
    traces = traced.core._traces
    assert not traces._is_off
    # A module with a state is unrolled for as many steps as the longest segment has.
    assert bool(traces._traced) != needs_memory(name)


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
    assert len(learner.core._traces._calls) == 1


def test_other_shapes_kinds_and_names_are_other_calls() -> None:
    traces, calls = TraceCache(1, math.inf), []

    def function(inputs: Any) -> Any:
        calls.append(None)
        return {name: x.sum(0) * len(x) for name, x in inputs.items()}

    x = torch.arange(6.0).view(2, 3)  # [2, 3]
    for inputs in ({"a": x}, {"b": x}, {"a": x.t()}, {"a": x.double()}, {"a": x, "b": x + 1}):
        for _ in range(6):  # a call that is traced, three that are compared, and two
            assert_equal(
                traces(function, inputs, None),
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
def test_what_other_inputs_could_change_is_not_traced(
    operation: Callable[[Tensor], Tensor],
) -> None:
    traces = TraceCache(1, math.inf)
    for seed in range(6):
        x = torch.randn(8, generator=torch.Generator().manual_seed(seed))  # [8]
        torch.manual_seed(0)
        found = traces(lambda inputs: {"y": operation(inputs["x"])}, {"x": x}, None)
        torch.manual_seed(0)
        assert_equal(found["y"], operation(x))
    assert traces._traced == 0


def test_what_the_function_decides_by_a_number_is_traced_apart() -> None:
    traces, calls = TraceCache(1, math.inf), []

    def function(inputs: Any) -> Any:
        calls.append(None)
        return {"y": reads_a_number(inputs["x"])}

    for count in range(20):
        x = torch.full((2,), float(count % 2) - 0.5)  # [2]
        found = traces(function, {"x": x}, None, decided=bool(x.sum() > 0))
        assert_equal(found["y"], reads_a_number(x))
    assert len(calls) == 2 * 4


def test_a_function_that_reads_more_than_its_inputs_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    traces, calls = TraceCache(1, math.inf), []

    def function(inputs: Any) -> Any:
        calls.append(None)
        return {"y": inputs["x"] * len(calls)}

    with caplog.at_level(logging.WARNING):
        for count in range(1, 8):
            found = traces(function, {"x": torch.ones(2)}, None)
            assert_equal(found["y"], torch.full((2,), float(count)))
    assert caplog.text.count("gave other results") == 1


@pytest.mark.parametrize(
    "operation", [lambda x: torch.zeros(2).scatter(0, x, 1.0), lambda x: torch.zeros(2)[x]]
)
def test_an_index_out_of_bounds_is_told_by_the_function(
    operation: Callable[[Tensor], Tensor],
) -> None:
    traces = TraceCache(1, math.inf)

    def function(inputs: Any) -> Any:
        try:
            return {"y": operation(inputs["x"])}
        except (RuntimeError, IndexError) as error:
            raise ValueError("there is no such place") from error

    for _ in range(5):
        traces(function, {"x": torch.tensor([1])}, None)
    assert traces._traced == 1
    with pytest.raises(ValueError, match="no such place"):
        traces(function, {"x": torch.tensor([2])}, None)


def of_a_product(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """A shape that may be written over, and ones that may not."""
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
    traces = TraceCache(1, math.inf)
    for seed in range(7):
        generator = torch.Generator().manual_seed(seed)
        x, w = torch.randn(5, 3, generator=generator), torch.randn(3, 2, generator=generator)
        given = {"x": x.clone(), "w": w.clone()}
        found = traces(lambda inputs: of_a_product(inputs["x"], inputs["w"]), given, None)
        assert_equal(found, of_a_product(x, w))
        assert_equal(given, {"x": x, "w": w})
    assert traces._traced == 1
    assert not traces._is_off


def test_a_common_shape_is_traced_and_stays_so_among_any_number_of_others() -> None:
    traces, calls = TraceCache(3, math.inf), []

    def function(inputs: Any) -> Any:
        calls.append(len(inputs["x"]))
        return {"y": inputs["x"] + 1}

    def call(length: int) -> None:
        x = torch.ones(length)  # [length]
        assert_equal(traces(function, {"x": x}, None), {"y": x + 1})

    others = iter(range(10, 2000))
    for _ in range(600):
        call(next(others))
    for _ in range(10):
        call(2)
        call(next(others))
    assert calls.count(2) == 3 + 3, "until it is traced, and to compare"
    for _ in range(600):
        call(next(others))
    call(2)
    assert calls.count(2) == 6
    assert len(traces._calls) <= 256


def compute(seconds: float) -> None:
    """Keep this thread's processor busy for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize(("take", "is_traced"), [(time.sleep, True), (compute, False)])
def test_a_call_is_slow_by_its_processor_time_and_not_by_how_long_it_waits_for_a_processor(
    take: Callable[[float], None], is_traced: bool
) -> None:
    traces = TraceCache(often=4)

    def function(inputs: Any) -> Any:
        take(1.5 * SLOW)  # as long as others have the processor, or as it computes
        return {"y": inputs["x"] + 1}

    for _ in range(4):
        traces(function, {"x": torch.ones(2)}, None)
    assert traces._traced == is_traced


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Take away a private name of torch that traces stand on."""
    if name == "TorchDispatchMode":
        monkeypatch.setattr(tracing, "_Mode", object)
        return
    holder: Any = torch
    *path, last = name.split(".")
    for each in path:
        holder = getattr(holder, each)
    monkeypatch.delattr(holder, last)


@pytest.mark.parametrize("name", [*tracing._PRIVATE, "TorchDispatchMode"])
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
    assert not learner.core._traces._traced


def test_where_torch_has_no_modes_tracing_is_imported_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tracing.__spec__
    assert place is not None
    assert place.origin is not None
    monkeypatch.setitem(sys.modules, "torch.utils._python_dispatch", None)
    spec = importlib.util.spec_from_file_location("another_tracing", place.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "another_tracing", module)
    spec.loader.exec_module(module)
    assert not module.can_trace()
    traces, x = module.TraceCache(1, math.inf), torch.ones(2)  # [2]
    for _ in range(3):
        assert_equal(traces(lambda inputs: {"y": inputs["x"] + 1}, {"x": x}, None), {"y": x + 1})


def test_private_names_that_mean_something_else_stop_traces(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.jit, "CompilationUnit", lambda text: text.nothing)
    plain, learner = (learner_of(make_core("ppo"), often) for often in (None, 2))
    for sample in samples_of(make_batch, 4):
        assert_equal(plain.step(sample), learner.step(sample))
    assert_equal(learner.state, plain.state)
    assert learner.core._traces._is_off
    assert caplog.text.count("torch cannot trace operations here") == 1


# TorchScript's interpreter repeats traced operations, with any inputs.


_LIBRARY = torch.library.Library("juggler_tests", "DEF")
_LIBRARY.define("twice(Tensor x) -> Tensor")
_LIBRARY.define("twice_by(Tensor x, Generator by) -> Tensor")
for _name in ("twice", "twice_by"):
    _LIBRARY.impl(_name, lambda x, *_: x * 2, "CPU")


def assert_is_repeated(function: Callable[[Tensor], dict[str, Tensor]]) -> None:
    """Check that its operations are repeated, for other inputs too."""
    traces, calls = TraceCache(1, math.inf), []

    def counted(inputs: Any) -> Any:
        calls.append(None)
        return function(inputs["x"])

    for seed in range(7):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))  # [4, 6]
        found, expected = traces(counted, {"x": x.clone()}, None), function(x)
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert found[name].dtype == each.dtype, name
            assert found[name].stride() == each.stride(), name
            torch.testing.assert_close(found[name], each, rtol=0, atol=0)
    assert len(calls) == 4, "one that is traced, and three that are compared"


def with_numbers(x: Tensor) -> dict[str, Tensor]:
    return {
        "times a float": x * 2.5,
        "times an integer": x * 2,
        "less": 1 - x,
        "whole": x.div(2, rounding_mode="floor"),
        "double and float": x.sum() * x.double().sum() + 0.1,
        "an integer for a float": torch.nn.functional.leaky_relu(x, 1),
        "without end": x.clamp(max=math.inf).clamp(min=0),
        "a number first": torch.mul(2.0, x),
        "a bool for a number": x.masked_fill(x > 0, True),
        "a complex number": (x * 1j).abs(),
        "no number": torch.where(x > 0, x, math.nan).isnan(),
    }


def with_lists(x: Tensor) -> dict[str, Tensor]:
    ones = torch.tensor([1, 1])  # [2]
    return {
        "one part of three": x.split([1, 2, 3], 1)[1] * 2,
        "indices": x[:, ones],
        "joined": torch.cat([x, x.view(6, 4).t()], 1),
        "sum": x.sum((0, 1)),
        "sum of all": x.sum(()),
        "each": torch._foreach_mul([x, x + 1], 2.0)[1],
    }


def with_words(x: Tensor) -> dict[str, Tensor]:
    return {
        "channels last": x.view(1, 2, 3, 4).clone(memory_format=torch.channels_last),
        "wide": x.to(torch.float64, copy=True),
        "gelu": torch.nn.functional.gelu(x, approximate="tanh"),
        "convolution": torch.nn.functional.conv2d(x.view(1, 1, 4, 6), x.view(6, 1, 2, 2)),
    }


def with_several_outputs(x: Tensor) -> dict[str, Tensor]:
    most, where = x.max(1)  # [4] each
    return {"most": most, "where": where, "norm": torch.nn.functional.layer_norm(x, (6,))}


def in_place(x: Tensor) -> dict[str, Tensor]:
    own = x.clone()  # [4, 6]
    own[0].add_(1)
    own.mul_(3)[:, 0].relu_()
    return {"own": own, "before": x}


def of_a_library(x: Tensor) -> dict[str, Tensor]:
    return {"twice": torch.ops.juggler_tests.twice(x + 1) - 1}


@pytest.mark.parametrize(
    "function", [with_numbers, with_lists, with_words, with_several_outputs, in_place, of_a_library]
)
def test_arguments_of_every_kind_are_handed_on(
    function: Callable[[Tensor], dict[str, Tensor]],
) -> None:
    assert_is_repeated(function)


def in_a_list(x: Tensor) -> Tensor:
    torch._foreach_add_([x, x[:2]], 1.0)
    return x


def of_an_object(x: Tensor) -> Tensor:
    doubled: Tensor = torch.ops.juggler_tests.twice_by(x, torch.Generator())
    return doubled


@pytest.mark.parametrize("operation", [in_a_list, of_an_object])
def test_what_torchscript_does_not_know_is_not_traced(
    operation: Callable[[Tensor], Tensor],
) -> None:
    traces, x = TraceCache(1, math.inf), torch.ones(4)  # [4]
    for _ in range(6):
        found = traces(lambda inputs: {"y": operation(inputs["x"] + 1) * 2}, {"x": x}, None)
        torch.testing.assert_close(found["y"], operation(x + 1) * 2, rtol=0, atol=0)
    assert traces._traced == 0


@pytest.mark.parametrize("place", [1, 7])
def test_torchscript_of_the_caller_is_optimized_as_before(place: int) -> None:
    def function(inputs: Any) -> Any:
        return {"y": inputs["x"][inputs["place"]]}

    traces, x = TraceCache(1, math.inf), torch.ones(3)  # [3]
    for _ in range(5):
        traces(function, {"x": x, "place": torch.tensor([0])}, None)
    assert traces._traced == 1
    with pytest.raises(IndexError) if place > 2 else nullcontext():
        traces(function, {"x": x, "place": torch.tensor([place])}, None)
    assert torch._C._get_graph_executor_optimize()


# A GPU's graphs give their function's results; the CPU stands in.


class FakeGraph(TorchDispatchMode):
    """Notes operations between `capture_begin` and `capture_end`, and makes them again."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.replays = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, outputs in self._made:
            again = func(*args, **kwargs)
            for old, new in zip(outputs, _tensors(again), strict=True):
                old.copy_(new)  # to where the graph has it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self._made.append((func, args, kwargs or {}, _tensors(outputs)))
        return outputs


def _tensors(outputs: Any) -> list[Tensor]:
    each = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [x for x in each if isinstance(x, Tensor)]


class FakeDevice:
    """Stands in for torch.cuda."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def CUDAGraph(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        return self.graphs[-1]

    def Stream(self, device: object, priority: int) -> Any:
        return _FakeStream()

    def current_stream(self, device: object = None) -> Any:
        return _FakeStream()

    def stream(self, stream: object) -> Any:
        return contextlib.nullcontext()

    def device(self, device: torch.device) -> Any:
        assert device.type == "cpu"
        return contextlib.nullcontext()


class _FakeStream:
    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if GPU else "cpu"


def graphs(often: int = 2) -> tuple[TraceCache, FakeDevice]:
    fake = FakeDevice()
    return TraceCache(often, math.inf, {"cpu": DeviceGraphs(fake)} if not GPU else None), fake


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of tensors that the host does not read."""
    for module in (gradient_core, optimizers):
        monkeypatch.setattr(module, "on_host", lambda x: False)
    return DEVICE


def near(one: Any, other: Any) -> None:
    # In the order of additions, two kernels of a GPU may differ.
    tolerance = 1e-4 if GPU else 0.0
    tree_map(
        lambda x, y: torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, equal_nan=True
        ),
        one,
        other,
    )


@pytest.mark.parametrize(
    ("name", "micro_batches"), [*((name, 1) for name in ALGORITHMS), ("ppo", 2), ("r2d2", 2)]
)
def test_every_algorithm_learns_the_same_with_graphs(
    make_batch: MakeBatch, device: str, name: str, micro_batches: int
) -> None:
    learners = []
    for with_graphs in (False, True):
        core = make_core(name, micro_batches=micro_batches)
        core._traces = graphs()[0] if with_graphs else None
        learners.append(Learner(core, seed=1, device=device))
    plain, repeated = learners
    for sample in samples_of(make_batch, 8):
        there = tree_map(lambda x: x.to(device), sample)
        near(plain.step(there), repeated.step(there))
    near(plain.state, repeated.state)
    traces = repeated.core._traces
    assert not traces._is_off
    # The optimizer's step has the same shapes in each update, even if a loss does not.
    assert traces._traced > (0 if needs_memory(name) else 1)


class Watched:
    """Watches functions before they are captured, instead of traces.

    Attributes:
        fit: whether each of the functions could be captured.
        copied: tensors, other than inputs, that each of them copied again from the host.
    """

    def __init__(self) -> None:
        self.fit: list[bool] = []
        self.copied: list[int] = []

    def __call__(self, function: Callable[[Any], Any], inputs: Any, *_: Any, **__: Any) -> Any:
        # Tensors without numbers stand for those of a GPU.
        there = tree_map(lambda x: x.to("meta"), inputs)
        for each in (there, inputs):  # a device gets its constants once
            function(each)
        self.fit.append(self._watched(function, there)[1])
        first, _, _ = self._watched(function, inputs)
        second, _, outputs = self._watched(function, inputs)
        kept = set(map(id, first))
        # Operations have Python's numbers as tensors [], which are part of a graph.
        new = [x for x in second if x.ndim and id(x) not in kept]
        self.copied.append(len(new))
        return outputs

    def _watched(
        self, function: Callable[[Any], Any], inputs: Any
    ) -> tuple[list[Tensor], bool, Any]:
        leaves: list[Tensor] = []
        _read(inputs, [], leaves)
        with _Watch() as watch:
            outputs = function(inputs)
        return *_captured_constants(watch, leaves), outputs


@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, {}) for name in ALGORITHMS if not needs_memory(name)), ("sac", {"temperature": 0.2})],
)
def test_losses_and_optimizer_steps_can_be_captured(
    make_batch: MakeBatch, device: str, name: str, config: dict[str, Any]
) -> None:
    core = make_core(name, **config)
    watched: Any = Watched()
    core._traces = watched
    learner = Learner(core, seed=1, device=device)
    for sample in samples_of(make_batch, 2):
        learner.step(sample)
    assert len(watched.fit) >= 2, "a loss and a step"
    assert all(watched.fit)
    assert not any(watched.copied)


def test_what_a_call_returns_stays_as_it_was_when_the_graph_runs_again() -> None:
    traces, _ = graphs(often=1)

    def function(inputs: Any) -> Any:
        return {"sum": inputs["x"].sum(), "number": inputs["x"].max(), "twice": inputs["x"] * 2}

    found = [
        traces(function, {"x": torch.full((2,), float(i), device=DEVICE)}, None) for i in range(8)
    ]
    for i, each in enumerate(found):
        assert each["sum"].item() == 2 * i
        assert each["number"].item() == i
        assert each["twice"].tolist() == [2 * i, 2 * i]
    assert traces._traced == 1


def test_inputs_that_a_function_only_passes_on_are_up_to_date() -> None:
    traces, _ = graphs(often=1)

    def function(inputs: Any) -> Any:
        return {"kept": inputs["kept"], "y": inputs["x"] + 1}

    for i in range(8):
        kept = torch.full((3,), i, device=DEVICE)  # [3]
        inputs = {"kept": kept, "x": kept.float(), "unread": torch.ones(2, device=DEVICE)}
        found = traces(function, inputs, None)
        assert found["kept"].tolist() == [i, i, i]
        assert found["y"].tolist() == [i + 1.0] * 3
    assert traces._traced == 1


def test_what_a_graph_reads_beside_its_inputs_stays_in_memory() -> None:
    traces, _ = graphs(often=1)
    table = torch.full((2,), 3.0, device=DEVICE)  # [2]
    for i in range(6):
        x = torch.full((2,), float(i), device=DEVICE)  # [2]
        found = traces(lambda inputs: {"y": inputs["x"] * table + 1}, {"x": x}, None)
        assert found["y"].tolist() == [3 * i + 1.0] * 2
    (call,) = traces._calls.values()
    graph = inspect.getclosurevars(inspect.unwrap(call.repeat)).nonlocals["graph"]
    assert [x is table for x in graph.constants] == [True]


@pytest.mark.parametrize("step", [1e-6, 1e-3])
def test_a_wrong_step_is_found_out_however_small_it_is(
    step: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Ones that are changed by a millionth still look near."""
    traces, _ = graphs(often=1)
    factor = 1.0

    def function(inputs: Any) -> Any:
        return {"state": {"parameters": inputs["x"] + factor * step}}

    for _ in range(3):
        x = torch.ones(2, device=DEVICE)  # [2]
        traces(function, {"x": x}, None, before={"state": {"parameters": x}})
        assert not caplog.text
    factor = 0.0
    traces(function, {"x": x}, None, before={"state": {"parameters": x}})
    assert caplog.text.count("gave other results") == 1


class NoGraph(FakeDevice):
    """Has no memory for a graph."""

    def CUDAGraph(self) -> FakeGraph:
        super().CUDAGraph()
        raise RuntimeError("out of memory")


class Invalid(FakeDevice):
    """Says at the end of a capture that it was none."""

    def CUDAGraph(self) -> FakeGraph:
        self.graphs.append(_Ending())
        return self.graphs[-1]


class _Ending(FakeGraph):
    def capture_end(self) -> None:
        super().capture_end()
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("kind", [NoGraph, Invalid])
def test_after_a_capture_that_failed_all_is_computed_and_nothing_captured(
    kind: type[FakeDevice], caplog: pytest.LogCaptureFixture
) -> None:
    fake = kind()
    for _ in range(2):  # two learners of a process
        traces = TraceCache(1, math.inf, {"cpu": DeviceGraphs(fake)})
        for i in range(8):
            x = torch.full((2 + i % 2,), i)  # [2], or [3]
            found = traces(lambda inputs: {"y": inputs["x"] + 1}, {"x": x}, None)
            assert found["y"].tolist() == [i + 1] * len(x)
        assert traces._traced == 0
    assert len(fake.graphs) == 1
    (record,) = caplog.records
    assert "could not be captured as a graph" in record.message
