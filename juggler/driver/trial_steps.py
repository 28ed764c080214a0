"""A few steps of an environment before a run begins, to find errors in its `reset` and `step`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from gymnasium.vector import VectorEnv

from juggler.driver.config import RunConfig
from juggler.driver.trial_updates import Built, acting_slots, can_be_tried, sampler
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.finiteness import NonFinite
from juggler.envrunner.multi_agent.casting import random_roles
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.sampler import MultiAgentSampler
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.setup import RANDOM
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version

_STEPS: Final = 4
_SECONDS: Final = 3.0  # for all of them: errors of a slower environment show in the run


class _TimeIsUp(BaseException):
    """Not an Exception, because the code of an environment may catch those."""


def try_steps(
    config: RunConfig, env: VectorEnvironment | MultiAgentEnvs, built: Mapping[str, Built]
) -> bool:
    """Reset an environment and make a few steps, as an EnvRunner does. Modules act, or chance does
    where several may play an agent. The main thread calls this.

    What is not finite is left to the run, which drops and counts it.

    Returns:
        Whether there was time for it. If not, the environment was left in the middle of a call.

    Raises:
        EnvironmentFailed: the environment failed.
    """

    def work() -> None:
        with suppress(NonFinite):
            step = _stepping(config, env, built)
            for _ in range(_STEPS):
                step()

    return _in_time(work)


def _stepping(
    config: RunConfig, env: VectorEnvironment | MultiAgentEnvs, built: Mapping[str, Built]
) -> Callable[[], object]:
    """Reset the environment, and return what makes a step of it."""
    if isinstance(env, VectorEnv):
        alone = sampler(built[DEFAULT_MODULE], env, 1)
        return lambda: alone.sample((0, 0))
    if can_be_tried(config):
        slots = acting_slots(config, env, built, 1)
        versions = dict.fromkeys(slots, Version(0, 0))
    else:
        roles = random_roles(env, dict.fromkeys(env.agents, RANDOM))
        slots = {
            f"{RANDOM}:{role.group}": ModuleSlots.at_random(role, env.num_envs, env.agents, 1, 0)
            for role in roles
        }
        versions = {}
    games = MultiAgentSampler(env, slots, 1, 0)
    return lambda: games.sample(versions.keys(), versions)


def _in_time(work: Callable[[], None]) -> bool:
    """Do something, unless it takes too long."""

    def is_up(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, is_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _TimeIsUp:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return True
