"""Environments in separate processes.

No torch here: every process would import it.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState, _async_worker
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from juggler.envrunner.environments.misfits import SpaceLeaves, misfit, must_return, no_reward
from juggler.envrunner.environments.step_infos import BadMask, NoInfo, add_kept, kept_of, mask_in
from juggler.envrunner.failures import EnvironmentFailed, ReportsFailures, failures_of
from juggler.runtime.actors.processes import die_with, hidden_main, set_title, start_forkserver
from juggler.runtime.actors.stop_signals import ignore_stop_signals
from juggler.runtime.user_tracebacks import traceback_of
from juggler.runtime.wire.flags import NoFlag, as_flag
from juggler.runtime.wire.structures import space_leaves

_STEP, _STEPPED, _STEPPED_WITH = b"\0", b"\1", b"\2"  # no pickle begins with one of them


class StepMemory:
    """Shared memory with the actions and the results of N environments.

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
        """Make the memory.

        Args:
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
        part = kept_of(info, terminated=bool(terminated)) if info else None
        self._pipe.send_bytes(_STEPPED_WITH + ForkingPickler.dumps(part) if part else _STEPPED)


_PATIENCE_SECONDS = 2.0

Env = gymnasium.Env[Any, Any]


class EnvironmentFunction:
    """Makes one environment, here or by cloudpickle in its own process.

    Args:
        make: makes it from `arguments`.
        arguments: keywords.
        where: its name in errors.
        separate: autoreset mode of environments in separate processes; None: this environment is
            in the vector's process.
    """

    def __init__(
        self,
        make: Callable[..., Env],
        arguments: dict[str, Any],
        where: str,
        separate: AutoresetMode | None,
    ) -> None:
        self.make = make
        self.arguments = arguments
        self.where = where
        self.separate = separate

    def __call__(self) -> Env:
        with failures_of(self.where, "constructor"):
            env = self.make(**self.arguments)
        return self.prepared(env)

    def prepared(self, env: Env) -> Env:
        """Prepare an environment for its vector."""
        # A copy, since vectors write into it and it may belong to the class.
        env.metadata = dict(env.metadata)
        return env if self.separate is None else _ReportingEnv(env, self.where, self.separate)


class _ReportingEnv(ReportsFailures, gymnasium.Wrapper[Any, Any, Any, Any]):
    """Checks results before Gymnasium's worker writes them into shared memory."""

    def __init__(self, env: Env, where: str, mode: AutoresetMode) -> None:
        super().__init__(env)
        self.where = where
        self._same_step = mode is AutoresetMode.SAME_STEP

    @functools.cached_property
    def _leaves(self) -> SpaceLeaves:
        return space_leaves(self.observation_space)

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**arguments)
        self._check("reset", observation, info)
        return observation, info

    def step(self, action: Any) -> Any:
        result = super().step(action)
        observation, reward, terminated, truncated, info = result
        if reward is None:  # NumPy would make it NaN
            raise EnvironmentFailed(self.where, "step", no_reward("None is not a float"))
        try:
            ends = as_flag("terminated", terminated), as_flag("truncated", truncated)
        except NoFlag as error:
            raise EnvironmentFailed(self.where, "step", str(error)) from None
        # The next episode's first observation replaces it, and nothing learns from it.
        self._check("step", observation, info, unread=self._same_step and ends[0])
        if self._same_step and any(ends):
            # Gymnasium's worker resets first, which may write into the same memory.
            observation, info = deepcopy((observation, kept_of(info, terminated=ends[0])))
        return observation, reward, *ends, info

    def _check(self, call: str, observation: Any, info: Any, *, unread: bool = False) -> None:
        try:
            mask_in(info)
        except NoInfo as error:
            raise EnvironmentFailed(self.where, call, must_return(call, str(error))) from None
        if unread:
            return
        if why := misfit(self.observation_space, observation, leaves=self._leaves):
            raise EnvironmentFailed(self.where, call, why)


