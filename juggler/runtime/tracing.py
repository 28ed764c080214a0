"""Traces repeat a function's torch operations without the Python around them.

A small update takes a few hundred operations of a few microseconds. Calling modules, building the
graph of gradients and walking through it takes about the same time again. The operations are the
same as long as shapes are the same. So they are traced once, including gradients. A CPU repeats
them one by one in TorchScript's interpreter, with bit-identical results. A GPU launches them all
at once as a CUDA graph.

This file uses private names of torch. If one is missing, functions are called without tracing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

try:
    from torch.utils._python_dispatch import TorchDispatchMode

    _Mode: Any = TorchDispatchMode
except ImportError:
    _Mode = object

#: A tensor, or a map of trees.
TensorTree = Any
Function = Callable[[TensorTree], TensorTree]
#: Repeats the operations of a function for other inputs: their tensors -> a tree.
Repeat = Callable[[list[Tensor]], TensorTree]

_log = logging.getLogger(__name__)

#: Number of calls with the same shapes before one is traced.
OFTEN: Final = 20
#: Number of timed calls before a trace, and of compared calls after it. The host waits for a
#: GPU in both.
_TIMED, _CHECKS = 3, 3
#: Maximum number of shapes that are counted, and that are traced.
_MOST_COUNTED, _MOST_TRACES = 256, 16
#: Seconds of a call above which Python takes only a small part. On the CPU this is processor time
#: of the calling thread, which other work of the machine does not lengthen.
SLOW: Final = 0.1

_PRIVATE: Final = (
    "_C._AutoDispatchBelowADInplaceOrView",
    "_C._get_graph_executor_optimize",
    "_foreach_copy_",
)


def can_trace() -> bool:
    """Return whether torch has the private names that traces need."""
    try:
        return _Mode is not object and all(attrgetter(name)(torch) for name in _PRIVATE)
    except AttributeError:
        return False


class TraceCache:
    """Calls a function of tensors, or repeats a traced call.

    The function must depend only on its inputs: other values that it reads must stay the same as
    long as `basis` does. It must not change its inputs or draw random numbers. Nothing is traced
    if the host reads a number from a tensor, if shapes depend on a number, if TorchScript does not
    know an operation, or if operations take a GPU longer than the host needs to launch them.

    The first calls after a trace are made both ways. If their results differ in a single
    number, or on a GPU by more than rounding, tracing stops, with a message in the log.

    Args:
        often: calls with the same shapes before one is traced.
        slow: seconds above which a call is not traced, as in `SLOW`; inf: no limit.
        graphs: captures calls, by kind of device; None: CUDA graphs.
    """

    def __init__(
        self,
        often: int = OFTEN,
        slow: float = SLOW,
        graphs: Mapping[str, DeviceGraphs] | None = None,
    ) -> None:
        self._often, self._slow = often, slow
        self._graphs = {"cuda": DeviceGraphs()} if graphs is None else graphs
        self._basis: object = None
        self._calls: dict[object, _Call] = {}  # by names, shapes and kinds of inputs
        self._traced, self._is_off = 0, not can_trace()

    def __call__(
        self,
        function: Function,
        inputs: TensorTree,
        basis: object,
        decided: bool | None = None,
        before: TensorTree | None = None,
    ) -> TensorTree:
        """Return the function's result for these inputs, without gradients.

        Args:
            function: takes and returns trees of tensors.
            inputs: its argument. Its names identify functions.
            basis: other values on which its operations depend. A new one drops all traces.
            decided: the function's decision from the only number that the host reads in it; None:
                it reads no number. Calls with different decisions are traced separately.
            before: for a function that makes a step: the values before it, by the names in its
                result. Empty: the function sums many numbers, in any order on a GPU.
        """
        if self._is_off:
            return function(inputs)
        if self._basis != basis:
            self._calls, self._basis, self._traced = {}, basis, 0
        # Strides count too, since an operation may choose its kernel by them.
        described: list[object] = [decided]
        leaves: list[Tensor] = []
        _read(inputs, described, leaves)
        key = tuple(described)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) == _MOST_COUNTED:  # most of these shapes do not recur
                self._calls = {own: each for own, each in self._calls.items() if each.repeat}
            call = self._calls[key] = _Call()
        if call.repeat is None:
            return self._counted(call, function, inputs, leaves, decided is not None, before)
        # A trace is trusted after some calls made both ways.
        if not call.checks_left:
            try:
                return call.repeat(leaves)
            except RuntimeError:  # such as an index out of bounds; the function explains it better
                return function(inputs)
        call.checks_left -= 1
        outputs = function(inputs)
        self._compare(call, outputs, leaves, before)
        return outputs

    def _counted(
        self,
        call: _Call,
        function: Function,
        inputs: TensorTree,
        leaves: list[Tensor],
        may_read: bool,
        before: TensorTree | None,
    ) -> TensorTree:
        """Call the function, and trace it if that pays."""
        call.count += 1
        device = leaves[0].device
        graphs = self._graphs.get(device.type)
        if device.type != "cpu" and graphs is None:
            return function(inputs)
        # The last calls before a trace show whether it would pay.
        if self._often - _TIMED <= call.count < self._often:
            if graphs:
                wait = partial(graphs.wait, device)
                return call.timed(function, inputs, time.perf_counter, wait)
            return call.timed(function, inputs, time.thread_time, lambda: None)
        pays = self._traced < _MOST_TRACES and call.pays(self._slow)
        if call.count != self._often or not pays:
            return function(inputs)
        # A failure must not end training: the code itself still works.
        try:
            if graphs:
                outputs, call.repeat = graphs.captured(function, inputs, leaves)
            else:
                outputs, call.repeat = _traced(function, inputs, leaves, may_read)
        except Exception as error:
            outputs = function(inputs)  # raises its own errors again
            self._stop(f"torch cannot trace operations here ({type(error).__name__}: {error})")
            return outputs
        if call.repeat:
            self._traced += 1
            self._compare(call, outputs, leaves, before)
        return outputs

    def _compare(
        self, call: _Call, outputs: TensorTree, leaves: list[Tensor], before: TensorTree | None
    ) -> None:
        """Stop tracing if the traced operations give other outputs."""
        assert call.repeat is not None
        on_graph = leaves[0].device.type in self._graphs
        try:
            if _is_same(outputs, call.repeat(leaves), before, on_graph):
                return
        except RuntimeError as error:  # such as a GPU without memory for both
            _log.info("traced operations could not be compared: %s", error)
            call.repeat = None
            return
        self._stop("traced operations gave other results than their code")

    def _stop(self, why: str) -> None:
        self._is_off, self._calls = True, {}
        _log.warning("%s: from now on the code is called each time, which takes longer", why)


class _Call:
    """Calls with the same shapes.

    Attributes:
        repeat: repeats their operations for other inputs; None: not traced.
        count: number of calls.
        checks_left: calls left to make both ways.
    """

    def __init__(self) -> None:
        self.repeat: Repeat | None = None
        self.count, self.checks_left = 0, _CHECKS
        self._host = self._seconds = math.inf  # time of the shortest call

    def pays(self, slow: float) -> bool:
        """Return whether calls are fast, and a GPU waits for the host."""
        if math.isinf(slow):
            return True
        return self._seconds <= slow and self._host >= self._seconds / 2

    def timed(
        self,
        function: Function,
        inputs: TensorTree,
        clock: Callable[[], float],
        wait: Callable[[], None],
    ) -> TensorTree:
        """Call the function, and time it on host and device."""
        wait()
        started = clock()
        outputs = function(inputs)
        host = clock() - started
        wait()
        self._host = min(self._host, host)
        self._seconds = min(self._seconds, clock() - started)
        return outputs


# -- watching -----------------------------------------------------------------------------------

_aten = torch.ops.aten
_UNREPEATABLE = {
    torch.Tag.data_dependent_output,  # the host reads numbers
    torch.Tag.dynamic_output_shape,  # shapes depend on numbers
    torch.Tag.nondeterministic_seeded,  # random draws
}


@dataclass(frozen=True, slots=True)
class _Operation:
    """One executed operation of torch.

    Attributes:
        func: the overload.
        outputs: a tensor, or several.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: Any

    @property
    def read(self) -> list[Tensor]:
        """Return the tensors among its arguments."""
        return [*_tensors((self.args, self.kwargs))]

    @property
    def made(self) -> list[Tensor]:
        """Return the tensors that it returns."""
        return [*_tensors(self.outputs)]


