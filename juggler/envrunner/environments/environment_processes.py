"""Environments in separate processes.

No torch here: every process would import it.
"""

from __future__ import annotations

import multiprocessing
import select
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import (
    CloudpickleWrapper,
    batch_space,
    create_shared_memory,
    read_from_shared_memory,
)

from juggler.envrunner.environments.environments_in_turn import (
    BadResult,
    Env,
    EnvironmentsInTurn,
    add_final,
    add_mask,
)
from juggler.envrunner.failures import EnvironmentFailed, VideoFailed, failures_of
from juggler.envrunner.info_numbers import NOT_OF_THE_ENVIRONMENT, keep_numbers
from juggler.runtime.actors.processes import die_with, hidden_main, set_title, start_forkserver
from juggler.runtime.actors.stop_signals import ignore_stop_signals
from juggler.runtime.wire.structures import from_tree, space_leaves, to_tree, tree_map

#: A request to step, and an answer without infos. No pickle is empty.
_PLAIN = b""
_PATIENCE_SECONDS = 2.0


def _layout(observations: Space[Any], actions: Space[Any]) -> spaces.Dict:
    """Return the space of what an environment shares with its owner."""
    return spaces.Dict(
        observations=observations,
        actions=actions,
        rewards=spaces.Box(-np.inf, np.inf, (), np.float64),
        terminated=spaces.Box(0, 1, (), np.bool_),
        truncated=spaces.Box(0, 1, (), np.bool_),
    )


