"""Environments in processes of their own."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.queues import Queue
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import _async_worker

from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.actors.orphans import die_with
from juggler.runtime.actors.processes import hidden_main, ignore_stop_signals, set_title
from juggler.runtime.actors.temporary import claim_multiprocessings

_PATIENCE_SECONDS = 2.0


class EnvironmentProcesses(AsyncVectorEnv):
    """Gymnasium's AsyncVectorEnv, with every possible end of an environment accounted for.

    Processes come from a forkserver (this process has threads that a fork would break), die with
    this process, and are gone after `close`, whatever state they are in. Observations are views
    of shared memory: valid until the next step.

    Args:
        functions: make one environment each; picklable by cloudpickle.
        autoreset_mode: of all environments.
        deadline: seconds that a step or a reset may take.
        name: of the environments, for people.

    Raises:
        EnvironmentFailed: here, or in `reset` and `step`: an environment raised, hung or died.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        autoreset_mode: AutoresetMode,
        deadline: float,
        name: str,
    ) -> None:
        self._deadline = deadline
        self._name = name
        # What environments share; torch is not among it.
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        claim_multiprocessings()
        try:
            with hidden_main():
                super().__init__(
                    functions,
                    copy=False,
                    context="forkserver",
                    worker=_run_environment,
                    autoreset_mode=autoreset_mode,
                )
        except BaseException as error:
            failure = self._death("constructor") if isinstance(error, (EOFError, OSError)) else None
            self.close_extras(terminate=True)
            self.closed = True
            raise failure or error from None

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

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Let environments close themselves; kill those that do not within `timeout` seconds."""
        patience = 0.0 if terminate else _PATIENCE_SECONDS if timeout is None else timeout
        pipes = [pipe for pipe in getattr(self, "parent_pipes", []) if pipe is not None]
        for pipe in pipes:
            try:
                pipe.send(("close", None))
            except OSError:
                pass  # It is dead already.
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
            raise EnvironmentFailed(
                self._names(i for i, pipe in enumerate(self.parent_pipes) if not pipe.poll()),
                call,
                f"no answer within {self._deadline:g} s (step_deadline_seconds)",
            ) from None
        except (EOFError, OSError):
            raise self._death(call) from None

    def _death(self, call: str) -> EnvironmentFailed:
        # A pipe breaks a moment before its process can be waited for.
        wait([process.sentinel for process in self.processes], timeout=_PATIENCE_SECONDS)
        codes = {i: p.exitcode for i, p in enumerate(self.processes) if p.exitcode is not None}
        ends = ", ".join(str(code) for code in codes.values())
        return EnvironmentFailed(
            self._names(codes),
            call,
            f"its process ended with exit code {ends} (-N: by signal N)",
        )

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        # Gymnasium would log the traceback and raise without it.
        if all(successes):
            return
        index, kind, error, trace = self.error_queue.get()
        if isinstance(error, EnvironmentFailed):
            raise error
        reason = f"{kind.__name__}: {error}".partition("\n")[0]
        raise EnvironmentFailed(self._names([index]), self._state.value, reason, trace)

    def _names(self, indices: Iterable[int]) -> str:
        numbers = ", ".join(str(index) for index in indices)
        return f"environment {numbers} ({self._name})"


def _run_environment(
    index: int,
    function: Callable[[], gymnasium.Env[Any, Any]],
    pipe: Connection,
    parent_pipe: Connection,
    shared_memory: Any,
    error_queue: Queue[Any],
    *rest: Any,
) -> None:
    """The program of an environment's process: Gymnasium's own, once there is an environment."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    assert owner.pid is not None
    die_with(owner.pid)
    ignore_stop_signals()
    set_title(f"environment {index}")
    try:
        env = function()
    except Exception as error:
        pipe.recv()  # whatever the owner asks first, this is the answer
        error_queue.put((index, type(error), error, traceback.format_exc()))
        pipe.send((None, False))
        return
    _async_worker(index, lambda: env, pipe, parent_pipe, shared_memory, error_queue, *rest)
