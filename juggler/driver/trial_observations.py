"""Environments whose observations are checked before a run begins.

Those in Discrete, MultiDiscrete and MultiBinary spaces must be in them, since learners refuse
batches with others. Numbers outside of a Box are common, and the run takes them as they are, so the
first one is warned of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
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