class _Watch(_Mode):  # type: ignore[misc]
    """Collects all operations of torch within it, including gradients.

    Attributes:
        operations: in order.
        is_repeatable: whether they are valid for other inputs of the same shapes.
    """

    def __init__(self, may_read: bool = False) -> None:
        """Watch operations; with `may_read`, the host may read numbers."""
        super().__init__()
        self.operations: list[_Operation] = []
        self.is_repeatable = True
        self._may_read = may_read

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if self._may_read and func is _aten._local_scalar_dense.default:
            return outputs
        each = outputs if isinstance(outputs, list | tuple) else [outputs]
        self.is_repeatable &= all(x is None or isinstance(x, Tensor) for x in each)
        if not _UNREPEATABLE.isdisjoint(func.tags):
            self.is_repeatable &= _is_indexed_by_numbers(func, args)
        if self.is_repeatable:
            self.operations.append(_Operation(func, args, kwargs, outputs))
        return outputs


def _is_indexed_by_numbers(func: Any, args: Any) -> bool:
    """Return whether an index's shape does not depend on a mask's content."""
    return func is _aten.index.Tensor and not any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )


# -- repeating on a CPU -------------------------------------------------------------------------

#: Operations that may overwrite their first argument, and their in-place versions.
_IN_PLACE: dict[Any, Any] = {
    _aten.relu.default: _aten.relu_.default,
    _aten.tanh.default: _aten.tanh_.default,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.mul.Scalar: _aten.mul_.Scalar,
}
_PRODUCTS = (_aten.addmm.default, _aten.mm.default)


