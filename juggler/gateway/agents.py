"""Assigns modules of a run to the agents of simulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from juggler.envrunner.multi_agent.line_up import AssignedLineUps, LineUps, line_ups_of
from juggler.envrunner.setup import RANDOM, matches, may_play
from juggler.gateway.session_errors import Code, SessionError
from juggler.gateway.sessions import SharedEpisodes
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.near_matches import listed, nearest
from juggler.runtime.wire.v1 import simulator_pb2 as pb

#: Names that clients give the only agent of a simulator.
_UNNAMED = ("", "0")
_LONGEST_NAME: Final = 128  # characters


class ModuleAssignment:
    """The run's table `agents`, as a gateway uses it.

    A module has one player in a gateway, under its id. `random` fits any spaces: it has one player
    for each pattern, called random:PATTERN.

    Args:
        table: modules by name or pattern of agents; the first match counts. {}: simulators have one
            agent each.
        mapping: name of the function that draws line-ups; "": they are drawn uniformly.
        league: the driver assigns line-ups; the table has every agent, and no pattern.
        remote_only: what refuses simulators that act by themselves; "": only runs with a table.

    Raises:
        ValueError: the mapping cannot be imported.
    """

    def __init__(
        self,
        table: Mapping[str, str | Sequence[str]] | None = None,
        *,
        mapping: str = "",
        league: bool = False,
        own: Mapping[str, Callable[..., Any]] | None = None,
        seed: int = 0,
        remote_only: str = "",
    ) -> None:
        self._remote_only = remote_only or ("a run with the table agents" if table else "")
        self.table = {pattern: may_play(given) for pattern, given in (table or {}).items()}
        # Hands out the driver's line-ups; None: no league.
        self.league = AssignedLineUps(tuple(self.table), self.table) if league else None
        modules = (each for ids in self.table.values() for each in ids)
        # Ids of the league's modules that may play now.
        self.players = list(dict.fromkeys(modules)) if league else []
        # Several modules may play an agent.
        self.draws = league or bool(mapping) or any(len(ids) > 1 for ids in self.table.values())
        self._mapping, self._own, self._seed = mapping, own, seed
        line_ups_of((), {}, mapping, own)  # raises if the function is missing
        self._seated = 0  # environments of all sessions so far

    def cast(self, hello: pb.Hello) -> list[tuple[str, ...]]:
        """Return the players that may act for each agent, in order.

        Raises:
            SessionError: an agent has no module, a wrong name, or asks for another module.
        """
        if self._remote_only and hello.mode != pb.REMOTE_INFERENCE:
            raise SessionError(
                Code.NOT_SERVED,
                f"the mode {pb.Mode.Name(hello.mode)}: let the gateway act, with the mode "
                f"REMOTE_INFERENCE, at {self._remote_only}",
            )
        if not self.table:
            if len(hello.agents) > 1:
                raise SessionError(
                    Code.NOT_SERVED,
                    f"{len(hello.agents)} agents, and this run is for simulators with one agent: "
                    "add a table [agents] to it that maps agents to modules, as in "
                    f'"*" = "{DEFAULT_MODULE}"',
                )
            return [_must_suit(hello.agents[0], (DEFAULT_MODULE,))]
        # From here on, an agent's name selects its module.
        names = [agent.id for agent in hello.agents]
        _check_names(names)
        if self.league is not None and {*names} != self.table.keys():
            raise SessionError(
                Code.NOT_SERVED,
                f"a match of this run's league has the agents {listed(self.table)}, and the "
                f"simulator {listed(names)}: give it the same",
            )
        if len(names) == len(self.table) == 1 and names[0] in _UNNAMED:
            (pattern,) = self.table
            return [self._players_of(hello.agents[0], pattern)]
        return [self._players_of(agent, self._pattern_of(agent.id)) for agent in hello.agents]

    def episodes(
        self, names: Sequence[str], cast: Sequence[Sequence[str]], count: int
    ) -> SharedEpisodes:
        """Make the episodes of a new session, with their line-ups."""
        played_by = {
            name: [module_of(each) for each in players]
            for name, players in zip(names, cast, strict=True)
        }
        line_ups: LineUps | None = self.league
        order = tuple(names) if self.league is None else tuple(self.table)
        if line_ups is None:
            line_ups = line_ups_of(names, played_by, self._mapping, self._own)
            if line_ups is not None:
                line_ups.reset(self._seed)
        first, self._seated = self._seated, self._seated + count
        return SharedEpisodes(line_ups, played_by, order, range(first, first + count))

    def _players_of(self, agent: pb.Agent, pattern: str) -> tuple[str, ...]:
        modules = self.table[pattern] if self.league is None else tuple(self.players)
        suited = _must_suit(agent, modules)
        return tuple(f"{RANDOM}:{pattern}" if each == RANDOM else each for each in suited)

    def _pattern_of(self, name: str) -> str:
        for pattern in self.table:
            if name and matches(name, pattern):
                return pattern
        if name in _UNNAMED:
            patterns = ", ".join(list(self.table)[:20])
            text = (
                "an agent without a name, in a run for several: give it an id that the run's table "
                f"[agents] has: {patterns}"
            )
        else:
            text = f"the run's table [agents] has no agent {name!r}{nearest(name, self.table)}"
        raise SessionError(Code.UNKNOWN_AGENT, text)


def _check_names(names: list[str]) -> None:
    known: set[str] = set()
    for name in names:
        if len(name) > _LONGEST_NAME:
            text = f"agent {name[:20]!r}...: a name has at most {_LONGEST_NAME} characters"
            raise SessionError(Code.UNKNOWN_AGENT, text)
        if name in known:
            text = f"two agents have the id {name!r}: give each one of its own"
            raise SessionError(Code.UNKNOWN_AGENT, text)
        known.add(name)


def module_of(player: str) -> str:
    """Return the id of a player's module."""
    return player.partition(":")[0]  # ids have no colon


def _must_suit(agent: pb.Agent, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return an agent's modules, unless it asks for another one."""
    if agent.policy == "" or modules == (agent.policy,):
        return modules
    has = repr(modules[0]) if len(modules) == 1 else f"{len(modules)} that take turns"
    raise SessionError(
        Code.NOT_SERVED,
        f"the policy {agent.policy[:64]!r} is asked for, and this run has {has} for agent "
        f"{agent.id[:64]!r}: ask for {'that one, or for ' * (len(modules) == 1)}none",
    )