class EnvironmentProcesses(VectorEnv[Any, Any, Any]):
    """N environments in separate processes, with shared memory.

    A forkserver starts the processes, because a fork would break the threads of this process. They
    die with this process, and `close` ends them in any state. Observations are views of shared
    memory, valid until the next step.

    Args:
        functions: make one environment each; cloudpickle must be able to pickle them.
        deadline: seconds that a step or a reset may take.
        first: has the spaces, and is closed; None: it is made here.

    Raises:
        EnvironmentFailed: here, in `reset` or in `step`: an environment raised, hung or died.
        UnsupportedSpace: a space has no encoding.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[], Env]],
        deadline: float,
        name: str,
        first: Env | None = None,
    ) -> None:
        self.num_envs, self._deadline, self._name = len(functions), deadline, name
        # The forkserver imports this module once for all environments.
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["juggler.runtime.actors.ignore_stop_signals", __name__])
        start_forkserver()
        first = functions[0]() if first is None else first
        try:
            self._take_spaces(first)
        finally:
            first.close()
        # One memory for all, so that most steps move no array through a pipe.
        layout = _layout(self.single_observation_space, self.single_action_space)
        shared = create_shared_memory(layout, self.num_envs, context)
        read = partial(read_from_shared_memory, layout, shared, self.num_envs)
        self._memory: Any = read()  # [N, ...] each
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self._answers = select.poll()
        self._row_of: dict[int, int] = {}  # by descriptor of a pipe
        self._is_asking = False  # even after a call that failed half-way
        try:
            # A script without `if __name__ == "__main__"` must not run again.
            with hidden_main():
                for row, function in enumerate(functions):
                    ours, theirs = context.Pipe()
                    made = CloudpickleWrapper(function)
                    arguments = row, made, theirs, ours, layout, read, name
                    process: Any = context.Process(
                        target=_run_environment, name=f"environment {row}", args=arguments
                    )
                    process.daemon = True
                    process.start()
                    # Or the owner would keep this end open, and not notice that the process has
                    # died.
                    theirs.close()
                    self._pipes.append(ours)
                    self.processes.append(process)
                    self._row_of[ours.fileno()] = row
                    self._answers.register(ours, select.POLLIN)
            self._wait_for("constructor", range(self.num_envs), None)
        except BaseException:
            self.close_extras(terminate=True)
            self.closed = True
            raise

    def _take_spaces(self, env: Env) -> None:
        """Take over the spaces and metadata of one environment."""
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = env.render_mode
        self.single_observation_space = env.observation_space
        self.single_action_space = env.action_space
        for space in (env.observation_space, env.action_space):
            space_leaves(space)  # raises if it has no encoding
        self.observation_space = batch_space(env.observation_space, self.num_envs)
        self.action_space = batch_space(env.action_space, self.num_envs)

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        asked = {
            row: bytes(ForkingPickler.dumps((None if seeds is None else seeds[row], options)))
            for row in range(self.num_envs)
        }
        infos = self._ask("reset", asked)
        return self._memory["observations"], infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        space = self.single_action_space
        tree_map(_copy_action, to_tree(space, self._memory["actions"]), to_tree(space, actions))
        infos = self._ask("step", dict.fromkeys(range(self.num_envs), _PLAIN))
        memory = self._memory
        results = [memory[name].copy() for name in ("rewards", "terminated", "truncated")]  # [N]
        return memory["observations"], *results, infos

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Let environments close, and kill the rest.

        Args:
            timeout: seconds that they have; None: a few.
            terminate: kill them at once.
        """
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass  # the process is dead
        seconds = _PATIENCE_SECONDS if timeout is None else timeout
        give_up = time.monotonic() + (0.0 if terminate else seconds)
        for process in self.processes:
            process.join(max(0.0, give_up - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def __del__(self) -> None:
        # Their memory will be reused, while they would still write into it.
        if not self.closed and "processes" in vars(self):
            self.close(terminate=True)

    def name_of(self, *rows: int) -> str:
        """Name environments in errors."""
        return f"environment {', '.join(map(str, rows))} ({self._name})"

    def _ask(self, call: str, requests: dict[int, bytes]) -> dict[str, Any]:
        """Send requests by environment, and return the infos of their answers.

        Raises:
            EnvironmentFailed: an environment raised, hung or died.
            RuntimeError: the last call failed before it had all answers.
        """
        # A late answer to the last call would be taken for an answer to this one.
        if self._is_asking:
            raise RuntimeError("the last call failed half-way: close the environments")
        self._is_asking = True
        try:
            for row, request in requests.items():
                self._pipes[row].send_bytes(request)
        except OSError:
            raise self._death(call) from None
        answers = self._wait_for(call, requests, self._deadline)
        # All answers are here, even if one of them is refused below.
        self._is_asking = False
        infos: dict[str, Any] = {}
        for row, part in sorted(answers.items()):
            try:
                infos = self._with(infos, part, row)
            except BadResult as error:
                raise EnvironmentFailed(self.name_of(row), call, str(error)) from None
        return infos

    def _with(self, infos: dict[str, Any], part: dict[str, Any], row: int) -> dict[str, Any]:
        """Add the infos of one environment to the infos of all."""
        if (final := part.get("final_info")) is not None:
            infos = add_final(self, infos, part["final_obs"], final, row)
        keep_numbers(infos, part, row, self.num_envs)
        return add_mask(self, infos, part, row)

    def _wait_for(
        self, call: str, rows: Iterable[int], seconds: float | None
    ) -> dict[int, dict[str, Any]]:
        """Return the infos in the next answers of environments.

        Args:
            seconds: for all of them; None: no limit.
        """
        late, found = set(rows), {}
        until = None if seconds is None else time.monotonic() + seconds
        while late:
            left = None if until is None else max(0.0, until - time.monotonic()) * 1000
            ready = self._answers.poll(left)
            if not ready:
                reason = f"no answer within {seconds:g} s (step_deadline_seconds)"
                raise EnvironmentFailed(self.name_of(*sorted(late)), call, reason, passing=True)
            # In the order of arrival, so that one that has died is noticed at once.
            for descriptor, _ in ready:
                row = self._row_of[descriptor]
                try:
                    answer = self._pipes[row].recv_bytes()
                except (EOFError, OSError):
                    raise self._death(call) from None
                late.discard(row)
                if answer == _PLAIN:
                    continue
                # At once, because the process ends with its failure.
                if isinstance(told := ForkingPickler.loads(answer), Exception):
                    raise told
                found[row] = told
        return found

    def _death(self, call: str) -> EnvironmentFailed:
        # A pipe breaks a moment before its process has an exit code.
        wait([process.sentinel for process in self.processes], timeout=_PATIENCE_SECONDS)
        codes = {i: p.exitcode for i, p in enumerate(self.processes) if p.exitcode is not None}
        ends = ", ".join(str(code) for code in codes.values())
        reason = f"its process ended with exit code {ends} (-N: by signal N)"
        return EnvironmentFailed(self.name_of(*codes), call, reason, passing=True)


def _copy_action(into: Any, given: Any) -> None:
    given = np.asarray(given)
    if given.shape != into.shape:
        raise ValueError(f"actions of shape {given.shape}, but {into.shape} is expected")
    np.copyto(into, given, casting="same_kind")


class _OneEnvironment(EnvironmentsInTurn):
    """The environment of a process, with results in shared memory.

    Args:
        memory: of this environment [1, ...].
    """

    def __init__(
        self,
        row: int,
        function: Callable[[], Env],
        name: str,
        layout: spaces.Dict,
        memory: dict[str, Any],
    ) -> None:
        self._row, self._memory = row, memory
        super().__init__([function], name)
        due = layout["observations"], layout["actions"]
        own = self.single_observation_space, self.single_action_space
        if own != due:
            reason = f"its spaces are {own}, and those of environment 0 are {due}"
            raise EnvironmentFailed(self.name_of(0), "constructor", reason)
        self._observations, self._rewards = memory["observations"], memory["rewards"]
        self._terminations, self._truncations = memory["terminated"], memory["truncated"]
        self._share_memory()

    def answer(self, pipe: Connection) -> None:
        """Answer requests until one is to close."""
        pipe.send_bytes(_PLAIN)
        while True:
            try:
                request = pipe.recv_bytes()
            except EOFError:  # the owner is gone
                return
            if request == _PLAIN:
                infos = self.step(deepcopy(self._memory["actions"]))[-1]  # it may keep them
            elif (asked := ForkingPickler.loads(request)) is None:
                return
            else:
                infos = self.reset(seed=[asked[0]], options=asked[1])[-1]
            pipe.send_bytes(ForkingPickler.dumps(_of_one(infos)) if infos else _PLAIN)

    def name_of(self, index: int) -> str:
        return super().name_of(self._row)

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        return {**vector_infos, **env_info}  # the owner adds them to the infos of all


def _of_one(infos: dict[str, Any]) -> dict[str, Any]:
    """Return one environment's infos with numbers instead of arrays [1]."""
    plain = {name: infos[name] for name in NOT_OF_THE_ENVIRONMENT if name in infos}
    if "final_info" in plain:
        plain["final_info"] = _of_one(plain["final_info"])
    return {name: each[0] for name, each in infos.items() if name not in plain} | plain


def _run_environment(
    row: int,
    function: Callable[[], Env],
    pipe: Connection,
    of_owner: Connection,
    layout: spaces.Dict,
    read: Callable[[], Any],
    name: str,
) -> None:
    """Run an environment's process: make the environment, then answer requests."""
    of_owner.close()
    owner = multiprocessing.parent_process()
    assert owner is not None
    assert owner.pid is not None
    die_with(owner.pid)
    ignore_stop_signals()
    set_title(f"environment {row}")
    # A daemon may not start processes, but environments may. The owner still ends it as a daemon.
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    where, env = f"environment {row} ({name})", None
    own = tree_map(lambda leaf: leaf[row : row + 1], to_tree(layout, read()))  # [1, ...]
    try:
        with failures_of(where, "constructor"):
            env = _OneEnvironment(row, function, name, layout, from_tree(layout, own))
        with failures_of(where, "step"):
            env.answer(pipe)
    except (EnvironmentFailed, VideoFailed) as error:
        pipe.send(error)
    finally:
        if env is not None:
            env.close()
