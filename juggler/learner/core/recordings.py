"""Recordings: the torch operations of a function, made again without the Python around them.

A small update takes some hundred operations of a few microseconds. Calling modules, building the
graph of gradients and walking through it takes about as long again. It comes to the same operations
each time, as long as shapes are the same. So they are recorded once, gradients among them, and
after that nothing but they run: on the CPU one by one, by TorchScript's interpreter, with results
that are the same bit for bit, and on a GPU as a graph.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from torch import Tensor

from juggler.learner.core.device_graphs import DeviceGraphs
from juggler.learner.core.recorded_operations import Repeat, recorded
from juggler.learner.core.tensor_trees import TensorTree, alike, near, read, same

_log = logging.getLogger(__name__)

#: Calls with the same shapes after which one is recorded.
OFTEN: Final = 20
#: Calls before a recording that are timed, and after it those that are made both ways and compared:
#: in all of them the host waits for a GPU.
_TIMED, _CHECKS = 3, 3
#: Shapes that calls are counted for, until counting begins anew, and those that are recorded.
_MOST_COUNTED, _MOST_RECORDED = 256, 16
#: Seconds of a call of which the Python around operations is a small part. Where operations run on
#: the CPU, they are processor time of the thread that calls, which is that of Python, takes part in
#: each operation, and is not longer for other work of the machine. What further threads of an
#: operation take is not counted: they do not shorten the Python.
SLOW: Final = 0.1


class Recordings:
    """Calls a function of trees of tensors, or makes the operations of an earlier call again.

    It must be a function of its inputs alone: what else it reads must stay the same as long as
    `basis` does. It must neither change its inputs nor draw random numbers. Where the host reads a
    number of a tensor, or shapes depend on one, nothing is recorded, and the function is called.
    Nor is a call whose operations take a GPU longer than the host needs to launch them.

    The first calls after a recording are made both ways. Should their results differ in a single
    number, or on a GPU by more than rounding, nothing is recorded any more, and the log says so.
    """

    def __init__(
        self,
        often: int = OFTEN,
        slow: float = SLOW,
        graphs: Mapping[str, DeviceGraphs] | None = None,
    ) -> None:
        """Args:
        often: calls with the same shapes after which one is recorded.
        slow: calls that take longer, in seconds as `SLOW`, are not recorded; inf: all are,
            whatever they take.
        graphs: by kind of device, what captures calls there; none: CUDA graphs.
        """
        self._often, self._slow = often, slow
        self._graphs = {"cuda": DeviceGraphs()} if graphs is None else graphs
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
        before: TensorTree | None = None,
    ) -> TensorTree:
        """What the function returns for these inputs, without gradients.

        Args:
            function: takes and returns trees of tensors.
            inputs: its argument. Functions are told apart by the names in it.
            basis: what its operations depend on beside the inputs. With another one, all recordings
                are forgotten.
            decided: what the function decides by the only number that the host reads there; none:
                it must not read any. Calls with another decision are recorded apart.
            before: of what it returns, by the same names, what it makes a step from. Without any it
                adds up many numbers, for which a GPU takes any order.
        """
        if self._is_off:
            return function(inputs)
        if self._basis != basis:
            self._calls, self._basis, self._recorded = {}, basis, 0
        told: list[object] = [decided]
        leaves: list[Tensor] = []
        read(inputs, told, leaves)
        key = tuple(told)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) == _MOST_COUNTED:  # of most shapes no other call may come
                self._calls = {own: each for own, each in self._calls.items() if each.repeat}
            call = self._calls[key] = _Call()
        if call.repeat is None:
            return self._counted(call, function, inputs, leaves, decided is not None, before)
        if not call.checks_left:
            try:
                return call.repeat(leaves)
            except RuntimeError:  # such as an index out of bounds: the function says it in words
                return function(inputs)
        call.checks_left -= 1
        outputs = function(inputs)
        self._compare(call, outputs, leaves, before)
        return outputs

    def _counted(
        self,
        call: _Call,
        function: Callable[[TensorTree], TensorTree],
        inputs: TensorTree,
        leaves: list[Tensor],
        may_read: bool,
        before: TensorTree | None,
    ) -> TensorTree:
        """Call the function, and record it if that is worth it."""
        call.count += 1
        device = leaves[0].device
        graphs = self._graphs.get(device.type)
        if device.type != "cpu" and graphs is None:
            return function(inputs)
        if self._often - _TIMED <= call.count < self._often:
            if graphs:
                wait = partial(graphs.wait, device)
                return call.timed(function, inputs, time.perf_counter, wait)
            return call.timed(function, inputs, time.thread_time, _do_nothing)
        may_record = self._recorded < _MOST_RECORDED and call.is_worth_it(self._slow)
        if call.count != self._often or not may_record:
            return function(inputs)
        if graphs:
            outputs, call.repeat = graphs.captured(function, inputs, leaves)
        else:
            outputs, call.repeat = recorded(function, inputs, leaves, may_read)
        if call.repeat:
            self._recorded += 1
            self._compare(call, outputs, leaves, before)
        return outputs

    def _compare(
        self, call: _Call, outputs: TensorTree, leaves: list[Tensor], before: TensorTree | None
    ) -> None:
        """Give up recording if the recorded operations have other outputs."""
        assert call.repeat is not None
        on_graph = leaves[0].device.type in self._graphs
        try:
            if _is_same(outputs, call.repeat(leaves), before, on_graph):
                return
        except RuntimeError as error:  # such as a GPU without memory for both
            _log.info("recorded operations of an update could not be compared: %s", error)
            call.repeat = None
            return
        self._is_off, self._calls = True, {}
        _log.warning(
            "recorded operations of an update gave other results than its modules and loss: from "
            "here on updates are made without recordings, which takes longer"
        )


class _Call:
    """What is known about calls with the same shapes.

    Attributes:
        repeat: makes its operations for other inputs; none: they are not recorded.
        count: of calls.
        checks_left: calls to make both ways from now on.
    """

    def __init__(self) -> None:
        self.repeat: Repeat | None = None
        self.count, self.checks_left = 0, _CHECKS
        self._host = self._seconds = math.inf  # of the shortest call

    def is_worth_it(self, slow: float) -> bool:
        """Whether calls are not slow, and a GPU waits for the host in them."""
        if math.isinf(slow):
            return True
        return self._seconds <= slow and self._host >= self._seconds / 2

    def timed(
        self,
        function: Callable[[TensorTree], TensorTree],
        inputs: TensorTree,
        clock: Callable[[], float],
        wait: Callable[[], None],
    ) -> TensorTree:
        """Call the function and see how long it takes, on the host and with the device."""
        wait()
        started = clock()
        outputs = function(inputs)
        host = clock() - started
        wait()
        self._host = min(self._host, host)
        self._seconds = min(self._seconds, clock() - started)
        return outputs


def _is_same(
    outputs: TensorTree, again: TensorTree, before: TensorTree | None, on_graph: bool
) -> bool:
    """Whether two outputs are what both ways must give."""
    if not on_graph:
        return same(outputs, again)
    return alike(outputs, again) if before is None else near(outputs, again, before)


def _do_nothing() -> None:
    """There is no device to wait for."""