def _traced(
    function: Function, inputs: TensorTree, leaves: list[Tensor], may_read: bool
) -> tuple[TensorTree, Repeat | None]:
    """Call a function, and trace its operations.

    The function's argument is a tree with the tensors `leaves`. Returns the result and the
    trace; None: the operations are invalid for other inputs, or TorchScript does not know one.
    """
    if len(set(map(id, leaves))) < len(leaves):  # an operation may read either
        return function(inputs), None
    with _Watch(may_read) as watch:
        outputs = function(inputs)
    made: list[Tensor] = []
    template = _placed(outputs, made)
    if not watch.is_repeatable:
        return outputs, None
    scripted = _scripted(watch.operations, leaves, made)
    if scripted is None:
        return outputs, None
    operations, constants = scripted

    def repeat(leaves: list[Tensor]) -> TensorTree:
        # Only in this thread: the caller's own graphs are optimized as before.
        before = torch._C._get_graph_executor_optimize(False)
        try:
            # As in the trace, torch tracks neither gradients nor views.
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return _filled(template, operations(*leaves, *constants))
        finally:
            torch._C._get_graph_executor_optimize(before)

    return outputs, repeat


def _scripted(
    operations: list[_Operation], inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[Any, list[Tensor]] | None:
    """Return a TorchScript function from inputs to outputs, and its last arguments.

    TorchScript's interpreter needs a fraction of Python's time between operations. It runs them
    unchanged: nothing is fused or reordered, so results are bit-identical.

    The last arguments are tensors that operations read but do not make. None: TorchScript does
    not know an operation.
    """
    same, constants = _same_tensors(operations), list[Tensor]()
    names = {id(x): f"x{place}" for place, x in enumerate(inputs)}

    def key(x: Any) -> int:
        return same.get(id(x), id(x))

    # A tensor that no operation has made becomes an argument.
    def text(x: Any) -> str:
        if isinstance(x, Tensor):
            if key(x) not in names:
                names[key(x)] = f"x{len(inputs) + len(constants)}"
                constants.append(x)
            return names[key(x)]
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(text, x))}]"
        if isinstance(x, torch.device):
            return f"torch.device({str(x)!r})"
        finite = not isinstance(x, float) or math.isfinite(x)
        return repr(x) if finite else f"float({str(x)!r})"

    # Text chooses the overload of an operation by its arguments, so calls are compared later.
    lines: list[str] = []
    for each in _with_less_memory(operations, outputs, key):
        # TorchScript leaves out an operation that only writes into a list.
        if each.func._schema.is_mutable and not each.made:
            return None
        given = [*map(text, each.args), *(f"{k}={text(x)}" for k, x in each.kwargs.items())]
        several = isinstance(each.outputs, list | tuple)
        into = [f"y{len(lines)}_{place}" for place in range(len(each.outputs) if several else 1)]
        # An operation that changes and returns a tensor makes no new one.
        for name, x in zip(into, each.outputs if several else [each.outputs], strict=True):
            names.setdefault(id(x), name)
        call = each.func.overloadpacket._qualified_op_name.replace("::", ".")
        target = f"({', '.join(into)},)" if several else into[0]
        lines.append(f"    {target} = torch.ops.{call}({', '.join(given)})\n")
    lines.append(f"    return ({''.join(text(x) + ', ' for x in outputs)})\n")
    arguments = ", ".join(f"x{place}" for place in range(len(inputs) + len(constants)))
    try:
        unit: Any = torch.jit.CompilationUnit(f"def repeated({arguments}):\n{''.join(lines)}")
    except RuntimeError:
        return None
    return unit.repeated, constants


