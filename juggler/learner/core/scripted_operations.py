"""Recorded operations as a graph of TorchScript.

TorchScript's interpreter comes from one operation to the next in a fraction of the time that Python
takes. It runs the graph as it is: nothing is fused, put in another order or left out, so numbers
are the same bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

#: TorchScript's numbers for what else would be no constant there.
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


def scripted(graph: fx.Graph) -> Callable[..., tuple[Tensor, ...]] | None:
    """The function of a graph's inputs that the interpreter runs; none: TorchScript does not know
    one of the operations, with arguments such as these."""
    script = _Script()
    for node in graph.nodes:
        if node.op != "output" and not script.add(node):
            return None
    function = script.function(graph.output_node().args[0])

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        # Of this thread alone: graphs of the caller's own are optimized as ever.
        before = torch._C._get_graph_executor_optimize(False)
        try:
            outputs: tuple[Tensor, ...] = function(*inputs)
            return outputs
        finally:
            torch._C._get_graph_executor_optimize(before)

    return run


class _Script:
    """A graph of TorchScript with the nodes of another one."""

    def __init__(self) -> None:
        self._graph: Any = torch._C.Graph()
        self._values: dict[Any, Any] = {}  # by node; of one with several outputs a list

    def add(self, node: fx.Node) -> bool:
        """Add a node behind the last one -> whether TorchScript knows it."""
        if node.op == "placeholder":
            self._values[node] = self._graph.addInput(node.name)
        elif node.target is operator.getitem:
            several, place = node.args
            self._values[node] = self._values[several][place]
        else:
            return self._add_operation(node)
        return True

    def function(self, outputs: Any) -> Any:
        """What returns the values of these nodes as a tuple."""
        values = [self._values[node] for node in outputs]
        kind = torch._C.TupleType([each.type() for each in values])
        self._graph.registerOutput(self._made("prim::TupleConstruct", values, kind))
        return torch._C._create_function_from_graph("recorded_operations", self._graph)

    def _add_operation(self, node: fx.Node) -> bool:
        schema: Any = _schema_of(node)
        if schema is None:
            return False
        given = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
        given |= node.kwargs
        try:
            values = [
                self._value(given.get(each.name, each.default_value), each.type)
                for each in schema.arguments
            ]
        except TypeError:  # it is no constant there
            return False
        made = self._graph.create(schema.name, values, len(schema.returns))
        # An operation is found by its name and arguments: it might be another one.
        if self._graph.insertNode(made).schema() != str(schema):
            return False
        results: Any = list(made.outputs())
        for each, returned in zip(results, schema.returns, strict=True):
            each.setType(returned.type)
        if len(results) == 1 and isinstance(node.meta["tensor"], list | tuple):
            unpacked = self._graph.create("prim::ListUnpack", results, len(node.meta["tensor"]))
            results = list(self._graph.insertNode(unpacked).outputs())
        elif len(results) == 1:
            (results,) = results
        self._values[node] = results
        return True

    def _value(self, x: Any, kind: Any) -> Any:
        """An argument of a kind that a schema says."""
        if isinstance(x, fx.Node):
            return self._values[x]
        if kind.kind() == "OptionalType" and x is not None:
            kind = kind.getElementType()
        if isinstance(x, list | tuple):
            if x and all(isinstance(own, bool | int | float) for own in x):
                return self._graph.insertConstant(list(x))  # made once
            each = [self._value(own, kind.getElementType()) for own in x]
            return self._made("prim::ListConstruct", each, kind)
        if kind.kind() == "FloatType" and x is not None:
            x = float(x)
        if isinstance(x, torch.memory_format):
            x = _MEMORY_FORMATS[x]
        return self._graph.insertConstant(x)

    def _made(self, name: str, values: list[Any], kind: Any) -> Any:
        made = self._graph.insertNode(self._graph.create(name, values, 1)).output()
        made.setType(kind)
        return made


def _schema_of(node: fx.Node) -> Any:
    """The schema of a node's operation. A number in the place of a tensor, such as that of `x * 2`,
    is for another schema of the same name; none: there is no such schema."""
    func: Any = node.target
    schema = func._schema
    if any(
        isinstance(x, bool | int | float) and each.type.kind() == "TensorType"
        for x, each in zip(node.args, schema.arguments, strict=False)
    ):
        name = schema.overload_name.replace("Tensor", "Scalar")
        others = func.overloadpacket
        schema = getattr(others, name)._schema if name in others.overloads() else None
    return schema