class ReusedEnvironment:
    """Returns an environment that was made already, and later makes new ones."""

    def __init__(self, env: Env, make: Callable[[], Env]) -> None:
        self._env: Env | None = env
        self._make = make

    def __call__(self) -> Env:
        env, self._env = self._env, None
        return self._make() if env is None else env


class EnvironmentProcesses(AsyncVectorEnv):
    """Gymnasium's AsyncVectorEnv with shared memory and reports of failures.

    A forkserver starts the processes, because a fork would break the threads of this process. They
    die with this process, and `close` ends them in any state. Observations are views of shared
    memory, valid until the next step.

    Args:
        functions: make one environment each; cloudpickle must be able to pickle them.
        autoreset_mode: of all environments.
        deadline: seconds that a step or a reset may take.
        name: of the environments, in errors.

    Raises:
        EnvironmentFailed: here, in `reset` or in `step`: an environment raised, hung or died.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[], Env]],
        autoreset_mode: AutoresetMode,
        deadline: float,
        name: str,
    ) -> None:
        self._deadline = deadline
        self._name = name
        # The forkserver imports this module once for all environments.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["juggler.runtime.actors.ignore_stop_signals", __name__])
        start_forkserver()
        first = functions[0]()
        try:
            spaces = batch_space(first.action_space, len(functions))
            self._memory = StepMemory(spaces, len(functions), context)
        except BaseException:
            first.close()
            raise
        try:
            with hidden_main():
                super().__init__(
                    [ReusedEnvironment(first, functions[0]), *functions[1:]],
                    copy=False,
                    context="forkserver",
                    worker=functools.partial(_run_environment, memory=self._memory),
                    autoreset_mode=autoreset_mode,
                )
        except BaseException as error:
            failure = self._death("constructor") if isinstance(error, (EOFError, OSError)) else None
            self.close_extras(terminate=True)
            self.closed = True
            raise failure or error from None
        # Errors come through pipes. The queue's named semaphores would remain if this process was
        # killed.
        del self.error_queue
        self._answers = select.poll()
        for pipe in self.parent_pipes:
            self._answers.register(pipe, select.POLLIN)

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        with self._failing_in("reset"):
            self.reset_async(seed, options)
            return self.reset_wait(self._deadline)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        with self._failing_in("step"):
            self.step_async(actions)
            return self.step_wait(self._deadline)

    def step_async(self, actions: Any) -> None:
        self._assert_is_running()
        if self._state is not AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"step_async: the environments have not answered to {self._state.value} yet",
                self._state.value,
            )
        if (into := self._memory.actions) is None:
            for pipe, action in zip(
                self.parent_pipes, iterate(self.action_space, actions), strict=True
            ):
                pipe.send(("step", action))
        else:
            given = np.asarray(actions)
            if given.shape != into.shape:
                raise ValueError(f"actions of shape {given.shape}, where {into.shape} is due")
            np.copyto(into, given, casting="same_kind")
            for pipe in self.parent_pipes:
                pipe.send_bytes(_STEP)
        self._state = AsyncState.WAITING_STEP

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._state is not AsyncState.WAITING_STEP:
            raise NoAsyncCallError("step_wait: there was no step_async", "step_wait")
        infos: dict[str, Any] = {}
        for index, part in enumerate(self._answers_to_step(timeout)):
            try:
                infos = add_kept(self, infos, part, index) if part else infos
            except BadMask as error:
                raise EnvironmentFailed(self._names([index]), "step", str(error)) from None
        self._state = AsyncState.DEFAULT
        memory = self._memory
        rewards, ends = memory.rewards.copy(), (memory.terminated.copy(), memory.truncated.copy())
        return self.observations, rewards, *ends, infos

    def _answers_to_step(self, timeout: float | None) -> list[dict[str, Any]]:
        """Return the infos of a step, in the order of environments."""
        answered: dict[int, dict[str, Any]] = {}
        pipes = {pipe.fileno(): pipe for pipe in self.parent_pipes}
        seconds = self._deadline if timeout is None else timeout
        until = time.monotonic() + seconds
        while len(answered) < len(pipes):
            ready = self._answers.poll(max(0.0, until - time.monotonic()) * 1000)
            if not ready:
                self._state = AsyncState.DEFAULT
                late = (i for i, each in enumerate(pipes) if each not in answered)
                raise self._late(late, "step", seconds)
            for descriptor, _ in ready:
                answer, success, answered[descriptor] = pipes[descriptor].recv_bytes(), True, {}
                if answer.startswith(_STEPPED_WITH):
                    answered[descriptor] = ForkingPickler.loads(answer[1:])
                elif answer != _STEPPED:
                    success = ForkingPickler.loads(answer)[1]
                self._raise_if_errors([success], [pipes[descriptor]])  # before its process ends
        return [answered[descriptor] for descriptor in pipes]

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Let environments close, and kill the rest after `timeout` seconds."""
        patience = 0.0 if terminate else _PATIENCE_SECONDS if timeout is None else timeout
        pipes = [pipe for pipe in getattr(self, "parent_pipes", []) if pipe is not None]
        for pipe in pipes:
            try:
                pipe.send(("close", None))
            except OSError:
                pass  # the process is dead
        give_up = time.monotonic() + patience
        for process in getattr(self, "processes", []):
            process.join(max(0.0, give_up - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()

    @contextmanager
    def _failing_in(self, call: str) -> Iterator[None]:
        try:
            yield
        except multiprocessing.TimeoutError:
            late = (i for i, pipe in enumerate(self.parent_pipes) if not pipe.poll())
            raise self._late(late, call, self._deadline) from None
        except (EOFError, OSError):
            raise self._death(call) from None

    def _late(self, indices: Iterable[int], call: str, seconds: float) -> EnvironmentFailed:
        reason = f"no answer within {seconds:g} s (step_deadline_seconds)"
        return EnvironmentFailed(self._names(indices), call, reason)

    def _death(self, call: str) -> EnvironmentFailed:
        # A pipe breaks a moment before its process has an exit code.
        wait([process.sentinel for process in self.processes], timeout=_PATIENCE_SECONDS)
        codes = {i: p.exitcode for i, p in enumerate(self.processes) if p.exitcode is not None}
        ends = ", ".join(str(code) for code in codes.values())
        return EnvironmentFailed(
            self._names(codes),
            call,
            f"its process ended with exit code {ends} (-N: by signal N)",
        )

    def _raise_if_errors(
        self, successes: Iterable[bool], pipes: Sequence[Connection] | None = None
    ) -> None:
        # Gymnasium's own logs the traceback and leaves it out of the exception.
        answers = zip(pipes or self.parent_pipes, successes, strict=True)
        failed = next((pipe for pipe, success in answers if not success), None)
        if failed is None:
            return
        index, kind, error, trace = failed.recv()
        if isinstance(error, EnvironmentFailed):
            raise error
        reason = f"{kind.__name__}: {error}".partition("\n")[0]
        raise EnvironmentFailed(self._names([index]), self._state.value, reason, trace)

    def _names(self, indices: Iterable[int]) -> str:
        numbers = ", ".join(str(index) for index in indices)
        return f"environment {numbers} ({self._name})"


def _run_environment(
    index: int,
    function: Callable[[], Env],
    pipe: Connection,
    parent_pipe: Connection,
    shared_memory: Any,
    _: Queue[Any],
    *rest: Any,
    memory: StepMemory,
) -> None:
    """Run an environment's process: make the environment, then follow Gymnasium's worker."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    assert owner.pid is not None
    die_with(owner.pid)
    ignore_stop_signals()
    set_title(f"environment {index}")
    # A daemon may not start processes, but environments may. The owner still ends it as a daemon.
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    try:
        env = function()
    except Exception as error:
        pipe.recv()  # the error answers the owner's first request of any kind
        pipe.send((None, False))
        pipe.send((index, type(error), error, traceback_of(error)))
        return
    steps: Any = StepPipe(pipe, index, memory)
    _async_worker(index, lambda: env, steps, parent_pipe, shared_memory, steps, *rest)
