"""Takes a module's acting pass apart, and puts it together again in NumPy.

The pass is run once with stand-ins for tensors (torch.fx), which note what is done with them. So it
may be anyone's code, as long as what it does is in `LAYERS` or in `operations`, and does not depend
on the numbers in its inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from juggler.runtime.modules.arrays.distributions import ArrayDistribution
from juggler.runtime.modules.arrays.layers import LAYERS
from juggler.runtime.modules.arrays.live import LiveArrays, NotKnown
from juggler.runtime.modules.arrays.operations import ATTRIBUTES, found
from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTION_MASK,
    ACTIONS,
    OBSERVATIONS,
    STATES,
)
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import space_leaves, tree_leaves
from juggler.runtime.wire.trees import Path, unflatten

_NEEDED = (ACTION_DIST_INPUTS, ACTIONS, STATES)
_LAYER = "layer"  # in the metadata of a node
_OWN = "own"


class ArrayPass(NamedTuple):
    """A pass of a module on arrays.

    Attributes:
        run: maps a batch to outputs.
        outputs: their names.
    """

    run: Callable[[Mapping[str, Any]], dict[str, Any]]
    outputs: Collection[str]


def may_act_in_numpy(module: nn.Module) -> bool:
    """Whether all of a module's code is Juggler's, torch's, or somebody's who says that it may:
    nobody else knows what it does."""
    if getattr(module, "may_act_in_numpy", False):
        return True
    own = (
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or not type(module).__module__.startswith(("juggler.", "torch.nn.modules."))
    )
    return not own and all(map(may_act_in_numpy, module.children()))


def array_pass(
    module: RLModule, use: str, live: LiveArrays, distribution: ArrayDistribution | None
) -> ArrayPass:
    """A pass of a module on arrays.

    Args:
        module: in evaluation mode; it is the same afterwards.
        use: "exploration" or "inference".
        live: the module's tensors.
        distribution: of its actions, if it has one.

    Raises:
        NotKnown: it does something that is not known here.
    """
    if getattr(type(module), f"forward_{use}") is not getattr(RLModule, f"forward_{use}"):
        raise NotKnown(f"it has a forward_{use} of its own")
    random_state = torch.get_rng_state()
    others: Any = random.getstate(), np.random.get_state()
    try:
        made = _made(module, use, live, distribution)
    except NotKnown:
        raise
    except Exception as error:  # by anyone's code, which did not expect stand-ins
        raise NotKnown(_why_not(error)) from error
    finally:
        drew = not torch.equal(random_state, torch.get_rng_state())
        torch.set_rng_state(random_state)
        drew |= random.getstate() != others[0]
        now: Any = np.random.get_state()
        drew |= any(map(np.any, map(np.not_equal, now[1:], others[1][1:])))
        random.setstate(others[0])
        np.random.set_state(others[1])
    if drew:
        raise NotKnown("it draws random numbers")
    return made


def _made(
    module: RLModule, use: str, live: LiveArrays, distribution: ArrayDistribution | None
) -> ArrayPass:
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    paths: list[Path] = [(OBSERVATIONS, *at) for at, _ in space_leaves(module.observation_space)]
    paths += [(STATES, *at) for at, _ in tree_leaves(module.get_initial_state())]
    given = [graph.placeholder("_".join(("given", *path))) for path in paths]
    leaves = [fx.Proxy(node, tracer) for node in given]
    batch: Any = unflatten(zip(paths, leaves, strict=True))  # type: ignore[arg-type]
    tensors: dict[fx.Node, Tensor] = {}
    with torch.no_grad(), _unchanged(module), _taken_apart(module, tracer, tensors, distribution):
        outputs = getattr(module, f"_forward_{use}")(batch)
        if module._masked and ACTION_DIST_INPUTS in outputs:
            inputs, mask = outputs[ACTION_DIST_INPUTS], batch[OBSERVATIONS][ACTION_MASK]
            masked = module.action_distribution().mask(inputs, mask)  # which is replaced, too
            outputs = {**outputs, ACTION_DIST_INPUTS: masked}
    _require_no_changes(graph)
    wanted = {name: outputs[name] for name in _NEEDED if name in outputs}
    return _put_together(dict(zip(given, paths, strict=True)), tensors, wanted, live)


@contextmanager
def _taken_apart(
    module: RLModule,
    tracer: fx.proxy.GraphAppendingTracer,
    tensors: dict[fx.Node, Tensor],
    distribution: ArrayDistribution | None,
) -> Iterator[None]:
    """Replace a module's tensors by stand-ins, and what is done as a whole by notes of it."""

    def stand_in(tensor: Tensor) -> fx.Proxy:
        node = tracer.graph.placeholder(f"own_{len(tensors)}")
        tensors[node] = tensor
        return fx.Proxy(node, tracer)

    def noted(function: Callable[..., Any], key: str, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy = tracer.create_proxy("call_function", _as_a_whole, args, kwargs)
        proxy.node.meta[key] = function
        return proxy

    parts = list(module.modules())
    kinds: list[tuple[Any, Any]] = [(part._parameters, part._buffers) for part in parts]
    held = [(kept, dict(kept)) for both in kinds for kept in both]
    layers = [part for part in parts if type(part) in LAYERS]
    replaced: list[Any] = [*layers]
    try:
        for kept, before in held:
            kept.update({k: stand_in(x) for k, x in before.items() if x is not None})
        for layer in layers:
            layer.__dict__["forward"] = partial(noted, layer, _LAYER)
        if module._masked and distribution is not None:
            spec = module.action_distribution()
            spec.__dict__["mask"] = partial(noted, distribution.mask, _OWN)
            replaced.append(spec)
        yield
    finally:
        for kept, before in held:
            kept.update(before)
        for each in replaced:
            each.__dict__.pop("forward" if each in layers else "mask", None)


def _require_no_changes(graph: fx.Graph) -> None:
    """Raise NotKnown if some tensor is written to: what follows may not see that in NumPy."""
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        method = node.op == "call_method" or node.op == "call_function"
        plain = name.startswith("__") or not name.endswith("_")
        if method and (not plain or "out" in node.kwargs or node.kwargs.get("inplace")):
            raise NotKnown(f"it changes a tensor in place, with {name}")


def _as_a_whole(*_: Any, **__: Any) -> None:
    """Stands in a graph for what is in the metadata of its node."""


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Undo what code in it does to the attributes of a module's parts.

    Raises:
        NotKnown: it did something to them.
    """
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        changed = []
        for part, attributes in before:
            now = vars(part)
            names = [
                name
                for name in now.keys() | attributes.keys()
                if now.get(name, before) is not attributes.get(name, before)
            ]
            changed += [f"{type(part).__name__}.{name}" for name in names]
            if names:
                now.clear()
                now.update(attributes)
    if changed:
        raise NotKnown(f"it changes {sorted(changed)[0]}")


def _put_together(
    given: Mapping[fx.Node, Path],
    tensors: Mapping[fx.Node, Tensor],
    wanted: Mapping[str, Any],
    live: LiveArrays,
) -> ArrayPass:
    """A function that does what a graph says, as far as it is wanted."""
    program = _Program(live, tensors)
    ends = {name: program.slot(value) for name, value in wanted.items()}
    inputs = [(path, program.slots[node]) for node, path in given.items() if node in program.slots]
    template, steps = program.values, program.steps
    results = itemgetter(*ends.values(), -1)  # of at least two, so that it is always a tuple

    def run(batch: Mapping[str, Any]) -> dict[str, Any]:
        values = template.copy()
        for path, slot in inputs:
            leaf: Any = batch
            for key in path:
                leaf = leaf[key]
            values[slot] = leaf
        for function, take, slot in steps:
            values[slot] = function(*take(values))
        return dict(zip(ends, results(values), strict=False))

    return ArrayPass(run, ends.keys())


class _Program:
    """Steps that fill slots with values.

    Attributes:
        values: of the slots before the first step.
        steps: a function, what takes its arguments out of the values, and the slot of its result.
        slots: of the nodes that the steps need.
    """

    def __init__(self, live: LiveArrays, tensors: Mapping[fx.Node, Tensor]) -> None:
        self.values: list[Any] = []
        self.steps: list[tuple[Callable[..., Any], Callable[[list[Any]], Any], int]] = []
        self.slots: dict[fx.Node, int] = {}
        self._live, self._tensors = live, tensors

    def slot(self, value: Any) -> int:
        """The slot of a stand-in, a constant, or a structure with stand-ins in it."""
        if isinstance(value, fx.Proxy):
            value = value.node
        if isinstance(value, fx.Node):
            if value not in self.slots:
                self.slots[value] = self._of_node(value)
            return self.slots[value]
        if isinstance(value, slice):
            return self._step(slice, [value.start, value.stop, value.step])
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            kind = tuple if isinstance(value, tuple) else list
            return self._step(lambda *each: kind(each), value)
        if isinstance(value, Mapping):
            keys = list(value)
            return self._step(lambda *each: dict(zip(keys, each, strict=True)), value.values())
        if isinstance(value, Tensor):
            value = self._live.view(value)
        return self._new(value)

    def _of_node(self, node: fx.Node) -> int:
        if node in self._tensors:
            return self._new(self._live.view(self._tensors[node]))
        if node.op == "placeholder":
            return self._new(None)
        layer = node.meta.get(_LAYER)
        if layer is not None:  # one without layers in it is false
            function = LAYERS[type(layer)](layer, self._live)
        else:
            function = node.meta.get(_OWN) or found(node.op, node.target)
        if node.target is getattr and node.args[1] not in ATTRIBUTES:
            raise NotKnown(f"it uses the {node.args[1]} of a tensor")
        if node.kwargs:
            function = _with_keywords(function, list(node.kwargs))
        return self._step(function, [*node.args, *node.kwargs.values()])

    def _step(self, function: Callable[..., Any], arguments: Any) -> int:
        taken = [self.slot(each) for each in arguments]
        # A slice makes a list of one value, where an index makes the value itself.
        take = itemgetter(*taken) if len(taken) > 1 else itemgetter(slice(taken[0], taken[0] + 1))
        slot = self._new(None)
        self.steps.append((function, take, slot))
        return slot

    def _new(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1


def _with_keywords(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """A function whose last arguments are passed by these names."""
    last = -len(names)
    return lambda *each: function(*each[:last], **dict(zip(names, each[last:], strict=True)))


def _why_not(error: Exception) -> str:
    """What code did that could not go on with stand-ins."""
    if isinstance(error, fx.proxy.TraceError):
        return "what it does depends on numbers or sizes in its inputs"
    text = str(error).strip().split("\n")[0]
    if text.startswith("'len'"):
        return "it calls len() of a tensor, where shape[0] would do"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
