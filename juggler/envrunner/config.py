"""Configuration of environments and of EnvRunners."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from juggler.runtime.wrong_value import CheckedKeys, WrongValue, points_of, wrong_where

#: Prefixes of the names of environments that are not Python environments.
_SERVED = "dm_env_rpc://"
_ELSEWHERE = (_SERVED, "envpool:")

Vectorize = Literal["auto", "native", "sync", "async"]

ADDRESS = "{address}"
#: Address of gateways that start their own simulators: any free port.
_OWN_GATEWAY = "127.0.0.1:0"


def words_of(command: str) -> list[str]:
    """Split the command of a simulator, without a shell.

    Raises:
        ValueError: it is no command, or takes no address.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:  # an open quotation mark
        raise ValueError(f"{command!r}: {error}") from error
    if not any(ADDRESS in word for word in words):
        rule = f'put {ADDRESS} where the command takes the address, as in "./game {ADDRESS}"'
        raise ValueError(f"{command!r}: {rule}")
    return words


def check_points(name: str, points: Any) -> None:
    """Check a number or a schedule.

    Raises:
        ValueError: it is neither, or its steps do not rise.
    """
    try:
        points_of(points)
    except ValueError as error:
        raise ValueError(f"simulator_parameters.{name} = {points!r}: {error}") from None


