"""Simulators that serve dm_env_rpc, as a vector of Gymnasium environments."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.agent import Agent, SimulatorError
from juggler.envrunner.dm_env_rpc.options import SimulatorOptions, addresses
from juggler.envrunner.dm_env_rpc.tensors import TensorError
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.actors.credentials import CallMetadata, bearer, read_token
from juggler.runtime.actors.tls import Tls, read_tls
from juggler.runtime.wire.structures import from_tree, space_leaves, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import flatten

T = TypeVar("T")

_CLOSING_SECONDS: Final = 10.0
#: Of closed vectors. gRPC has events for a loop even after all its calls are over; a closed loop
#: would raise in the loop that reads them.
_idle_loops: list[asyncio.AbstractEventLoop] = []


class SimulatorVector(VectorEnv[Any, Any, Any]):
    """N agents, each on a stream of its own: all requests are out before any reply is read.

    The step after the end of an episode begins the next one (NEXT_STEP), as in the protocol, so
    that every step takes one round trip. Observations are its own memory, valid until the next
    step. Reset with a seed, agent i gets seed + i, if simulators take seeds (seed_setting).

    Args:
        where: "host:port" or "unix:path" of each server; all EnvRunners together dial them in turn.
        options: how worlds are made and joined, and what of them is used.
        count: N.
        deadline: seconds that a reply may take.
        runner: number of this EnvRunner.

    Raises:
        EnvironmentFailed: here, or in `reset` and `step`: a simulator cannot be reached, refused,
            hung, died, or sent something invalid. All worlds have been left then.
        ValueError: certificates or a token cannot be read.
    """

    def __init__(
        self,
        where: Sequence[str],
        options: SimulatorOptions,
        count: int,
        deadline: float,
        runner: int = 0,
    ) -> None:
        tls, metadata = _credentials(options)
        self._agents = [
            Agent(i, where[(runner * count + i) % len(where)], options, deadline, tls, metadata)
            for i in range(count)
        ]
        self._seeded = bool(options.seed_setting)
        # Runs while something is waited for.
        self._loop = _idle_loops.pop() if _idle_loops else asyncio.new_event_loop()
        self.num_envs = count
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = None
        self.closed = False
        try:
            self._together("constructor", lambda agent: agent.join())
            self._have_one_interface()
        except BaseException:
            self.close()
            raise
        interface = self._agents[0].interface
        self.single_observation_space = interface.observations.space
        self.single_action_space = interface.actions.space
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        tree = zeros(self.single_observation_space, (count,))  # [N, ...]
        self._arrays = dict(flatten(tree))  # [N, ...] by path
        self._observations = from_tree(self.single_observation_space, tree)
        self._actions = [path for path, _ in space_leaves(self.single_action_space)]
        self._signals = np.zeros((count, len(interface.signals.specs)))  # [N, 1 or 2]

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a sequence in every environment. Running ones are given up."""
        if not self._seeded or seed is None:
            seeds: list[int | None] = [None] * self.num_envs
        elif isinstance(seed, int):
            seeds = [(seed + i) % 2**31 for i in range(self.num_envs)]
        else:
            seeds = seed
        each = dict(zip(self._agents, seeds, strict=True))
        self._together("reset", lambda agent: agent.begin(each[agent], self._arrays))
        return self._observations, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        tree = tree_map(np.asarray, to_tree(self.single_action_space, actions))  # [N, ...]
        chosen = dict(flatten(tree))
        replies = self._together("step", lambda agent: agent.step(chosen, self._arrays))
        ends: NDArray[np.bool_] = np.array([reply[:2] for reply in replies])  # [N, 2]
        self._signals[:] = [reply[2] for reply in replies]
        infos = {"discount": self._signals[:, 1]} if self._signals.shape[1] > 1 else {}
        return self._observations, self._signals[:, 0], ends[:, 0], ends[:, 1], infos

    def close_extras(self, **kwargs: Any) -> None:
        """Leave all worlds and destroy those that were made, within a few seconds."""
        with contextlib.suppress(TimeoutError):
            self._run(self._leave())
        _idle_loops.append(self._loop)

    # -- parts ----------------------------------------------------------------------------------

    def _together(self, call: str, ask: Callable[[Agent], Coroutine[Any, Any, T]]) -> list[T]:
        """The answers of all agents, which all work at the same time."""

        async def all_of_them() -> list[T | BaseException]:
            return await asyncio.gather(*map(ask, self._agents), return_exceptions=True)

        answers: list[T] = []
        for index, answer in enumerate(self._run(all_of_them())):
            if isinstance(answer, (SimulatorError, TensorError)):
                raise self._failure(index, call, str(answer))
            if isinstance(answer, BaseException):
                raise answer
            answers.append(answer)
        return answers

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(work)
        # The caller is in an event loop, as a notebook is, and a thread runs one at a time.
        with ThreadPoolExecutor(1) as other_thread:
            return other_thread.submit(self._loop.run_until_complete, work).result()

    async def _leave(self) -> None:
        async with asyncio.timeout(_CLOSING_SECONDS):
            leaving = (agent.leave() for agent in self._agents)
            await asyncio.gather(*leaving, return_exceptions=True)

    def _have_one_interface(self) -> None:
        first, *others = self._agents
        for index, agent in enumerate(others, 1):
            mine, theirs = agent.interface, first.interface
            for what, a, b in (
                ("observations", mine.observations.space, theirs.observations.space),
                ("actions", mine.actions.space, theirs.actions.space),
                ("signals", mine.signals.paths, theirs.signals.paths),
            ):
                if a != b:
                    reason = f"its {what} are {a}, and those of environment 0 are {b}"
                    raise self._failure(index, "constructor", reason)

    def _failure(self, index: int, call: str, reason: str) -> EnvironmentFailed:
        where = f"environment {index} (dm_env_rpc://{self._agents[index].address})"
        return EnvironmentFailed(where, call, reason)


def simulators(config: EnvRunnerConfig, runner: int = 0) -> SimulatorVector:
    """The environments of a configuration whose `env` is dm_env_rpc://…

    Raises:
        EnvironmentFailed: a simulator cannot be used.
        ValueError: the configuration has a value that does not fit simulators.
    """
    if config.vectorize not in ("auto", "native"):
        raise ValueError(
            f"vectorize = {config.vectorize!r}: simulators run elsewhere; use auto or native"
        )
    return SimulatorVector(
        addresses(config.env),
        SimulatorOptions.parse(config.env_kwargs).of_runner(runner),
        config.envs_per_runner,
        config.step_deadline_seconds,
        runner,
    )


def _credentials(options: SimulatorOptions) -> tuple[Tls | None, CallMetadata]:
    """The run's own are for its own processes: a simulator gets those that are named for it."""
    tls = read_tls(options.tls) if options.tls else None
    token = read_token(options.token_file or None, tls) if tls or options.token_file else ""
    return tls, bearer(token) if token else ()
