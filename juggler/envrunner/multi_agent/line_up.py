"""Which module plays which agent: roles, and the line-ups of episodes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.environments.seeding import line_up_generator
from juggler.envrunner.multi_agent.turns import AgentGroup, MultiAgentEnvs
from juggler.envrunner.setup import RANDOM, may_play
from juggler.runtime.modules.import_by_name import found
from juggler.runtime.near_matches import nearest
from juggler.runtime.wire.v1 import training_pb2


@dataclass(frozen=True, slots=True)
class Role:
    """The agents that a module plays."""

    module_id: str
    # Names of the agents that it may play, in the order of `MultiAgentEnvs.agents`.
    agents: tuple[str, ...]
    group: int  # index of their group in `MultiAgentEnvs.groups`
    spaces: AgentGroup  # that group


def cast(
    envs: MultiAgentEnvs, played_by: Mapping[str, str | Sequence[str]], modules: Collection[str]
) -> dict[str, Role]:
    """Return the role of each module but `random`.

    Args:
        played_by: by agent, the id of its module, or of the modules that may play it.
        modules: the ids of all modules but `random`.

    Raises:
        ValueError: an agent has no module, a module has no agent, or agents of one module have
            different spaces.
    """
    if homeless := [agent for agent in envs.agents if agent not in played_by]:
        raise ValueError(
            f"no module plays {_listed(homeless)}: name one for each agent of the environment"
        )
    if absent := [agent for agent in played_by if agent not in envs.agents]:
        raise ValueError(
            f"the environment has no {_listed(absent)}: its agents are {', '.join(envs.agents)}"
        )
    named = {module_id for ids in played_by.values() for module_id in may_play(ids)}
    if unknown := sorted(named - {*modules, RANDOM}):
        raise ValueError(f"agents are played by {', '.join(unknown)}, and no module has that id")
    return {module_id: _role(envs, played_by, module_id) for module_id in modules}


def random_roles(
    envs: MultiAgentEnvs, played_by: Mapping[str, str | Sequence[str]]
) -> Iterator[Role]:
    """Yield the roles of the module `random`, one per group."""
    for number, group in enumerate(envs.groups):
        agents = tuple(agent for agent in group.agents if RANDOM in may_play(played_by[agent]))
        if agents:
            yield Role(RANDOM, agents, number, group)


def _role(
    envs: MultiAgentEnvs, played_by: Mapping[str, str | Sequence[str]], module_id: str
) -> Role:
    agents = tuple(agent for agent in envs.agents if module_id in may_play(played_by[agent]))
    if not agents:
        raise ValueError(f"the module {module_id!r} plays no agent: give it one, or remove it")
    within = [
        (number, group)
        for number, group in enumerate(envs.groups)
        if not set(agents).isdisjoint(group.agents)
    ]
    # A module has one observation space and one action space.
    if len(within) > 1:
        differing = "; ".join(
            f"{', '.join(agent for agent in group.agents if agent in agents)}: observations "
            f"{group.observation_space}, actions {group.action_space}"
            for _, group in within
        )
        raise ValueError(
            f"the module {module_id!r} plays agents with different spaces ({differing}): give each "
            "kind of agent a module of its own, or pad the spaces: with pad_agents = true, or, in "
            "a run with a gateway, in the environment itself"
        )
    ((number, group),) = within
    return Role(module_id, agents, number, group)


def _listed(agents: Collection[str]) -> str:
    return ("agent " if len(agents) == 1 else "agents ") + ", ".join(agents)


#: From the agents of an environment and a generator to the module of each agent.
WhoPlays = Callable[[Sequence[str], np.random.Generator], Mapping[str, str]]


class LineUpError(ValueError):
    """A mapping failed, or named a module that cannot play an agent."""


@dataclass(frozen=True, slots=True)
class LineUp:
    """Players of environments that begin an episode."""

    slots: NDArray[np.intp]  # [K * A] of these environments
    # [K * A] the id of the module that plays there until the episode ends.
    players: NDArray[np.str_]


class LineUps(Protocol):
    """Decides which modules play an episode, when it begins."""

    def reset(self, seed: int) -> None:
        """Restart all draws with this seed."""

    def begin(self, envs: NDArray[np.intp], evaluated: Collection[int] = ()) -> LineUp:
        """Return the line-up of environments [K] that begin an episode.

        Args:
            evaluated: environments among them that play for an evaluation.

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

    def begin(self, envs: NDArray[np.intp], evaluated: Collection[int] = ()) -> LineUp:
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
        # It is a user's function: any name may come back.
        for agent, ids in self._may_play.items():
            if agent not in drawn:
                raise LineUpError(
                    f"{self._name} named no module for agent {agent!r}: it must name one for each "
                    "agent that it is given"
                )
            # Its id may be that of a module for other agents.
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


_MOST_AGAIN = 64  # line-ups that are played again if no new one is left


@dataclass(frozen=True, slots=True)
class AssignedMatch:
    """A match to play."""

    match_id: int
    players: tuple[str, ...]
    counts: bool = True  # its outcome is reported; otherwise it is repeated to fill the time