@dataclass(kw_only=True)
class EnvRunnerConfig(CheckedKeys):
    """Keys about environments, and how EnvRunners step them."""

    env: str = "CartPole-v1"
    """Environment: a Gymnasium id, "module:id", "module:callable", "envpool:id", "pufferlib:name",
    "pettingzoo:FAMILY/GAME-vN", "open_spiel:game", "tuples:id", or "dm_env_rpc://HOST:PORT"."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor, or how to join a simulator."""
    dataset: str = ""
    """Minari data set to learn from with bc or iql, a directory or a name. Evaluations play env, or
    the environment that the data set names."""
    record: str = ""
    """Directory for a data set of what is sampled; each EnvRunner writes its parts on its own host.
    "": none."""
    env_wrappers: list[dict[str, Any] | str] = field(default_factory=list)
    """Wrappers around each environment, the outermost last: names in gymnasium.wrappers,
    "module:Class", or tables of `use` and options."""
    max_episode_steps: int | None = None
    """Number of environment steps after which episodes are truncated; none: the environment alone
    ends them."""
    pad_agents: bool = False
    """Whether agents' spaces are padded to equal ones, so that one module can play all of them."""
    envs_per_runner: int = 16
    """Number N of environments of an EnvRunner."""
    fragment_steps: int = 32
    """Number T of steps of each environment in one batch."""
    vectorize: Vectorize = "auto"
    """How environments are stepped: "native", by their own vector; "sync", one after another;
    "async", each in its own process; "auto", native if possible, else sync."""
    step_deadline_seconds: float = 120.0
    """Seconds after which a step or reset of an async environment, or a simulator's reply, counts
    as hung."""
    gateway: str = ""
    """Address where simulators are accepted, instead of making environments: HOST:PORT, where
    EnvRunner i has PORT + i, or any free port if PORT is 0; or unix:PATH, with PATH-i for each
    EnvRunner after the first. `env` is then only a name. With `simulator`, it is 127.0.0.1:0 by
    default."""
    simulator: str = ""
    """Command that starts a simulator, as in "./game {address}". EnvRunners replace {address} with
    the address to dial, and {index} with the copy's number in the run. They restart copies that end
    or hang."""
    simulators_per_runner: int = 1
    """Number of copies of `simulator` that an EnvRunner starts. Set envs_per_runner to the total
    number of their environments, or more."""
    simulator_parameters: dict[str, float | list[tuple[float, float]]] = field(default_factory=dict)
    """Numbers for the episodes of simulators, by name: constants, or schedules, pairs of
    [environment steps trained on, value], linear between them."""
    gateway_max_batch: int = 1024
    """Maximum number of rows of simulators in one inference."""
    gateway_max_wait_ms: float = 0.0
    """Milliseconds that a simulator's step waits for others to share one inference."""

    def __post_init__(self) -> None:
        if self.simulator and not self.gateway:
            self.gateway = _OWN_GATEWAY

    @property
    def is_elsewhere(self) -> bool:
        """Whether the environments are not Python environments."""
        return self.env.startswith(_ELSEWHERE)

    @property
    def is_served(self) -> bool:
        """Whether `env` is the address of simulators, which have one agent."""
        return self.env.startswith(_SERVED)

    def validate(self) -> None:
        """Check every key.

        Raises:
            ValueError: a key has a value that it does not allow; names both, and the allowed
                values.
        """
        if not isinstance(self.env, str) or not self.env.strip(":"):
            allowed = 'a Gymnasium id, "module:id" or "module:callable"'
            raise WrongValue("env", f"env must be {allowed}, not {self.env!r}")
        try:
            json.dumps(self.env_kwargs)
        except (TypeError, ValueError) as error:
            raise WrongValue(
                "env_kwargs",
                f"env_kwargs: {error}: a file must be able to hold it; give env=lambda: "
                "MyEnv(...) instead, which makes the value itself",
            ) from error
        for key in ("envs_per_runner", "fragment_steps", "max_episode_steps"):
            self.check_at_least(key, 1)
        for key in ("gateway_max_batch", "simulators_per_runner"):
            self.check_at_least(key, 1)
        # A longer wait would look like a simulator that hangs.
        self.check_within("gateway_max_wait_ms", self.gateway_max_wait_ms, 0, 1000)
        self.check_above("step_deadline_seconds", 0)
        self.check_one_of("vectorize", get_args(Vectorize))
        if self.env_wrappers:
            from juggler.envrunner.environments.find_environment import (
                wrapper_specs,  # imports Gymnasium
            )

            with wrong_where("env_wrappers"):
                wrapper_specs(self.env_wrappers)
        # An address is checked here, because a gateway would only fail on another host.
        host, colon, port = self.gateway.rpartition(":")
        is_unix = self.gateway.startswith("unix:") and bool(port)
        is_tcp = host and colon and port.isdigit() and int(port) < 65536
        if self.gateway and not (is_unix or is_tcp):
            text = f'gateway must be "HOST:PORT", "unix:PATH" or "", not {self.gateway!r}'
            raise WrongValue("gateway", text)
        if self.simulator:
            with wrong_where("simulator"):
                words_of(self.simulator)
        for name, points in self.simulator_parameters.items():
            with wrong_where("simulator_parameters"):
                check_points(name, points)
        self._must_go_together()

    def _must_go_together(self) -> None:
        """Raise ValueError if two keys contradict each other."""
        limit = self.max_episode_steps
        if self.env_wrappers and (self.gateway or self.is_elsewhere):
            raise ValueError(
                f"env_wrappers need environments that Python steps one by one, which those of "
                f"{self.gateway or self.env!r} are not: leave them out"
            )
        if self.pad_agents and self.gateway:
            raise ValueError(
                "pad_agents with a gateway: simulators pad the spaces of their agents themselves; "
                "leave it out"
            )
        # Keys of simulators, which pass nothing on to environments in Python.
        if self.simulator_parameters and not self.gateway:
            raise ValueError(
                "simulator_parameters without simulator or gateway: environments in Python have "
                "env_kwargs; leave them out"
            )
        if limit is not None and (self.gateway or self.is_elsewhere):
            raise ValueError(
                "max_episode_steps needs environments that Python steps one by one, which those of "
                f"{self.gateway or self.env!r} are not: have them truncate their episodes"
            )
        if limit is not None and "max_episode_steps" in self.env_kwargs:
            raise ValueError("max_episode_steps is in env_kwargs, too: leave out one of the two")
