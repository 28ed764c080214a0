"""Memory through which an environment in a process of its own takes a step. No torch here.

One byte tells the process that an action is waiting for it; another tells its owner that the step
is done. Only what has no fixed size is pickled: infos, and actions that are structures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from juggler.envrunner.environments.step_infos import told

_STEP, _STEPPED, _STEPPED_WITH = b"\0", b"\1", b"\2"  # no pickle begins with one of them


class StepMemory:
    """The actions of N environments, and what becomes of them.

    Attributes:
        actions: [N, ...], of a space that is one array; None: they are pickled.
        rewards: float64 [N].
        terminated, truncated: bool [N].
    """

    actions: NDArray[Any] | None
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    def __init__(self, space: gymnasium.Space[Any], num_envs: int, context: BaseContext) -> None:
        """Args:
        space: of all actions, as `gymnasium.vector.utils.batch_space` makes it.
        num_envs: N.
        context: starts the processes.
        """
        flags, numbers = np.dtype(np.bool_), np.dtype(np.float64)
        layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            "rewards": (numbers, (num_envs,)),
            "terminated": (flags, (num_envs,)),
            "truncated": (flags, (num_envs,)),
        }
        if isinstance(space, Box | MultiDiscrete):
            layout["actions"] = (space.dtype, space.shape)
        self._parts = {
            name: (context.RawArray("b", math.prod(shape) * dtype.itemsize), dtype, shape)
            for name, (dtype, shape) in layout.items()
        }
        self.__setstate__(self._parts)

    def __getstate__(self) -> dict[str, Any]:
        return self._parts

    def __setstate__(self, parts: dict[str, Any]) -> None:
        self._parts, self.actions = parts, None
        for name, (memory, dtype, shape) in parts.items():
            setattr(self, name, np.frombuffer(memory, dtype).reshape(shape))


def begin_steps(
    pipes: Sequence[Connection], memory: StepMemory, space: gymnasium.Space[Any], actions: Any
) -> None:
    """Let each environment make a step with its action.

    Raises:
        ValueError: the actions are of another shape.
        TypeError: they are numbers of another kind.
    """
    if memory.actions is None:
        for pipe, action in zip(pipes, iterate(space, actions), strict=True):
            pipe.send(("step", action))
        return
    given = np.asarray(actions)
    if given.shape != memory.actions.shape:
        raise ValueError(f"actions of shape {given.shape}, where {memory.actions.shape} is due")
    np.copyto(memory.actions, given, casting="same_kind")
    for pipe in pipes:
        pipe.send_bytes(_STEP)


def read_answer(pipe: Connection) -> tuple[dict[str, Any], bool]:
    """What a step tells of its info, and whether it was made."""
    answer = pipe.recv_bytes()
    if answer == _STEPPED:
        return {}, True
    if answer.startswith(_STEPPED_WITH):
        return ForkingPickler.loads(answer[1:]), True
    return {}, ForkingPickler.loads(answer)[1]


class StepPipe:
    """The pipe and the error queue that Gymnasium's worker process uses.

    Args:
        pipe: to the owner.
        index: of the environment.
        memory: of all environments.
    """

    def __init__(self, pipe: Connection, index: int, memory: StepMemory) -> None:
        self._pipe, self._index, self._memory = pipe, index, memory
        self._steps = False
        self._error: Any = None

    def put(self, error: Any) -> None:
        """Keep an error, and send it after the next answer."""
        self._error = error

    def recv(self) -> Any:
        request = self._pipe.recv_bytes()
        if request == _STEP:
            assert self._memory.actions is not None
            command: Any = "step", self._memory.actions[self._index].copy()  # it may be kept
        else:
            command = ForkingPickler.loads(request)
        self._steps = command[0] == "step"
        return command

    def send(self, answer: Any) -> None:
        result, success = answer
        if not (self._steps and success):
            self._pipe.send(answer)
            if not success:
                self._pipe.send(self._error)
            return
        _, reward, terminated, truncated, info = result
        memory, index = self._memory, self._index
        memory.rewards[index] = reward
        memory.terminated[index], memory.truncated[index] = terminated, truncated
        part = told(info, terminated=bool(terminated)) if info else None
        self._pipe.send_bytes(_STEPPED_WITH + ForkingPickler.dumps(part) if part else _STEPPED)