class AssignedLineUps:
    """Assigns each of the driver's line-ups to one episode.

    Short episodes may use up all line-ups before the next request brings more. Then the newest ones
    are played again, in turn, without a report of their outcomes. Before the first line-up comes,
    and in an evaluation, the first module that may play an agent plays it.

    Args:
        played_by: by agent, in the order of players in line-ups, the modules that may play it.
    """

    def __init__(self, agents: Sequence[str], played_by: Mapping[str, str | Sequence[str]]) -> None:
        # The place of each agent in line-ups.
        order = {agent: place for place, agent in enumerate(played_by)}
        self._place = np.array([order[agent] for agent in agents], np.intp)  # [A]
        at_first = tuple(may_play(ids)[0] for ids in played_by.values())
        self._at_first = AssignedMatch(0, at_first, counts=False)
        self._fresh: deque[AssignedMatch] = deque()
        self._again: deque[AssignedMatch] = deque(maxlen=_MOST_AGAIN)
        self._playing: dict[int, AssignedMatch] = {}  # by environment
        self._ended: list[training_pb2.MatchResult] = []
        self._leaving: set[str] = set()  # modules, as soon as no running episode has them

    def assign(self, line_ups: Iterable[training_pb2.LineUp], known: Collection[str]) -> None:
        """Queue line-ups for the episodes that begin next.

        Args:
            known: the modules of this worker, without `random`.

        Raises:
            ValueError: a line-up has a wrong number of players, or an unknown player.
        """
        taken = [AssignedMatch(each.match_id, tuple(each.players)) for each in line_ups]
        for match in taken:
            if absent := [each for each in match.players if each not in known and each != RANDOM]:
                raise ValueError(
                    f"the line-up of match {match.match_id} has {absent[0][:100]!r}, and no such "
                    "player is here"
                )
            if len(match.players) != len(self._place):
                raise ValueError(
                    f"the line-up of match {match.match_id} has {len(match.players)} players: the "
                    f"environment has {len(self._place)} agents"
                )
        self._fresh.extend(taken)

    def reset(self, seed: int) -> None:
        """Drop all episodes, and queue their matches again."""
        self.abandon(list(self._playing))

    def abandon(self, envs: Iterable[int]) -> None:
        """Drop the episodes of environments, and queue their matches again."""
        dropped = [self._playing.pop(env) for env in envs if env in self._playing]
        begun = [match for match in dropped if match.counts and not self._has_leaving(match)]
        self._fresh.extendleft(reversed(begun))

    @property
    def first(self) -> str:
        """The module that plays all agents in an evaluation."""
        return self._at_first.players[0]  # modules of a league play every agent

    def begin(self, envs: NDArray[np.intp], evaluated: Collection[int] = ()) -> LineUp:
        """Assign line-ups to environments [K] that begin an episode."""
        players: list[NDArray[np.str_]] = []  # [A] each
        for env in envs.tolist():
            match = self._at_first if env in evaluated else self._next()
            self._playing[env] = match
            players.append(np.array(match.players, np.str_)[self._place])
        slots = envs[:, None] * len(self._place) + np.arange(len(self._place))  # [K, A]
        together = np.concatenate(players) if players else np.zeros(0, np.str_)  # [K A]
        return LineUp(slots.ravel(), together)

    def ended(
        self, envs: NDArray[np.intp], returns: NDArray[np.float64], lengths: NDArray[np.intp]
    ) -> None:
        """Keep the outcomes of ended episodes.

        Args:
            envs: [L] their environments.
            returns: [L, A] of each agent; NaN: it never acted.
            lengths: [L] environment steps.
        """
        for env, of_agents, length in zip(envs.tolist(), returns, lengths.tolist(), strict=True):
            match = self._playing.pop(env, None)
            if match is None or not match.counts:
                continue
            in_order = np.empty(len(self._place))  # [A]
            in_order[self._place] = of_agents
            result = training_pb2.MatchResult(
                match_id=match.match_id,
                returns=in_order.tolist(),
                length=length,
            )
            self._ended.append(result)

    def pop_ended(self) -> list[training_pb2.MatchResult]:
        """Return the matches that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def forget(self, module_id: str, other: str) -> None:
        """Begin no more matches with this module.

        Before the first line-up comes, and in an evaluation, `other` plays instead.
        """
        players = (other if each == module_id else each for each in self._at_first.players)
        self._at_first = replace(self._at_first, players=tuple(players))
        self._leaving.add(module_id)
        for matches in (self._fresh, self._again):
            kept = [match for match in matches if not self._has_leaving(match)]
            matches.clear()
            matches.extend(kept)

    def pop_left(self) -> set[str]:
        """Return the forgotten modules that have left all running episodes, each once."""
        if not self._leaving:
            return set()
        in_play = {player for match in self._playing.values() for player in match.players}
        left = self._leaving - in_play
        self._leaving -= left
        return left

    def _has_leaving(self, match: AssignedMatch) -> bool:
        return not self._leaving.isdisjoint(match.players)

    def _next(self) -> AssignedMatch:
        if self._fresh:
            match = self._fresh.popleft()
            self._again.append(replace(match, counts=False))
            return match
        if not self._again:
            return self._at_first
        self._again.rotate(-1)
        return self._again[-1]
