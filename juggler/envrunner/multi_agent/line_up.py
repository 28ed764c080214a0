"""Line-ups: which module plays which agent in an episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.environments.seeding import line_up_generator
from juggler.envrunner.setup import may_play
from juggler.runtime.modules.import_by_name import found
from juggler.runtime.near_matches import nearest

#: From the agents of an environment and a generator to the module of each agent.
WhoPlays = Callable[[Sequence[str], np.random.Generator], Mapping[str, str]]


class LineUpError(ValueError):
    """A mapping failed, or named a module that cannot play an agent."""


@dataclass(frozen=True, slots=True)
class LineUp:
    """Players of environments that begin an episode.

    Attributes:
        slots: [K * A] of these environments.
        players: [K * A] the id of the module that plays there until the episode ends.
    """

    slots: NDArray[np.intp]
    players: NDArray[np.str_]


class Players:
    """The current module of each agent in each of N environments.

    Args:
        num_envs: N.
        agents: A names.
        played_by: by agent, its module before the first line-up.
    """

    def __init__(self, num_envs: int, agents: Sequence[str], played_by: Mapping[str, str]) -> None:
        ids = [played_by[agent] for agent in agents]
        self._ids = np.tile(np.array(ids, np.object_), (num_envs, 1))  # [N, A]

    def line_up(self, line_up: LineUp) -> None:
        """Set the players of episodes that begin."""
        self._ids.flat[line_up.slots] = line_up.players

    def of(self, envs: NDArray[np.intp]) -> NDArray[np.object_]:
        """Return the ids of modules [K, A] in environments [K]."""
        return self._ids[envs]


class LineUps(Protocol):
    """Decides which modules play an episode, when it begins."""

    def reset(self, seed: int) -> None:
        """Restart all draws with this seed."""

    def begin(self, envs: NDArray[np.intp]) -> LineUp:
        """Return the line-up of environments [K] that begin an episode.

        Raises:
            LineUpError: an environment has no line-up.
        """

    def ended(
        self, envs: NDArray[np.intp], returns: NDArray[np.float64], lengths: NDArray[np.intp]
    ) -> None:
        """Receive returns [L, A] and lengths [L] of ended episodes."""
        return

    def abandon(self, envs: Sequence[int]) -> None:
        """Drop the running episodes of environments that are gone."""
        return


class DrawnLineUps(LineUps):
    """Draws a line-up for each episode.

    It depends only on the seed, the environment, and the number of the episode there.

    Args:
        agents: the A agents of an environment.
        played_by: by agent, the modules that may play it.
        who_plays: draws the line-up of one episode.
        name: of `who_plays`, for errors.
    """

    def __init__(
        self,
        agents: Sequence[str],
        played_by: Mapping[str, str | Sequence[str]],
        who_plays: WhoPlays,
        name: str,
    ) -> None:
        self._agents = tuple(agents)
        self._may_play = {agent: may_play(played_by[agent]) for agent in agents}
        self._who_plays, self._name = who_plays, name
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._seed = seed
        self._episodes: Counter[int] = Counter()  # that have begun, by environment

    def begin(self, envs: NDArray[np.intp]) -> LineUp:
        players: list[str] = []
        for env in envs.tolist():
            generator = line_up_generator(self._seed, env, self._episodes[env])
            self._episodes[env] += 1
            players += self.draw(generator)
        slots = envs[:, None] * len(self._agents) + np.arange(len(self._agents))  # [K, A]
        return LineUp(slots.ravel(), np.array(players, np.str_))

    def draw(self, generator: np.random.Generator) -> list[str]:
        """Draw one line-up -> the module of each agent, in their order.

        Raises:
            LineUpError: `who_plays` failed, or named a module that cannot play an agent.
        """
        try:
            drawn = self._who_plays(self._agents, generator)
        except Exception as error:
            raise LineUpError(f"{self._name} raised {type(error).__name__}: {error}") from error
        if not isinstance(drawn, Mapping):
            raise LineUpError(
                f"{self._name} returned a {type(drawn).__name__}: it must return the module of "
                "each agent, as a dict by agent"
            )
        for agent, ids in self._may_play.items():
            if agent not in drawn:
                raise LineUpError(
                    f"{self._name} named no module for agent {agent!r}: it must name one for each "
                    "agent that it is given"
                )
            if drawn[agent] not in ids:
                raise LineUpError(
                    f"{self._name} mapped agent {agent!r} to {drawn[agent]!r}, which is none of "
                    f"the modules that may play it{nearest(drawn[agent], ids)}"
                )
        if absent := [agent for agent in drawn if agent not in self._may_play]:
            raise LineUpError(
                f"{self._name} mapped {absent[0]!r}, and the environment has no such agent"
                f"{nearest(absent[0], self._agents)}"
            )
        return [drawn[agent] for agent in self._agents]


def line_ups_of(
    agents: Sequence[str],
    played_by: Mapping[str, str | Sequence[str]],
    mapping: str,
    own: Mapping[str, Callable[..., Any]] | None,
) -> DrawnLineUps | None:
    """Return what draws line-ups; None: each agent always has the same module.

    Args:
        agents: of an environment.
        played_by: by agent, the modules that may play it.
        mapping: name of a function; "": line-ups are drawn uniformly.
        own: functions of a script, by name.

    Raises:
        ValueError: the function cannot be imported.
    """
    if mapping:
        who_plays = (own or {}).get(mapping) or found(mapping, "mapping")
        return DrawnLineUps(agents, played_by, who_plays, f"mapping {mapping!r}")
    ids_of = {agent: may_play(played_by[agent]) for agent in agents}
    if all(len(ids) == 1 for ids in ids_of.values()):
        return None

    def uniformly(agents: Sequence[str], generator: np.random.Generator) -> dict[str, str]:
        return {agent: ids_of[agent][generator.integers(len(ids_of[agent]))] for agent in agents}

    return DrawnLineUps(agents, played_by, uniformly, "agents")
