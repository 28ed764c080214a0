"""What a run keeps when it is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from juggler.driver.checkpoint.parts_agree import shared_parts_must_agree
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.league_players import players_of
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.checkpoints.frozen import FROM, TRAIN
from juggler.runtime.connectors.built_in import PLACES
from juggler.runtime.connectors.pipeline import Piece
from juggler.runtime.nearest import all_of, listed


def must_keep_its_algorithm(before: str, now: str, where: str = "") -> None:
    """
    Args:
        before: the algorithm of a run.
        now: that with which it is to go on.
        where: of which module, in words.

    Raises:
        ConfigError: they differ.
    """
    if before != now:
        raise ConfigError(
            f"{where}algorithm = {now!r}: this run is one of {before!r}, and a run that is resumed "
            "keeps its algorithm. To begin another run with its weights, give from_checkpoint, "
            "or --from"
        )


def must_be_of_one_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """
    Raises:
        ConfigError: a module, or the algorithm of one, is not that of the checkpoint.
    """
    before = RunConfig.from_flat(checkpoint.config)
    _league_must_be_the_same(config, before)
    had, has = before.agents.acting_ids, config.agents.acting_ids
    if {*has} != {*had}:
        raise ConfigError(
            f"agents: this run has the modules {listed(had)}, and with what is given "
            f"{listed(has)}: a run that is resumed keeps its modules"
        )
    if config.agents.shared != before.agents.shared:
        raise ConfigError(
            f"shared = {config.agents.shared}: this run has {before.agents.shared}, and a run that "
            "is resumed keeps what its modules share"
        )
    shared_parts_must_agree(checkpoint, config.agents.shared)
    for module_id in has:
        tables = [each.agents.modules.get(module_id, {}) for each in (before, config)]
        if any(tables[0].get(key) != tables[1].get(key) for key in (TRAIN, FROM)):
            raise ConfigError(
                f"modules.{module_id}: a run that is resumed keeps its modules: leave train and "
                "from as they were"
            )
    for where, was, now in _modules(config, before):
        must_keep_its_algorithm(was.learner.algorithm, now.learner.algorithm, where)


def changes(config: RunConfig, before: RunConfig) -> list[str]:
    """Word where a run goes on with other connectors than it has learned with, or with other keys
    than those that the steps of its saved replay have been kept with.

    Args:
        config: that which the run goes on with.
        before: that of its checkpoint.
    """
    connectors, sums = [], []
    for where, was, now in _modules(config, before):
        for place in PLACES:
            had, has = (list(each.connectors.parsed().pipeline(place)) for each in (was, now))
            if had != has:
                connectors.append(
                    f"{where}connectors.{place} had {_named(had)}, and has {_named(has)} now: the "
                    "weights were learned with the former"
                    + ("; statistics of new connectors begin anew" if has else "")
                )
        for key in now.learner.keys_of_kept_steps():
            if key not in was.learner.keys_of_kept_steps():
                continue
            old, new = (getattr(each.learner, key) for each in (was, now))
            if old != new:
                sums.append(
                    f"{where}{key} was {old}, and is {new} now: steps in the replay of the "
                    "checkpoint keep the sums of rewards that were made with the former; "
                    "save_replay = false begins without them"
                )
    return connectors + sums


def _modules(config: RunConfig, before: RunConfig) -> Iterator[tuple[str, RunConfig, RunConfig]]:
    """Of each module where its keys are, for people, and the configurations it had and has."""
    for module_id in config.module_ids:
        where = f"modules.{module_id}: " if before.agents.agents else ""
        yield where, before.of(module_id), config.of(module_id)


def _named(pieces: Sequence[Piece]) -> str:
    return (
        all_of(
            f"{piece.name} with {dict(piece.options)}" if piece.options else piece.name
            for piece in pieces
        )
        or "nothing"
    )


def _league_must_be_the_same(config: RunConfig, before: RunConfig) -> None:
    """
    Raises:
        ConfigError: the league begins with other players than that of the run did, or only one of
            the two configurations has a league.
    """
    had, has = before.agents, config.agents
    if bool(had.league) != bool(has.league):
        raise ConfigError(
            f"league: this run has {'a' if had.league else 'no'} league, and a run that is resumed "
            "keeps to that"
        )
    if not has.league:
        return
    began_with = had.acting_ids
    players = players_of(has.league, before.agent_names, had.modules)
    if {*players} != {*began_with}:
        raise ConfigError(
            f"league: this run began with the players {listed(began_with)}, and with what is given "
            f"it would be {listed(players)}: a run that is resumed keeps its players"
        )
