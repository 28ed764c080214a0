"""Recordings: the torch operations of a function, made again without the Python around them.

A small update takes some hundred operations of a few microseconds. Calling modules, building the
graph of gradients and walking through it takes about as long again. It comes to the same operations
each time, as long as shapes are the same. So they are recorded once, gradients among them, and
after that nothing but they run: the results are the same bit for bit.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

_log = logging.getLogger(__name__)

#: A tensor, or a map of trees.
TensorTree = Any

#: Calls with the same shapes after which one is recorded.
OFTEN: Final = 50
#: Calls after a recording that are made both ways, and compared.
_CHECKS = 3
#: Shapes that calls are counted for, and those that are recorded.
_MOST_COUNTED, _MOST_RECORDED = 256, 16
#: Seconds of a call of which the Python around operations is a small part.
SLOW: Final = 0.03

_aten = torch.ops.aten
#: What these make depends on shapes and numbers, and not on what is in tensors.
_CONSTANT = {
    _aten.scalar_tensor.default,
    _aten.full.default,
    _aten.full_like.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
    _aten.new_zeros.default,
    _aten.arange.default,
}
_UNREPEATABLE = {
    torch.Tag.data_dependent_output,  # the host reads numbers
    torch.Tag.dynamic_output_shape,  # shapes depend on numbers
    torch.Tag.nondeterministic_seeded,  # it draws
}


class Recordings:
    """Calls a function of trees of tensors, or makes the operations of an earlier call again.

    It must be a function of its inputs alone: what else it reads must stay the same as long as
    `basis` does. It must neither change its inputs nor draw random numbers. Where the host reads a
    number of a tensor, or shapes depend on one, nothing is recorded, and the function is called.

    The first calls after a recording are made both ways. Should their results differ in a single
    number, nothing is recorded any more, and the log says so.
    """

    def __init__(self, often: int = OFTEN, slow: float = SLOW) -> None:
        """Args:
        often: calls with the same shapes after which one is recorded.
        slow: calls that take longer, in seconds, are not recorded.
        """
        self._often, self._slow = often, slow
        self._basis: object = None
        self._calls: dict[object, _Call] = {}  # by names, shapes and kinds of inputs
        self._recorded = 0
        self._is_off = False

    def __call__(
        self,
        function: Callable[[TensorTree], TensorTree],
        inputs: TensorTree,
        basis: object,
        decided: bool | None = None,
    ) -> TensorTree:
        """What the function returns for these inputs, without gradients.

        Args:
            function: takes and returns trees of tensors.
            inputs: its argument.
            basis: what its operations depend on beside the inputs. With another one, all recordings
                are forgotten.
            decided: what the function decides by the only number that the host reads there; none:
                it must not read any. Calls with another decision are recorded apart.
        """
        if self._is_off:
            return function(inputs)
        if self._basis != basis:
            self._calls, self._basis, self._recorded = {}, basis, 0
        told: list[object] = [decided]
        leaves: list[Tensor] = []
        _read(inputs, told, leaves)
        key = tuple(told)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) == _MOST_COUNTED:
                return function(inputs)
            call = self._calls[key] = _Call()
        if call.repeat is None:
            return self._counted(call, function, inputs, leaves, decided is not None)
        if not call.checks_left:
            try:
                return call.repeated(leaves)
            except RuntimeError:  # such as an index out of bounds: the function says it in words
                return function(inputs)
        call.checks_left -= 1
        outputs = function(inputs)
        if not _same(outputs, call.repeated(leaves)):
            self._differed()
        return outputs

    def _counted(
        self,
        call: _Call,
        function: Callable[[TensorTree], TensorTree],
        inputs: TensorTree,
        leaves: list[Tensor],
        may_read: bool,
    ) -> TensorTree:
        """Call the function, and record it if that is worth it."""
        call.count += 1
        may_record = self._recorded < _MOST_RECORDED and call.seconds <= self._slow
        if call.count == self._often and may_record and len(set(map(id, leaves))) == len(leaves):
            with (recorder := _Recorder(leaves, may_read)):
                outputs = function(inputs)
            if recorder.is_repeatable:
                self._recorded += 1
                call.take(recorder, outputs)
                if not _same(outputs, call.repeated(leaves)):
                    self._differed()
            return outputs
        started = time.perf_counter()
        outputs = function(inputs)
        call.seconds = min(call.seconds, time.perf_counter() - started)
        return outputs

    def _differed(self) -> None:
        self._is_off, self._calls = True, {}
        _log.warning(
            "recorded operations of an update gave other results than its modules and loss: from "
            "here on updates are made without recordings, which takes longer"
        )


class _Call:
    """What is known about calls with the same shapes."""

    def __init__(self) -> None:
        self.count, self.seconds, self.checks_left = 0, math.inf, _CHECKS
        self.repeat: Callable[..., tuple[Tensor, ...]] | None = None
        self._constants: list[Tensor] = []
        self._template: TensorTree = None  # the outputs, with their place in place of a tensor

    def take(self, recorder: _Recorder, outputs: TensorTree) -> None:
        leaves: list[Tensor] = []
        self._template = _placed(outputs, leaves)
        self.repeat = recorder.finished(leaves)
        self._constants = recorder.constants

    def repeated(self, leaves: list[Tensor]) -> TensorTree:
        """The outputs of the recorded operations for these inputs."""
        assert self.repeat is not None
        with torch.no_grad():
            return _filled(self._template, self.repeat(*leaves, *self._constants))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation of torch, those of gradients too, in a graph.

    Attributes:
        constants: tensors that operations read and none made; the last inputs of the graph.
        is_repeatable: whether the same operations are right for other inputs of the same shapes.
    """

    def __init__(self, inputs: Sequence[Tensor], may_read: bool) -> None:
        """Args:
        inputs: of what is recorded.
        may_read: whether the host may read numbers.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants: list[Tensor] = []
        self.is_repeatable = True
        self._may_read = may_read
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}  # by the id of their tensor
        self._tensors: list[Tensor] = []  # those, so that no other one gets the same id
        self._transposed: dict[fx.Node, fx.Node] = {}
        self._changes = False  # whether any operation changes a tensor
        self._last_input: fx.Node | None = None
        self._inputs = 0
        for x in inputs:
            self._is(x, self._input())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, which takes seconds, to keep this class from it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if self._may_read and func is _aten._local_scalar_dense.default:
            return outputs
        several = isinstance(outputs, list | tuple)
        each = list(outputs) if several else [outputs]
        self.is_repeatable &= not any(
            tag in _UNREPEATABLE and not _is_indexed_by_numbers(func, args) for tag in func.tags
        )
        self.is_repeatable &= all(x is None or isinstance(x, Tensor) for x in each)
        if not self.is_repeatable:
            return outputs
        if func is _aten.detach.default or (
            func is _aten.view.default and outputs.shape == args[0].shape
        ):  # the same tensor, where there are no gradients
            self._is(outputs, self._node_of(args[0]))
            return outputs
        self._changes |= func._schema.is_mutable
        nodes, named = self._named(args), self._named(kwargs)
        if func is _aten.t.default and nodes[0] in self._transposed:
            self._is(outputs, self._transposed[nodes[0]])
            return outputs
        node = self._made(func, nodes, named)
        node.meta.update(operation=func, tensor=outputs)
        if func is _aten.t.default:
            self._transposed |= {nodes[0]: node, node: nodes[0]}
        for place, x in enumerate(each):
            # What an operation changes in place, and returns, has its node.
            if x is not None and id(x) not in self._nodes:
                part = (node, place)
                self._is(x, self._graph.call_function(operator.getitem, part) if several else node)
        return outputs

    def finished(self, outputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """The recorded operations as a function of the inputs and `constants`."""
        graph = self._graph
        graph.output(tuple(self._node_of(x) for x in outputs))
        graph.eliminate_dead_code(_is_needed)
        for node in graph.nodes:
            if not self._changes and _is_constant(node):
                node.replace_all_uses_with(self._constant(node.meta["tensor"]))
            elif node.target in _IN_PLACE and _may_change(node.args[0]):
                node.target = _IN_PLACE[node.target]
        graph.eliminate_dead_code(_is_needed)
        for node in graph.nodes:
            node.meta.clear()  # it holds tensors
        self._tensors.clear()
        repeat: Callable[..., tuple[Tensor, ...]] = fx.GraphModule(torch.nn.Module(), graph).forward
        return repeat

    def _made(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        name = func._schema.name.partition("::")[2]
        if not (kwargs or func._schema.is_mutable):
            if name in ("view", "expand"):
                return self._graph.call_method(name, args)
            # A function of torch reads its arguments in half the time of the operation itself.
            quick = getattr(torch, name, None)
            if isinstance(quick, BuiltinFunctionType):
                return self._graph.call_function(quick, args)
        return self._graph.call_function(func, args, kwargs)

    def _named(self, x: Any) -> Any:
        """Arguments with nodes in place of tensors."""
        if isinstance(x, Tensor):
            return self._node_of(x)
        if isinstance(x, list | tuple):
            return type(x)(self._named(each) for each in x)
        if isinstance(x, Mapping):
            return {name: self._named(each) for name, each in x.items()}
        return x

    def _node_of(self, x: Tensor) -> fx.Node:
        if id(x) not in self._nodes:
            self._is(x, self._constant(x))
        return self._nodes[id(x)]

    def _is(self, x: Tensor, node: fx.Node) -> None:
        self._nodes[id(x)] = node
        self._tensors.append(x)

    def _constant(self, x: Tensor) -> fx.Node:
        self.constants.append(x)
        return self._input()

    def _input(self) -> fx.Node:
        name, self._inputs = f"input_{self._inputs}", self._inputs + 1
        if self._last_input is None:
            self._last_input = self._graph.placeholder(name)
        else:
            with self._graph.inserting_after(self._last_input):
                self._last_input = self._graph.placeholder(name)
        return self._last_input


#: Operations that may write their result over their argument.
_IN_PLACE: dict[Any, Any] = {torch.relu: torch.relu_, torch.tanh: torch.tanh_}


def _may_change(node: Any) -> bool:
    """Whether one other operation alone reads what this one made, in memory of its own."""
    made = node.meta.get("operation") in (_aten.addmm.default, _aten.mm.default)
    return made and len(node.users) == 1


def _is_needed(node: fx.Node) -> bool:
    """Whether it stays even if nothing reads what it makes."""
    operation = node.meta.get("operation")
    changes = operation is not None and operation._schema.is_mutable
    return changes or node.op in ("placeholder", "output")


def _is_constant(node: fx.Node) -> bool:
    """Whether it makes the same tensor each time, which nobody else may get hold of."""
    if node.meta.get("operation") not in _CONSTANT:
        return False
    operations = [user.meta.get("operation") for user in node.users]
    return all(
        each is not None and not any(x.alias_info for x in each._schema.returns)
        for each in operations
    )


def _is_indexed_by_numbers(func: Any, args: Any) -> bool:
    """Whether it is an index whose shape does not depend on what is in a mask."""
    return func is _aten.index.Tensor and not any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )


def _read(tree: TensorTree, told: list[object], leaves: list[Tensor]) -> None:
    """Collect the tensors of a tree, and all that operations on them may depend on."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        told += (tree.shape, tree.dtype, tree.stride())
        return
    told.append(tuple(tree))
    for each in tree.values():
        _read(each, told, leaves)


def _placed(tree: TensorTree, leaves: list[Tensor]) -> Any:
    """The tree with numbers from 0 on in place of its tensors, which become `leaves`."""
    if isinstance(tree, Mapping):
        return {name: _placed(each, leaves) for name, each in tree.items()}
    leaves.append(tree)
    return len(leaves) - 1


def _filled(template: Any, leaves: Sequence[Tensor]) -> TensorTree:
    if isinstance(template, dict):
        return {name: _filled(each, leaves) for name, each in template.items()}
    return leaves[template]


def _same(one: TensorTree, other: TensorTree) -> bool:
    """Whether two trees with the same names hold the same numbers; NaN is equal to NaN."""
    if isinstance(one, Mapping):
        return all(_same(each, other[name]) for name, each in one.items())
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