def _same_tensors(operations: list[_Operation]) -> dict[int, int]:
    """Map ids of tensors to the ids of equal, earlier ones."""
    same: dict[int, int] = {}
    transposed: dict[int, int] = {}
    for each in operations:
        func, out = each.func, each.outputs
        x: Any = each.args[0] if each.args else None
        own = same.get(id(x), id(x))
        if func is _aten.detach.default or (func is _aten.view.default and out.shape == x.shape):
            same[id(out)] = own
        elif func is _aten.t.default and own in transposed:
            # Gradients transpose again what the forward pass has transposed.
            same[id(out)] = transposed[own]
        elif func is _aten.t.default:
            transposed |= {own: id(out), id(out): own}
    return same


def _with_less_memory(
    operations: list[_Operation], outputs: list[Tensor], key: Callable[[Any], int]
) -> list[_Operation]:
    """Keep what outputs need, and overwrite products that nothing else reads."""
    readers, needed = Counter(map(key, outputs)), list[_Operation]()
    for each in reversed(operations):
        if each.func._schema.is_mutable or any(id(x) in readers for x in each.made):
            needed.append(each)
            readers.update({key(x) for x in each.read})
    products = {id(x): x for each in needed if each.func in _PRODUCTS for x in each.made}
    found = []
    for each in reversed(needed):
        over = key(each.args[0]) if each.args else 0
        alone = over in products and readers[over] == 1
        found.append(_written_over(products[over], each) if alone else each)
    return found


def _written_over(product: Tensor, each: _Operation) -> _Operation:
    """Return an operation that overwrites a product that nothing else reads.

    New memory would first have to be loaded into the caches.
    """
    if each.func is _aten.tanh_backward.default:
        func = _aten.tanh_backward.grad_input
        return replace(each, func=func, kwargs={"grad_input": product})
    if each.func not in _IN_PLACE:
        return each
    alike = (product.shape, product.dtype) == (each.outputs.shape, each.outputs.dtype)
    return replace(each, func=_IN_PLACE[each.func]) if alike else each


