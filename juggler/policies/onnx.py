"""A policy as an ONNX model, for programs without Python or PyTorch.

The model acts for a batch of N environments, which may be any number, and does what
`Policy.act(explore=False)` does, connectors included. It keeps nothing between its calls: what the
policy remembers goes in and out.

Inputs, each with a leading dimension [N]:

- "observation", or "observation/key" for each part of a Dict or Tuple, in the dtypes of the
  policy's observation space; an action mask is the part "action_mask";
- where the policy remembers, "first" (bool): which rows begin an episode; and "state/…", of any
  content where one begins, else as the last call returned it;
- where it uses rewards, "reward" (float32): what came for the last action.

Outputs: "action", or "action/key" for each part, as the environment takes it; and
"next_state/…" for each "state/…".
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from juggler.policies.policy import Policy
from juggler.runtime.connectors.leaves import holds_masks
from juggler.runtime.modules.columns import ACTION_MASK, OBSERVATIONS
from juggler.runtime.modules.stepping import best_actions, initial_states, one_step, restarted
from juggler.runtime.wire.structures import from_tree, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Path as TreePath
from juggler.runtime.wire.trees import unflatten

_OBSERVATION: Final = "observation"
_ACTION: Final = "action"
_STATE: Final = "state"
_FIRST: Final = "first"
_REWARD: Final = "reward"
_MODULE: Final = "module"  # branches of the state
_CONNECTORS: Final = "connectors"
_CHOSEN: Final = "chosen"

_ROWS = 2  # of the example: exporters take 1 for a dimension that is always 1


def export(policy: Policy, path: Path) -> Path:
    """Write a policy as an ONNX model.

    Args:
        policy: whose connectors take tensors, as all that ship do, and whose module torch can
            export.
        path: of the file.

    Raises:
        ValueError: a part of the policy cannot be exported, or a package is missing; says which.
    """
    _check_connectors(policy)
    try:
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"exporting needs the package {error.name}: pip install 'juggler[onnx]'"
        ) from error
    inputs = _example_inputs(policy)
    graph = _Graph(policy, list(inputs))
    with torch.no_grad():
        # A first pass outside of the export: what modules and distributions make once is made here.
        graph(*inputs.values())
    batch = torch.export.Dim("batch")
    try:
        with _quiet():
            program = torch.onnx.export(
                graph,
                tuple(inputs.values()),
                input_names=["/".join(name) for name in inputs],
                output_names=["/".join(name) for name in graph.outputs],
                dynamic_shapes={"tensors": tuple({0: batch} for _ in inputs)},
                dynamo=True,
                verbose=False,
            )
    except Exception as error:
        raise ValueError(
            f"{type(policy.module).__name__} cannot be exported: {_cause(error)}"
        ) from error
    assert program is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(str(path), external_data=False)
    return path


class _Graph(nn.Module):
    """One step of a policy as a function of tensors.

    Attributes:
        outputs: their names, known after the first call.
    """

    def __init__(self, policy: Policy, inputs: list[TreePath]) -> None:
        super().__init__()
        self.module = policy.module
        self._policy, self._inputs = policy, inputs
        self.outputs: list[TreePath] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given: Any = unflatten(zip(self._inputs, tensors, strict=True))  # type: ignore[arg-type]
        policy, state = self._policy, given.get(_STATE, {})
        first, reward = given.get(_FIRST), given.get(_REWARD)  # [N] both
        observation = given[_OBSERVATION]  # [N, ...]
        for each in policy.env_to_module.stored:
            observation = each(observation)
        contexts, seen = {}, {}
        for name, connector in policy.contexts.items():
            context = state[_CONNECTORS][name]
            if connector.uses_rewards:
                context = connector.advance(
                    context["context"], context["seen"], state[_CHOSEN], reward
                )
            context = restarted(context, connector.initial(observation), first)
            contexts[name], seen[name] = context, observation
            observation = connector(observation, context)
        after: dict[str, Any] = {}
        if _MODULE in state:
            initial = initial_states(self.module, first.shape[0])
            memory = restarted(state[_MODULE], initial, first)
            outputs, after[_MODULE] = one_step(self.module.forward_inference, observation, memory)
        else:
            outputs = self.module.forward_inference({OBSERVATIONS: observation})
        chosen = best_actions(self.module, outputs)  # [N, ...]
        if contexts:
            after[_CONNECTORS] = {
                name: {"context": contexts[name], "seen": seen[name]}
                if connector.uses_rewards
                else connector.advance(contexts[name], seen[name], chosen, np.zeros(0, np.float32))
                for name, connector in policy.contexts.items()
            }
        if policy.uses_rewards:
            after[_CHOSEN] = chosen
        action = to_tree(policy.action_space, policy.module_to_env(chosen))
        results = {(_ACTION, *path): leaf for path, leaf in _leaves(action)}
        results |= {(f"next_{_STATE}", *path): leaf for path, leaf in _leaves(after)}
        self.outputs = list(results)
        # Copies: one tensor may be both an input and an output, or two outputs.
        return tuple(tensor.clone() for tensor in results.values())


def _example_inputs(policy: Policy) -> dict[TreePath, Tensor]:
    """By name, of a batch."""
    observation: Any = zeros(policy.observation_space, (_ROWS,))
    if holds_masks(policy.observation_space):
        observation[ACTION_MASK] = tree_map(np.ones_like, observation[ACTION_MASK])
    inputs: dict[str, Any] = {_OBSERVATION: observation}
    _, state = policy.act(from_tree(policy.observation_space, observation))
    if state is not None:
        inputs[_FIRST] = np.ones(_ROWS, np.bool_)
        inputs[_STATE] = kept = {}
        if policy.uses_rewards:
            inputs[_REWARD] = np.zeros(_ROWS, np.float32)
            kept[_CHOSEN] = state.chosen
        if state.module:
            kept[_MODULE] = tree_map(Tensor.numpy, state.module)
        seen = policy.env_to_module(observation)
        for name, context in state.contexts.states().items():
            connector = policy.contexts[name]
            entry = {"context": context, "seen": seen} if connector.uses_rewards else context
            kept.setdefault(_CONNECTORS, {})[name] = entry
            seen = connector(seen, context)
    return {path: torch.tensor(array) for path, array in _leaves(inputs)}


def _leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key, branch in tree.items():
        yield from _leaves(branch, (*path, key))


def _check_connectors(policy: Policy) -> None:
    """
    Raises:
        ValueError: a connector works with NumPy alone.
    """
    around = [
        *policy.env_to_module.stored,
        *policy.contexts.values(),
        *policy.module_to_env.connectors,
    ]
    for connector in around:
        if not connector.takes_tensors:
            name = type(connector).__name__
            raise ValueError(
                f"connector {name} cannot be exported: it works with NumPy alone. Where its "
                "methods do the same with tensors, in operations of torch, set "
                f"{name}.takes_tensors = True"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporter and libraries have to say about themselves."""
    logger = logging.getLogger("torch.onnx._internal.exporter")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _cause(error: BaseException) -> str:
    """The first line that says something about what began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
