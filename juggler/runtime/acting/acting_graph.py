"""A policy step as a function of tensors, and its ONNX export."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, TextIO

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn
from torch.distributions import Distribution

from juggler.runtime.acting.actor import CHOSEN, SEEN, Actor
from juggler.runtime.connectors.leaves import LeafFunctions, holds_masks, in_dtype
from juggler.runtime.connectors.pipelines import EnvToModule, ModuleToEnv
from juggler.runtime.install_commands import installing
from juggler.runtime.modules.array_module import TensorModule
from juggler.runtime.modules.columns import ACTION_LOGP, ACTION_MASK
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.user_tracebacks import place_of_readers
from juggler.runtime.wire.structures import space_leaves, to_tree, tree_leaves, tree_map, zeros
from juggler.runtime.wire.trees import Path, unflatten

_OBSERVATION: Final = "observation"
_ACTION: Final = "action"
_STATE: Final = "state"
_FIRST: Final = "first"
_REWARD: Final = "reward"
_UNIFORM: Final = "uniform"

#: Held during an export, which changes settings of the whole process.
_EXPORTING: Final = threading.Lock()

#: Loggers for developers of torch.
_LOGGERS: Final = (
    "torch.onnx._internal.exporter",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
)

_ROWS = 2  # rows of the example; exporters treat a dimension of 1 as fixed


class ActingGraph(nn.Module):
    """Maps observations of N environments to actions, without memory between calls.

    Args:
        module: the module that acts.
        env_to_module: the connectors between environment and module.
        module_to_env: the connectors between module and environment.
        observation_space: the environment's.
        action_space: the environment's.
        explores: draw actions, also output "chosen" and "action_logp", and keep the connectors'
            state in buffers, named by `EnvToModule.numbers`. Otherwise actions are the most likely
            ones.

    Attributes:
        inputs: an example of each input, by name.
        outputs: names of the outputs, known after the first call.

    Raises:
        ValueError: a connector works only with NumPy.
    """

    def __init__(
        self,
        module: RLModule,
        env_to_module: EnvToModule,
        module_to_env: ModuleToEnv,
        observation_space: Space[Any],
        action_space: Space[Any],
        explores: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self._env_to_module, self._module_to_env = env_to_module, module_to_env
        seen = env_to_module.acting_part()
        self._contexts = seen.contexts
        self._uses_rewards = any(each.uses_rewards for each in self._contexts.values())
        self._tensors = TensorModule(module)
        self._actor = Actor(self._tensors, 1, 1, 0, module_to_env, seen)
        self._observation_space, self._action_space = observation_space, action_space
        self._explores = explores
        # In the dtypes of batches, since learners get these actions.
        self._as_chosen = LeafFunctions(
            {
                path: partial(in_dtype, dtype=leaf.dtype)
                for path, leaf in space_leaves(module_to_env.action_space)
            }
        )
        self._check_connectors()
        self._numbers = env_to_module.numbers() if explores else {}
        for name, array in self._numbers.items():
            self.register_buffer(name, torch.tensor(array))  # [...]
        self.outputs: list[Path] = []
        self.inputs = self._example()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given: Any = unflatten(zip(self.inputs, tensors, strict=True))
        observation = given[_OBSERVATION]  # [N, ...]
        if self._numbers:
            numbers = {name: getattr(self, name) for name in self._numbers}
            observation = self._env_to_module.with_numbers(observation, numbers)
        else:
            observation = self._env_to_module(observation)
        # The memory travels through inputs and outputs, since a graph keeps nothing.
        actor, spec = self._actor, self._tensors.distribution
        actor.memory.trees = dict(given.get(_STATE, {}))
        self._tensors.begin()
        if self._uses_rewards:
            actor.rewarded(given[_REWARD])
        noise = None
        if _UNIFORM in given and spec is not None:
            noise = spec.noise_from(given[_UNIFORM])  # [N, M]
        first = given.get(_FIRST)  # [N]
        sent, chosen, inputs = actor.act(
            observation, first=first, explore=self._explores, noise=noise, keep=False
        )  # [N, ...]
        # Outputs are named by their places in trees, as inputs are.
        action = to_tree(self._action_space, sent)
        results = {(_ACTION, *path): leaf for path, leaf in tree_leaves(action)}
        if self._explores:
            results |= {
                (CHOSEN, *path): leaf for path, leaf in tree_leaves(self._as_chosen(chosen))
            }
            if inputs is not None:
                assert spec is not None
                results[ACTION_LOGP,] = spec(inputs).log_prob(chosen).float()  # [N]
        after = self._after()
        results |= {(f"next_{_STATE}", *path): leaf for path, leaf in tree_leaves(after)}
        self.outputs = list(results)
        # Copies, because one tensor may be both an input and an output, or two outputs.
        return tuple(tensor.clone() for tensor in results.values())

    def _after(self) -> dict[str, Any]:
        """Return the memory [N, ...] that the next call needs."""
        memory = self._actor.memory
        if self._uses_rewards:
            return memory.trees  # contexts advance with the next reward
        self._actor.rewarded(torch.zeros(0))  # [0] no connector reads it
        return {
            name: tree
            for name, tree in memory.trees.items()
            if name != CHOSEN and not name.startswith(SEEN)
        }

    def _example(self) -> dict[Path, Tensor]:
        """Return example inputs of a batch, by name."""
        observation: Any = zeros(self._observation_space, (_ROWS,))
        if holds_masks(self._observation_space):
            observation[ACTION_MASK] = tree_map(np.ones_like, observation[ACTION_MASK])
        inputs: dict[str, Any] = {_OBSERVATION: observation}
        seen = tree_map(torch.tensor, self._env_to_module(observation))  # [N, ...]
        first = torch.ones(_ROWS, dtype=torch.bool)
        with torch.inference_mode():
            self._actor.act(seen, first=first, explore=False, keep=False)
            state = self._after()
        # A policy without memory has none of these inputs.
        if state:
            inputs |= {_FIRST: first, _STATE: state}
            if self._uses_rewards:
                inputs[_REWARD] = np.zeros(_ROWS, np.float32)
        if self._explores and self._tensors.draws:
            assert self._tensors.distribution is not None
            size = self._tensors.distribution.noise_size
            inputs[_UNIFORM] = np.full((_ROWS, 2, size), 0.5, np.float32)
        return {path: torch.tensor(np.asarray(leaf)) for path, leaf in tree_leaves(inputs)}

    def _check_connectors(self) -> None:
        around = [
            *self._env_to_module.stored,
            *self._contexts.values(),
            *self._module_to_env.connectors,
        ]
        for connector in around:
            if not connector.takes_tensors:
                name = type(connector).__name__
                raise ValueError(
                    f"connector {name} cannot be exported: it only works with NumPy. If its "
                    "methods do the same with tensors, in operations of torch, set "
                    f"{name}.takes_tensors = True"
                )


def to_onnx(graph: ActingGraph, optimize: bool = True) -> torch.onnx.ONNXProgram:
    """Convert the graph to an ONNX model for batches of any size.

    Args:
        graph: the graph to export.
        optimize: fold constants; otherwise each weight stays an initializer with its name in the
            graph.

    Raises:
        ValueError: the graph cannot be exported, or a package is missing; names it.
    """
    try:
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"exporting needs the package {error.name}: {installing('onnx')}"
        ) from error
    inputs = graph.inputs
    with torch.no_grad():
        # A first call outside the export, in which modules and distributions initialize themselves.
        # Here torch.distributions check their arguments, which is impossible in the export.
        graph(*inputs.values())
    batch = torch.export.Dim("batch")
    try:
        # The exporter changes settings of the whole process, and prints to its streams.
        with _EXPORTING, _quiet(), _unchecked():
            program = torch.onnx.export(
                graph,
                tuple(inputs.values()),
                input_names=["/".join(name) for name in inputs],
                output_names=["/".join(name) for name in graph.outputs],
                dynamic_shapes={"tensors": tuple({0: batch} for _ in inputs)},
                dynamo=True,
                optimize=optimize,
                verbose=False,
            )
    except Exception as error:
        # The exporter wraps errors of the module several times.
        origin = _origin(error)
        raise ValueError(
            f"{type(graph.module).__name__} cannot be exported: {_reason(origin)}"
        ) from origin
    assert program is not None
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter and its libraries, which print whole graphs."""
    levels = {logger: logger.level for logger in map(logging.getLogger, _LOGGERS)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    stderr: Any = None if sys.stderr is None else _OfOthers(sys.stderr)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


class _OfOthers:
    """A stream that passes on only the output of other threads.

    Otherwise it acts like the stream, whose file descriptor other threads may need.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._own = stream, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._own else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Disable argument checks of torch.distributions, in all threads.

    Checks read values of tensors, which cannot be exported.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _origin(error: BaseException) -> BaseException:
    """Return the root cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    """Return an error's first line and its place in user code."""
    # Imports SymPy and torch's compiler, which the export has already imported.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    place = place_of_readers(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            "its control flow depends on the value of a tensor, as in `if x.sum() > 0`, but a "
            f"model does the same for all values: choose with torch.where{place}"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}{place}"
