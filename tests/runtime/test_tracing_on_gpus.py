"""A GPU's graphs give their function's results; the CPU stands in."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_cores import MakeBatch, make_core, needs_memory, samples_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core import gradient_core
from juggler.learner.learner import Learner
from juggler.learner.optim import optimizers
from juggler.runtime.tracing import DeviceGraphs, TraceCache, _captured_constants, _read, _Watch
from juggler.runtime.wire.structures import tree_map


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
    assert [x is table for x in call.repeat.__self__.constants] == [True]


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
