"""A few steps of an environment before a run begins, to find errors in its `reset` and `step`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from typing import Final

from gymnasium.vector import VectorEnv

from juggler.driver.config import RunConfig
from juggler.driver.trial_observations import checked
from juggler.driver.trial_updates import Built, acting_slots, can_be_tried, sampler
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFinite, rule_for
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
    config: RunConfig,
    env: VectorEnvironment | MultiAgentEnvs,
    built: Mapping[str, Built],
    warn: Callable[[str], None],
) -> bool:
    """Reset an environment and make a few steps, as an EnvRunner does. Modules act, or chance does
    where several may play an agent. The main thread calls this.

    Args:
        config: of the run.
        env: the environment.
        built: the modules, by id.
        warn: called with the first number of an observation that is outside of its Box.

    Returns:
        Whether there was time for it. If not, the environment was left in the middle of a call.

    Raises:
        EnvironmentFailed: the environment failed, gave a number that is not finite, or an
            observation outside of its Discrete, MultiDiscrete or MultiBinary space.
        NonFinite: a module with its first weights gives log-probabilities that are not finite.
    """

    def work() -> None:
        step = _stepping(config, env, built, warn)
        for number in range(1, _STEPS + 1):
            try:
                results = step()
                for result in results:
                    if isinstance(result, NonFinite):
                        raise result
            except NonFinite as error:
                raise _failure(error, config.env_runner.env, number) from error

    return in_time(work, _SECONDS)


def _failure(error: NonFinite, env: str, number: int) -> Exception:
    """For people: at which step after the reset there was a number that is not finite."""
    if error.column == "action_logp":
        return error
    whose = f"agent {error.agent!r} in " if error.agent else ""
    value = "not finite" if error.value is None else f"{error.value}"
    # A fragment of one step begins with what the step before gave, which was looked at, or a reset.
    call, when = "step", f"in step {number} after its first reset"
    if error.column.startswith(("observations", "critic_observations")) and not error.agent:
        call, when = "reset", f"before step {number}"
    column = error.column.removeprefix("last_").removeprefix("final_")
    return EnvironmentFailed(
        f"{whose}environment {error.environment} ({env})",
        call,
        f"{column} are {value} {when}: {rule_for(error.value)}",
    )


def _stepping(
    config: RunConfig,
    env: VectorEnvironment | MultiAgentEnvs,
    built: Mapping[str, Built],
    warn: Callable[[str], None],
) -> Callable[[], Collection[object]]:
    """Reset the environment, and return what makes a step of it, and returns what came of it."""
    env = checked(env, config.env_runner.env, warn)
    if isinstance(env, VectorEnv):
        alone = sampler(built[DEFAULT_MODULE], env, 1)
        return lambda: [alone.sample((0, 0))]
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
    return lambda: games.sample(versions.keys(), versions).modules.values()


def in_time(work: Callable[[], None], seconds: float) -> bool:
    """Do something, unless it takes longer. The main thread calls this."""

    def is_up(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, is_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _TimeIsUp:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return True
