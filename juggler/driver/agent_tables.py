"""Fits a configuration's tables to the agents of its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from google.protobuf.json_format import ParseDict

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.driver_config import who_plays
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.roster import Player
from juggler.envrunner.agent_returns import MOST_WITH_METRICS, has_metrics_by_agent
from juggler.envrunner.multi_agent.openspiel import SCHEME as OPENSPIEL
from juggler.envrunner.multi_agent.pettingzoo_games import SCHEME as PETTINGZOO
from juggler.envrunner.setup import RANDOM
from juggler.runtime.checkpoints.weights import is_frozen
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.near_matches import listed, nearest, one_of
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.v1 import spaces_pb2

#: Keys in a checkpoint's counters: the league, the digests of its copies, and by player the
#: generation of the first weights after its last reset.
LEAGUE: Final = "league"
COPIES: Final = "copies"
RESETS: Final = "resets"


def players_of(
    table: Mapping[str, Any], agents: Sequence[str], modules: Mapping[str, Any]
) -> list[str]:
    """Return the modules a league begins with, learning ones first.

    Raises:
        ConfigError: the table has a wrong key or value, or does not fit the agents.
    """
    try:
        league = League(LeagueConfig.from_table(table), tuple(agents), seed=0)
        league.begin()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"league: {error}") from error
    # The first players are known once the builder has begun.
    present = league.roster.present()
    known = [*(each for each in modules if is_frozen(modules[each])), RANDOM]
    for player in present:
        plays = player.learning or player.parent or module_of(player) in known
        if not plays:
            raise ConfigError(
                f"league: {module_of(player)!r} cannot play: a player that does not learn must be "
                f"random, or a module with train = false{nearest(module_of(player), known)}"
            )
    learners = [player.player_id for player in present if player.learning]
    others = [module_of(each) for each in present if not each.learning and not each.parent]
    return list(dict.fromkeys([*learners, *others]))


def league_of(config: RunConfig, state: Mapping[str, Any] | None) -> League:
    """Make the league of a run, or restore it from a checkpoint."""
    settings, agents = LeagueConfig.from_table(config.agents.league), config.agent_names
    if state is None:
        return League(settings, agents, config.driver.seed)
    return League.from_state(state, settings, agents)


def trained_now(config: RunConfig, counters: Mapping[str, Any] | None) -> dict[str, str]:
    """Return, by trained module, the configured module whose settings it has.

    Raises:
        ValueError: the checkpoint has no league, or no player learns in it.
    """
    first = config.module_ids
    state = (counters or {}).get(LEAGUE)
    if not config.agents.league or state is None:
        return {module_id: module_id for module_id in first}
    roster = league_of(config, state).roster
    learning = [player.player_id for player in roster.learners()]
    if not learning:
        raise ValueError("the checkpoint has a league in which no player learns")
    return {player_id: roster.modelled_on(player_id, first) for player_id in learning}


def module_of(player: Player) -> str:
    """Return the module that acts for a player."""
    if player.learning or player.parent:
        return player.player_id
    return RANDOM if player.source == RANDOM else player.source


def copies_of(counters: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of a saved league's copies by id; "": unknown."""
    try:
        players = counters[LEAGUE]["players"]
        ids = [each["player_id"] for each in players if each["parent"] and not each["retired"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the checkpoint has no league: {error!r}") from None
    digests = counters.get(COPIES, {})
    return {copy_id: digests.get(copy_id, "") for copy_id in ids}


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """Agents of an environment with equal spaces, as the rehearsal reports them."""

    agents: tuple[str, ...]  # their names; (): the environment has one agent, which has no name
    # Space of their observations, before any connector; None: it has no message, as when a
    # connector replaces it
    observation: spaces_pb2.Space | None
    action: spaces_pb2.Space | None  # space of their actions, or None as above

    def other_space(self, spaces: Mapping[str, Any]) -> tuple[str, str, str] | None:
        """Return the side, old and new space of a difference, or None."""
        for side, has in (("observation", self.observation), ("action", self.action)):
            if has is None or side not in spaces:
                continue  # one has no encoding: loading the weights shows whether they fit
            had = ParseDict(spaces[side], spaces_pb2.Space())
            if had != has:
                return side, str(space_from_message(had)), str(space_from_message(has))
        return None


def needs_environment(config: RunConfig) -> bool:
    """Return whether the driver must make an environment to know the modules."""
    if config.env_runner.gateway:
        return False  # simulators report their agents when they dial
    tables = config.agents
    is_known = bool(tables.agents) or not config.env_runner.env.startswith((PETTINGZOO, OPENSPIEL))
    return tables.has_patterns or not is_known


def with_agents(config: RunConfig, groups: Sequence[FoundGroup]) -> RunConfig:
    """Name every agent of the environment in `agents`; patterns of gateways stay.

    Raises:
        ConfigError: the tables `agents` and `modules` do not suit the environment, or need to know
            it.
    """
    tables = config.agents
    if config.env_runner.gateway:
        return _with_simulators(config)
    if not groups:
        if tables.has_patterns:
            key = tables.first_given
            raise ConfigError(
                f"{key}: the agents of {config.env_runner.env} are unknown here, because it is "
                "made on other hosts: name every agent in the table agents, without patterns"
            )
        _check_goals(config)
        return config
    # The only agent of an environment has no name.
    if not groups[0].agents:
        return _with_one_agent(config)
    if tables.league and len(groups) > 1:
        one, other = groups[0].agents[0], groups[1].agents[0]
        raise ConfigError(
            f"league: agents {one!r} and {other!r} have different spaces, and every player of a "
            "league can play every agent: set pad_agents = true, or leave out the table league, "
            "and each has its own module"
        )
    if tables.league:
        return _playing_a_league(config, groups[0].agents)
    return _playing(config, who_plays(tables, [group.agents for group in groups]))


def _playing(config: RunConfig, played_by: dict[str, str | list[str]]) -> RunConfig:
    """Return a configuration with this table of agents."""
    tables = config.agents
    modules = {}
    for module_id, table in config.agents.modules.items():
        modules[module_id] = dict(table)
        if "algorithm" in table:
            # Actors read the module's name from here: the algorithm's default is not known to them.
            modules[module_id]["module"] = config.of(module_id).module.module or "none"
    found = replace(config, agents=replace(tables, agents=played_by, modules=modules))
    found.have_needed_learners()
    found.validate()
    _check_goals(found)
    return found


def _playing_a_league(config: RunConfig, agents: Sequence[str]) -> RunConfig:
    """Let every player of a league play every agent."""
    players = players_of(config.agents.league, agents, config.agents.modules)
    found: dict[str, str | list[str]] = {agent: list(players) for agent in agents}
    if config.agents.agents and config.agents.agents != found:
        raise ConfigError(
            f"agents: a league maps its players, here {listed(players)}: leave out the table "
            "agents; and in a resumed run, leave the players of its league as they were"
        )
    return _playing(config, found)


def _with_simulators(config: RunConfig) -> RunConfig:
    """Complete the tables for simulators, and keep patterns of agents."""
    tables = config.agents
    if tables.league:
        teams = LeagueConfig.from_table(tables.league).teams
        if not teams:
            raise ConfigError(
                "league: simulators report their agents when they dial, and a league needs "
                'them earlier: name every agent in teams, as in teams = [["player_0"], '
                '["player_1"]]'
            )
        agents = [agent for team in teams for agent in team]
        return _playing_a_league(config, agents)
    # Simulators name their agents later, so a table must name them now.
    if tables.agents:
        return _playing(config, tables.agents)
    if tables.mapping:
        raise ConfigError(
            f"mapping = {tables.mapping!r} with a gateway: add the table agents, with the "
            'modules that may act for each agent, as in "player_*" = ["main", "random"]'
        )
    if others := [each for each in tables.modules if each != DEFAULT_MODULE]:
        raise ConfigError(
            "modules: simulators have one agent, unless the table agents has several: "
            f"add it, or leave out {listed(others)}"
        )
    _check_goals(config)
    return config


def _with_one_agent(config: RunConfig) -> RunConfig:
    tables, env = config.agents, config.env_runner.env
    others = [each for each in tables.modules if each != DEFAULT_MODULE]
    seen = f"critic_sees = {''.join(config.critics_see[:1])!r}"
    # These keys mean something only with several agents.
    for key, given, why in (
        (seen, config.critics_see, "whose value function sees its observation: leave it out"),
        ("agents", tables.agents, "so there is nothing to map: leave out the table agents"),
        ("league", tables.league, "and no opponent: leave out the table league"),
        ("pad_agents", config.env_runner.pad_agents, "whose spaces need no padding: leave it out"),
        ("mapping", tables.mapping, "so there is nothing to map: leave it out"),
        ("modules", others, f"which {DEFAULT_MODULE!r} plays: leave out {listed(others)}"),
        ("shared", tables.shared, "and one module, which shares nothing: leave out the table"),
    ):
        if given:
            raise ConfigError(f"{key}: the environment {env} has one agent, {why}")
    _check_goals(config)
    return config


def _check_goals(config: RunConfig) -> None:
    """Check that every name in `stop_return` is a module or an agent."""
    goals, agents = config.driver.stop_return, config.agent_names
    for name, goal in goals.items() if isinstance(goals, dict) else ():
        if not config.played_by:
            raise ConfigError(
                f"stop_return.{name}: the environment {config.env_runner.env} has one agent: give "
                f"a number alone, such as stop_return = {goal:g}"
            )
        # Modules come first: an agent may have the name of a module.
        if name in config.module_ids:
            continue
        if config.env_runner.gateway:
            raise ConfigError(
                f"stop_return: {name!r} is not a module of this run, and with a gateway only "
                f"modules have goals: name {listed(config.module_ids, one_of)}"
            )
        if name not in agents:
            known = [*dict.fromkeys((*config.module_ids, *agents))]
            raise ConfigError(
                f"stop_return: {name!r} is neither a module nor an agent of this run"
                f"{nearest(name, known)}"
            )
        # Returns by agent are kept only while agents are few.
        if not has_metrics_by_agent(agents):
            raise ConfigError(
                f"stop_return: {name!r} is one of {len(agents)} agents, and with more than "
                f"{MOST_WITH_METRICS} only modules have goals: name "
                f"{listed(config.module_ids, one_of)}"
            )
