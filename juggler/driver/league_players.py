"""What a table `league` means for the modules of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from juggler.driver.config import RunConfig
from juggler.driver.driver_config import ConfigError
from juggler.driver.league import events
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.roster import Player
from juggler.envrunner.setup import RANDOM


def players_of(table: Mapping[str, Any], agents: Sequence[str]) -> list[str]:
    """The modules that a league begins with: players that learn, then those that do not.

    Args:
        table: `league` of a configuration.
        agents: of the environment.

    Raises:
        ConfigError: the table has a wrong key or value, or does not suit the agents.
    """
    try:
        league = League(LeagueConfig.from_table(table), tuple(agents), seed=0)
        league.begin()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"league: {error}") from error
    present = league.roster.present()
    learners = [player.player_id for player in present if player.learning]
    others = [module_of(each) for each in present if not each.learning and not each.parent]
    return list(dict.fromkeys([*learners, *others]))


def league_of(config: RunConfig, state: Mapping[str, Any] | None) -> League:
    """The league of a run: a new one, which has not begun, or one that goes on from a checkpoint.

    Raises:
        ValueError: the state is not that of a league.
    """
    settings, agents = LeagueConfig.from_table(config.agents.league), config.agent_names
    if state is None:
        return League(settings, agents, config.driver.seed)
    return League.from_state(state, settings, agents)


def module_of(player: Player) -> str:
    """The module with which a player plays: its own, the one that it stands for, or `random`."""
    if player.learning or player.parent:
        return player.player_id
    return RANDOM if player.source == events.RANDOM else player.source


def copies_of(state: Mapping[str, Any]) -> list[str]:
    """The copies that a league had when it was saved.

    Raises:
        ConfigError: this is no state of a league.
    """
    try:
        players = state["players"]
        return [each["player_id"] for each in players if each["parent"] and not each["retired"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the checkpoint has no league: {error!r}") from None
