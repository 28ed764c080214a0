"""Maps the players of a league to the modules of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from juggler.driver.config import RunConfig
from juggler.driver.driver_config import ConfigError
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league import League
from juggler.driver.league.roster import Player
from juggler.envrunner.setup import RANDOM
from juggler.runtime.checkpoints.weights import is_frozen
from juggler.runtime.near_matches import nearest

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
    """Return the modules that are trained now; a league changes them.

    Args:
        counters: of the checkpoint to resume; None: the run is new.

    Returns:
        By id of a module, the module of the configuration whose settings it has.

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
    """Return the copies in a saved league.

    Returns:
        By id of a copy, the digest of its weights and connectors; "": unknown, because the
        checkpoint is of an earlier version, or the copy had just been requested.
    """
    try:
        players = counters[LEAGUE]["players"]
        ids = [each["player_id"] for each in players if each["parent"] and not each["retired"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the checkpoint has no league: {error!r}") from None
    digests = counters.get(COPIES, {})
    return {copy_id: digests.get(copy_id, "") for copy_id in ids}