# -- repeating on a GPU -------------------------------------------------------------------------

#: Held during a capture, since all captures on a device use one stream.
_CAPTURING = threading.Lock()
#: Backends with a failed capture in this process. torch's allocator may take a failed capture for
#: a running one, so there are no further captures.
_FAILED: set[Any] = set()


class DeviceGraphs:
    """Captures functions of trees of tensors as graphs of a GPU.

    A graph launches the kernels of a function with one call, for functions whose kernels take less
    time than their launches. It always reads and writes the same memory, so inputs and outputs are
    copied.
    """

    def __init__(self, backend: Any = torch.cuda) -> None:
        """Use the torch module with a device's graphs and streams."""
        self._backend = backend

    def wait(self, device: torch.device) -> None:
        """Wait until a device is done with this thread's work."""
        self._backend.current_stream(device).synchronize()

    def captured(
        self, function: Function, inputs: TensorTree, leaves: list[Tensor]
    ) -> tuple[TensorTree, Repeat | None]:
        """Call a function, and capture a graph that repeats it.

        The function's argument is a tree with the tensors `leaves`. Returns the result and the
        graph; None: it is invalid for other inputs, or the capture failed.
        """
        with _Watch() as watch:
            outputs = function(inputs)
        made: list[Tensor] = []
        _placed(outputs, made)
        constants, fits = _captured_constants(watch, leaves)
        read = {id(x) for each in watch.operations for x in each.read} | set(map(id, made))
        places = [place for place, x in enumerate(leaves) if id(x) in read]
        if not fits or any(x.device != leaves[0].device for x in [*leaves, *made]):
            return outputs, None
        # Another thread may have failed while this one waited.
        with _CAPTURING, self._backend.device(leaves[0].device):
            if self._backend in _FAILED:
                return outputs, None
            try:
                return outputs, self._capture(function, inputs, leaves, places, constants)
            except RuntimeError as error:  # such as too little memory
                _FAILED.add(self._backend)
                _log.warning(
                    "operations of an update could not be captured as a graph; no others will be "
                    "captured in this process, and some updates take longer: %s",
                    error,
                )
                return outputs, None

    def _capture(
        self,
        function: Function,
        inputs: TensorTree,
        leaves: list[Tensor],
        places: list[int],
        constants: list[Tensor],
    ) -> Repeat:
        kept = {place: leaves[place].clone() for place in places}
        fixed = _filled(_placed(inputs, []), [kept.get(i, x) for i, x in enumerate(leaves)])
        backend = self._backend
        graph, stream = backend.CUDAGraph(), _capture_stream(backend, leaves[0].device)
        stream.wait_stream(backend.current_stream())
        with backend.stream(stream):
            # Other threads keep copying during the capture.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                made: list[Tensor] = []
                template = _placed(function(fixed), made)
                # Single numbers of one kind are copied together.
                numbers = {
                    dtype: torch.stack([x for x in made if not x.ndim and x.dtype is dtype])
                    for dtype in dict.fromkeys(x.dtype for x in made if not x.ndim)
                }
            finally:
                graph.capture_end()
        backend.current_stream().wait_stream(stream)
        graph.constants = constants  # the graph reads them, so their memory must be kept
        # One kernel copies all inputs of one kind.
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for place, x in kept.items():
            by_dtype[x.dtype].append(place)
        into = [([kept[place] for place in own], own) for own in by_dtype.values()]

        @torch.no_grad()
        def repeat(leaves: list[Tensor]) -> TensorTree:
            for copies, places in into:
                torch._foreach_copy_(copies, [leaves[place] for place in places])
            graph.replay()
            own = {dtype: iter(x.clone().unbind()) for dtype, x in numbers.items()}
            return _filled(template, [x.clone() if x.ndim else next(own[x.dtype]) for x in made])

        return repeat


