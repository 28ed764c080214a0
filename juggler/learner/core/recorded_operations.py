"""What torch does while a function runs: whether it can be repeated, and how the CPU repeats it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from juggler.learner.core.scripted_operations import scripted
from juggler.learner.core.tensor_trees import TensorTree, filled, placed

#: Makes the operations of a function for other inputs: their tensors -> a tree.
Repeat = Callable[[list[Tensor]], TensorTree]

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


def recorded(
    function: Callable[[TensorTree], TensorTree],
    inputs: TensorTree,
    leaves: list[Tensor],
    may_read: bool,
) -> tuple[TensorTree, Repeat | None]:
    """Call a function of a tree, whose tensors are `leaves` -> what it returns, and what makes its
    operations again; none: they would be wrong for other inputs."""
    if len(set(map(id, leaves))) < len(leaves):  # which of them would an operation read?
        return function(inputs), None
    with (recorder := Recorder(leaves, may_read)):
        outputs = function(inputs)
    if not recorder.is_repeatable:
        return outputs, None
    made: list[Tensor] = []
    template = placed(outputs, made)
    operations, constants = recorder.finished(made), recorder.constants

    def repeat(leaves: list[Tensor]) -> TensorTree:
        # As when they were recorded, nothing is noted for gradients, nor of what is a view of what.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return filled(template, operations(*leaves, *constants))

    return outputs, repeat


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each operation of torch within it, those of gradients too.

    Attributes:
        is_repeatable: whether the same operations are right for other inputs of the same shapes.
    """

    def __init__(self, may_read: bool = False) -> None:
        """Args:
        may_read: whether the host may read numbers.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_repeatable = True
        self._may_read = may_read

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
        each = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        self.is_repeatable &= not any(
            tag in _UNREPEATABLE and not _is_indexed_by_numbers(func, args) for tag in func.tags
        )
        self.is_repeatable &= all(x is None or isinstance(x, Tensor) for x in each)
        if self.is_repeatable:
            self.saw(func, args, kwargs, outputs)
        return outputs

    def saw(self, func: Any, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """An operation that can be repeated was made."""


class Recorder(Watch):  # type: ignore[no-untyped-call]
    """Records each operation in a graph.

    Attributes:
        constants: tensors that operations read and none made; the last inputs of the graph.
    """

    def __init__(self, inputs: Sequence[Tensor], may_read: bool) -> None:
        """Args:
        inputs: of what is recorded.
        may_read: whether the host may read numbers.
        """
        super().__init__(may_read)
        self.constants: list[Tensor] = []
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}  # by the id of their tensor
        self._tensors: list[Tensor] = []  # those, so that no other one gets the same id
        self._transposed: dict[fx.Node, fx.Node] = {}
        self._changes = False  # whether any operation changes a tensor
        self._last_input: fx.Node | None = None
        self._inputs = 0
        for x in inputs:
            self._is(x, self._input())

    def saw(self, func: Any, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        several = isinstance(outputs, list | tuple)
        if func is _aten.detach.default or (
            func is _aten.view.default and outputs.shape == args[0].shape
        ):  # the same tensor, where there are no gradients
            self._is(outputs, self._node_of(args[0]))
            return
        self._changes |= func._schema.is_mutable
        nodes, named = self._named(args), self._named(kwargs)
        if func is _aten.t.default and nodes[0] in self._transposed:
            self._is(outputs, self._transposed[nodes[0]])
            return
        node = self._graph.call_function(func, nodes, named)
        node.meta.update(operation=func, tensor=outputs)
        if func is _aten.t.default:
            self._transposed |= {nodes[0]: node, node: nodes[0]}
        for place, x in enumerate(outputs if several else [outputs]):
            # What an operation changes in place, and returns, has its node.
            if x is not None and id(x) not in self._nodes:
                part = (node, place)
                self._is(x, self._graph.call_function(operator.getitem, part) if several else node)

    def finished(self, outputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """The recorded operations as a function of the inputs and `constants`."""
        graph = self._graph
        graph.output(tuple(self._node_of(x) for x in outputs))
        graph.eliminate_dead_code(_is_needed)
        for node in graph.nodes:
            if not self._changes and _is_constant(node):
                node.replace_all_uses_with(self._constant(node.meta["tensor"]))
            else:
                _write_over_argument(node)
        graph.eliminate_dead_code(_is_needed)
        # What TorchScript does not know is left to Python, which takes longer.
        repeat = scripted(graph) or fx.GraphModule(torch.nn.Module(), graph).forward
        for node in graph.nodes:
            node.meta.clear()  # it holds tensors
        self._tensors.clear()
        return repeat

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


#: Operations that may write their result over their first argument, and what does so.
_IN_PLACE: dict[Any, Any] = {
    _aten.relu.default: _aten.relu_.default,
    _aten.tanh.default: _aten.tanh_.default,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.mul.Scalar: _aten.mul_.Scalar,
}


def _write_over_argument(node: fx.Node) -> None:
    """Let an operation write its result over its first argument, if it is a product that nothing
    else reads: new memory would have to be brought into the caches."""
    over = node.args[0] if node.args else None
    if not (isinstance(over, fx.Node) and len(over.users) == 1):
        return
    if over.meta.get("operation") not in (_aten.addmm.default, _aten.mm.default):
        return
    old, new = over.meta["tensor"], node.meta["tensor"]
    if node.target in _IN_PLACE and (old.shape, old.dtype) == (new.shape, new.dtype):
        node.target = _IN_PLACE[node.target]
    elif node.target is _aten.tanh_backward.default:
        node.target, node.kwargs = _aten.tanh_backward.grad_input, {"grad_input": over}


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
