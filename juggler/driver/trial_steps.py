"""A few steps of an environment before a run begins, to find errors in its `reset` and `step`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from juggler.driver.config import RunConfig
from juggler.driver.trial_updates import Built, acting_slots, can_be_tried, sampler
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFinite, rule_for
from juggler.envrunner.multi_agent.casting import random_roles
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.sampler import MultiAgentSampler
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.envrunner.setup import RANDOM
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.choices import choices_of, find_outside
from juggler.runtime.wire.structures import space_leaves, to_tree
from juggler.runtime.wire.trees import Tree, flatten, path_name

_ROUNDING: Final = 1e-5  # of a bound, and of 1: float32 may be beyond it by as much


class _Checks:
    """What both kinds of environments check.

    Args:
        name: of the environment, for people.
        warn: called with the first number outside of a Box.
    """

    def __init__(self, name: str, warn: Callable[[str], None]) -> None:
        self._name = name
        self._warn: Callable[[str], None] | None = warn

    def check(
        self, space: Space[Any], observations: Tree, call: str, who: Callable[[int], str]
    ) -> None:
        """
        Args:
            space: of one observation.
            observations: [B, ...].
            call: what gave them, "reset" or "step".
            who: names the environment of a row, and the agent.

        Raises:
            EnvironmentFailed: an observation is outside of its Discrete, MultiDiscrete or
                MultiBinary space.
        """
        if found := find_outside(choices_of(space_leaves(space)), observations):
            (row, *_), what = found
            raise EnvironmentFailed(f"{who(row)} ({self._name})", call, f"its observation{what}")
        for row, what in _beyond_boxes(space, observations) if self._warn else ():
            assert self._warn is not None
            self._warn(
                f"{who(row)} ({self._name}) gives observations outside of its observation_space: "
                f"after {call}, one{what}. The run takes them as they are; correct the bounds of "
                "the space if they are wrong"
            )
            self._warn = None
            break


class CheckedVector(VectorWrapper):
    """Environments with one agent.

    Args:
        env: N environments.
        checks: of their observations.

    Raises:
        EnvironmentFailed: in `reset` and `step`, as `_Checks.check`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], checks: _Checks) -> None:
        super().__init__(env)
        self._checks = checks

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        observations, infos = super().reset(**arguments)
        self._check(observations, "reset")
        return observations, infos

    def step(self, actions: Any) -> Any:
        observations, *results = super().step(actions)
        self._check(observations, "step")
        return (observations, *results)

    def _check(self, observations: Any, call: str) -> None:
        space = self.single_observation_space
        tree = to_tree(space, observations)
        self._checks.check(space, tree, call, lambda row: f"environment {row}")


class CheckedGames:
    """Environments with several agents; the same, with their infos.

    Args:
        envs: N environments.
        checks: of their observations.
        warn: called with the first infos that nothing reads.
    """

    def __init__(self, envs: MultiAgentEnvs, checks: _Checks, warn: Callable[[str], None]) -> None:
        self._envs = envs
        self._checks = checks
        self._warn: Callable[[str], None] | None = warn
        self.num_envs, self.agents, self.groups = envs.num_envs, envs.agents, envs.groups
        self.critic_spaces = envs.critic_spaces

    def reset(self, seed: int) -> Turn:
        return self._checked(self._envs.reset(seed), "reset")

    def step(self, actions: Sequence[Any]) -> Turn:
        return self._checked(self._envs.step(actions), "step")

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._envs.returns()

    def overdue(self, steps: int) -> str:
        return self._envs.overdue(steps)

    def close(self) -> None:
        self._envs.close()

    def _checked(self, turn: Turn, call: str) -> Turn:
        for group, said in zip(self.groups, turn.groups, strict=True):

            def who(row: int, acting: NDArray[Any] = said.acting) -> str:
                environment, agent = divmod(int(acting[row]), len(self.agents))
                return f"agent {self.agents[agent]!r} in environment {environment}"

            self._checks.check(group.observation_space, said.observations, call, who)
        if turn.unread and self._warn is not None:
            self._warn(f"infos after {call} have {turn.unread()}")
            self._warn = None
        return turn


def checked(
    env: VectorEnvironment | MultiAgentEnvs, name: str, warn: Callable[[str], None]
) -> VectorEnvironment | MultiAgentEnvs:
    """The same environments, whose observations are checked.

    Args:
        env: N environments.
        name: of the environment, for people.
        warn: as in `_Checks` and `CheckedGames`.
    """
    checks = _Checks(name, warn)
    return (
        CheckedVector(env, checks)
        if isinstance(env, VectorEnv)
        else CheckedGames(env, checks, warn)
    )


def _beyond_boxes(space: Space[Any], observations: Tree) -> Iterator[tuple[int, str]]:
    """The numbers of observations [B, ...] that are outside of a Box, each with its row and with
    what is wrong, for people."""
    found = dict(flatten(observations))
    for path, leaf in space_leaves(space):
        if not isinstance(leaf, spaces.Box):
            continue
        array = found[path].astype(np.float64)  # [B, ...]
        low, high = leaf.low.astype(np.float64), leaf.high.astype(np.float64)  # [...] both
        # The difference to a bound that is infinite may be no number, which is not greater.
        with np.errstate(invalid="ignore"):
            short = low - array > _ROUNDING * np.maximum(np.abs(low), 1.0)  # [B, ...]
            over = array - high > _ROUNDING * np.maximum(np.abs(high), 1.0)  # [B, ...]
        for row, *place in np.argwhere(short | over).tolist():
            at = tuple(place)
            where = f" at {path_name(path)}" if path else ""
            where += f" has {array[(row, *at)]:g}" + (f" at {place}" if place else "")
            yield row, f"{where}, where the bounds are {low[at]:g} and {high[at]:g}"


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
