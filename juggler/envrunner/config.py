"""What an envrunner does, as a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

#: What names of environments that are none of Python's begin with.
_ELSEWHERE = ("dm_env_rpc://", "envpool:")

Vectorize = Literal["auto", "native", "sync", "async"]
Autoreset = Literal["auto", "next_step", "same_step", "disabled"]


@dataclass(kw_only=True)
class EnvRunnerConfig:
    """Environments of every envrunner, and how it steps them."""

    env: str = "CartPole-v1"
    """Gymnasium id, "module:id" where a module must be imported for it, "module:callable",
    "envpool:id", or "dm_env_rpc://HOST:PORT" for simulators that serve that protocol."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the environment's constructor is called with, as `gymnasium.make` is, or how a simulator
    is joined."""
    env_wrappers: list[dict[str, Any] | str] = field(default_factory=list)
    """Wrappers around each environment, the outermost last: names of those of gymnasium.wrappers,
    "module:Class", or tables with one of these as `use` and the options that it is made with."""
    envs_per_runner: int = 16
    """N, environments that a runner steps together."""
    fragment_steps: int = 32
    """T, steps of each environment in one batch of episodes."""
    vectorize: Vectorize = "auto"
    """How a runner steps N environments: "native", by the environment's own vector entry point;
    "sync", one after the other; "async", each in a process of its own. "auto": native where the
    environment has it, else sync."""
    autoreset: Autoreset = "auto"
    """When an environment is reset after an episode: by the step after the last one
    ("next_step"), within the last one ("same_step"), or by the runner ("disabled"). "auto":
    same_step, or whatever a native environment does."""
    step_deadline_seconds: float = 120.0
    """An async environment whose step or reset takes longer than this counts as hung, and so does
    a simulator with a reply."""
    gateway: str = ""
    """Take simulators there, HOST:PORT, instead of having environments: EnvRunner i listens at
    PORT + i, at any port with PORT 0. `env` is a name for people then."""
    gateway_max_batch: int = 1024
    """Rows of simulators that one inference takes, at most."""
    gateway_max_wait_ms: float = 0.0
    """How long a simulator's step waits for those of others, to be inferred together."""

    @property
    def is_elsewhere(self) -> bool:
        """The environments are none of Python's."""
        return self.env.startswith(_ELSEWHERE)

    def validate(self) -> None:
        """
        Raises:
            ValueError: a value that its key does not allow; names both, and what is allowed.
        """
        if not isinstance(self.env, str) or not self.env.strip(":"):
            raise ValueError(
                f'env must be a Gymnasium id, "module:id" or "module:callable", not {self.env!r}'
            )
        if not isinstance(self.env_kwargs, dict):
            raise ValueError(f"env_kwargs must be a table, not {self.env_kwargs!r}")
        if self.env_wrappers:
            from juggler.envrunner.environments.wrappers import wrapper_specs  # it brings Gymnasium

            wrapper_specs(self.env_wrappers)
        if self.env_wrappers and (self.gateway or self.is_elsewhere):
            raise ValueError(
                f"env_wrappers go around environments that Python steps one by one, and those of "
                f"{self.gateway or self.env!r} are not: leave them out"
            )
        for name in ("envs_per_runner", "fragment_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        for name, kind in (("vectorize", Vectorize), ("autoreset", Autoreset)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}"
                )
        if type(self.gateway_max_batch) is not int or self.gateway_max_batch < 1:
            raise ValueError(
                f"gateway_max_batch must be an integer of at least 1, not {self.gateway_max_batch}"
            )
        if not 0 <= self.gateway_max_wait_ms <= 1000:
            raise ValueError(
                f"gateway_max_wait_ms must be from 0 to 1000, not {self.gateway_max_wait_ms}"
            )
        host, colon, port = self.gateway.rpartition(":")
        if self.gateway and not (host and colon and port.isdigit() and int(port) < 65536):
            raise ValueError(f'gateway must be "HOST:PORT" or "", not {self.gateway!r}')
        seconds = self.step_deadline_seconds
        if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
            raise ValueError(
                f"step_deadline_seconds must be a number of seconds above 0, not {seconds!r}"
            )
