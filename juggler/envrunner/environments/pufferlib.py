"""PufferLib's native environments, which C code steps together. No torch here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from juggler.envrunner.failures import failures_of
from juggler.runtime.near_matches import closest

#: The prefix of their names in `env`.
SCHEME: Final = "pufferlib:"


class PufferVector(VectorEnv[Any, Any, Any]):
    """Environments of one `pufferlib.PufferEnv`; each of its agents is an environment here.

    The step that ends an episode begins the next one (SAME_STEP) and returns its first observation.
    The last observation of an episode is lost, so episodes may terminate, but not be truncated.

    Args:
        env: steps N agents together, in arrays that each step overwrites.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_envs = env.num_agents
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = getattr(env, "render_mode", None)
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is None:  # PufferLib's own default is the same seed each time
            seed = int(self.np_random.integers(2**31))
        observations, _ = self.env.reset(seed % 2**31)  # an int of C; [N, ...]
        return observations, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        # PufferLib's infos are means over the episodes of all environments.
        *stepped, _ = self.env.step(actions)
        return *stepped, {}

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()


def as_vector(made: Any) -> Any:
    """Wrap a `pufferlib.PufferEnv` as a vector; return other environments as they are."""
    package = sys.modules.get("pufferlib")  # an environment's maker has imported it
    if isinstance(made, getattr(package, "PufferEnv", ())):
        return PufferVector(made)
    return made


def needs_pufferlib(name: str, module: str) -> str:
    """Explain that an environment needs a missing module of PufferLib."""
    return (
        f"env {name!r} needs PufferLib, on every host with EnvRunners: there is no Python module "
        f"{module!r} here; docs/environments.md says how to install it"
    )


def find_native(name: str) -> Callable[..., Any]:
    """Find the function that makes an environment of PufferLib's Ocean.

    Args:
        name: "pufferlib:NAME", such as "pufferlib:breakout".

    Raises:
        ValueError: PufferLib is not installed, or has no such environment.
        EnvironmentFailed: it cannot load it.
    """
    try:
        ocean = importlib.import_module("pufferlib.ocean.environment")
    except ModuleNotFoundError as error:
        raise ValueError(needs_pufferlib(name, error.name or "")) from error
    native = name.removeprefix(SCHEME)
    if native not in (known := ocean.MAKE_FUNCTIONS):
        near = closest(native, known)
        hint = f"did you mean {SCHEME + near!r}?" if near else f"it has {', '.join(sorted(known))}"
        raise ValueError(f"env {name!r}: PufferLib has no such environment: {hint}")
    with failures_of(name, "import"):
        found = ocean.env_creator(f"puffer_{native}")
    if not callable(found):  # it is the name of a class whose module is missing
        raise ValueError(f"env {name!r}: PufferLib was installed without this environment")
    made: Callable[..., Any] = found
    return made