@cache
def _capture_stream(backend: Any, device: torch.device) -> Any:
    """Return the only stream for captures on a device.

    torch has few streams; nothing is copied on this high-priority one.
    """
    return backend.Stream(device, priority=-1)


def _captured_constants(watch: _Watch, inputs: list[Tensor]) -> tuple[list[Tensor], bool]:
    """Return a graph's constants, and whether it repeats all but host copies."""
    constants, fits = [], watch.is_repeatable
    memory = {x.untyped_storage().data_ptr() for x in inputs}
    for each in watch.operations:
        read, made = each.read, each.made
        for x in read:
            if (place := x.untyped_storage().data_ptr()) not in memory:
                memory.add(place)
                constants.append(x)
        memory.update(x.untyped_storage().data_ptr() for x in made)
        fits &= not any(
            one.device != other.device and (one.ndim or other.ndim or "copy" in each.func.name())
            for one in made
            for other in read
        )
    return constants, fits


# -- trees --------------------------------------------------------------------------------------

#: Tolerance on GPUs: share of a step after a sum such as a gradient's norm, and number of
#: roundings of a value after the step.
_OF_A_STEP: Final = 1e-4
_ROUNDINGS: Final = 4


def _read(tree: TensorTree, described: list[object], leaves: list[Tensor]) -> None:
    """Collect a tree's tensors, and properties that operations may depend on."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        described += (tree.shape, tree.dtype, tree.stride())
        return
    described.append(tuple(tree))
    for each in tree.values():
        _read(each, described, leaves)


def _placed(tree: TensorTree, leaves: list[Tensor]) -> Any:
    """Return the tree with numbers instead of tensors, which join `leaves`."""
    if isinstance(tree, Mapping):
        return {name: _placed(each, leaves) for name, each in tree.items()}
    leaves.append(tree)
    return len(leaves) - 1


def _filled(template: Any, leaves: Sequence[Tensor]) -> TensorTree:
    """Insert tensors into a template: the inverse of `_placed`."""
    if isinstance(template, dict):
        return {name: _filled(each, leaves) for name, each in template.items()}
    return leaves[template]


def _tensors(x: Any) -> Iterator[Tensor]:
    """Iterate over the tensors among arguments."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        yield from _tensors(tuple(x.values()))
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _tensors(each)


def _is_same(one: TensorTree, other: TensorTree, before: TensorTree | None, on_graph: bool) -> bool:
    """Return whether both results agree, in trees with equal names."""
    if not on_graph:
        return _equal(one, other)
    if before is None:
        # Sums may add up in another order. Single numbers are not compared, unless they are
        # integers: one rounding may flip a term of their mean.
        return _near(one, other, {}, 0.01, numbers=False)
    return _near(one, other, before, 1e-5, numbers=True)


def _equal(one: TensorTree, other: TensorTree) -> bool:
    """Return whether two trees have the same numbers; NaN equals NaN."""
    if isinstance(one, Mapping):
        return all(_equal(each, other[name]) for name, each in one.items())
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _near(
    one: TensorTree, other: TensorTree, before: TensorTree, tolerance: float, *, numbers: bool
) -> bool:
    """Return whether two trees differ only by rounding; integers must be equal.

    Args:
        one: a tree.
        other: a tree.
        before: values before a step, by the names in both: for these the steps are compared, which
            may be much smaller than the values.
        tolerance: relative tolerance of all other values.
        numbers: whether single numbers are compared.
    """
    if isinstance(one, Mapping):
        return all(
            _near(each, other[name], before.get(name, {}), tolerance, numbers=numbers)
            for name, each in one.items()
        )
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not (one.ndim or numbers):
        return True
    # In doubles, so that the comparison itself does not round.
    rounding = _ROUNDINGS * torch.finfo(one.dtype).eps
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    allowed = tolerance * one.norm()
    if isinstance(before, Tensor):
        step = one - before.double().nan_to_num()
        allowed = _OF_A_STEP * step.norm() + rounding * one.norm()
    return bool((one - other).norm() <= allowed)
