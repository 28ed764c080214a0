"""Players that learn, and come and go while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from juggler.driver.checkpoint.beginning import Beginning, Source
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.league.events import INITIAL
from juggler.driver.league.roster import Player, Roster
from juggler.driver.league_players import RESETS, module_of
from juggler.driver.record.progress import Progress
from juggler.driver.workers.league_weights import LeagueWeights
from juggler.driver.workers.registry import WorkerRegistry
from juggler.driver.workers.trained_modules import TrainedModules
from juggler.runtime.actors.seeds import worker_seed
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.checkpoints.frozen import WEIGHTS
from juggler.runtime.checkpoints.weights import weights_of
from juggler.runtime.connectors.mergeable_state import State, connector_state
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Path, Tree, flatten


class LeagueLearners:
    """Has players trained that come, resets them, and lets go of those that leave.

    A player begins with new weights, with those of a player that does not learn, or with those that
    another one has at that moment. It has the settings of the one that it comes from, or of the
    first with its role.

    Args:
        config: of the run.
        core: knows which modules have learners.
        registry: who is here.
        roster: the players.
        trained: the modules that are trained.
        weights: asks learners for those of their players.
        progress: shows people what happens.
        resume: what the run goes on from; None: it is new.
        beginning: what the run began with that another one has learned.
        failed: called with the id of a player that cannot learn.
    """

    def __init__(
        self,
        config: RunConfig,
        core: DriverCore,
        registry: WorkerRegistry,
        roster: Roster,
        trained: TrainedModules,
        weights: LeagueWeights,
        progress: Progress,
        resume: Checkpoint | None,
        beginning: Beginning | None,
        failed: Callable[[str], None],
    ) -> None:
        self._first, self._seed = config.module_ids, config.driver.seed
        self._core, self._registry, self._roster = core, registry, roster
        self._trained, self._weights, self._progress = trained, weights, progress
        self._beginning, self._failed = beginning, failed
        if resume is not None:
            resets = resume.counters.get(RESETS, {})
            for player in roster.learners():
                player_id = player.player_id
                if player_id not in resume.module_ids:
                    self._begin_again(player, resume)
                elif resume.version_of(player_id)[0] < resets.get(player_id, 0):
                    self._repeat_reset(player)

    def add(self, player_id: str) -> None:
        """Have a player trained, unless it is from the beginning."""
        source = self._roster.players[player_id].source
        if player_id in self._core.modules:
            return
        if source == INITIAL:
            self._train(player_id, self._initial(player_id))
        elif self._module(source) in self._registry.frozen:
            self._train(player_id, self._of_frozen(player_id, source))
        elif source in self._core.modules:
            then = partial(self._train_with, player_id, source)
            self._weights.ask(source, player_id, then, partial(self._cannot, player_id))
        else:
            self._cannot(player_id, f"{source!r} has no weights here to begin with")

    def must_fit(self, player_id: str, source: str) -> None:
        """
        Args:
            player_id, source: as of `reset`.

        Raises:
            ValueError: the weights are of another network than the player's.
        """
        if source == INITIAL:
            return
        if other := self._other_network(player_id, self._of_frozen(player_id, source)):
            raise ValueError(f"{player_id} cannot be reset to {source}: {other}")

    def reset(self, player_id: str, source: str) -> None:
        """Give a player other weights and a new optimizer, with schedules that begin at 0.

        Args:
            player_id: of the player.
            source: INITIAL, or the id of a player that is ready and does not learn.
        """
        self._weights.was_reset(player_id)
        self._trained.reset(player_id, *self._new_life(player_id, source))

    def resets(self) -> dict[str, int]:
        """Of players that learn and were reset, the generation of the first weights after that."""
        last = {
            each.player_id: self._trained.learners[each.player_id].last_reset
            for each in self._roster.learners()
            if each.player_id in self._trained.learners
        }
        return {player_id: reset.generation for player_id, reset in last.items() if reset}

    def retire(self, player_id: str) -> None:
        """Have a player trained no more."""
        self._weights.let_go(player_id)
        if player_id in self._core.modules:
            self._trained.remove(player_id)
            self._progress.message(f"league: {player_id} has left, and learns no more", "info")

    def forget_settled(self) -> None:
        """Forget players that have left, unless somebody waits for their weights."""
        needed = self.needed()
        for player_id in self._trained.settled():
            if player_id not in needed and not self._weights.wanted_of(player_id):
                self._trained.forget(player_id)

    def needed(self) -> set[str]:
        """Whose weights players begin with that have had no learner yet. A checkpoint has none of
        theirs, so a run that goes on from it needs these."""
        begun = {module.module_id for module in self._core.in_checkpoints()}
        return {each.source for each in self._roster.learners() if each.player_id not in begun}

    def _train_with(
        self, player_id: str, source: str, weights: Mapping[str, Tree], _: Version
    ) -> None:
        learned = self._trained.connectors[source].merged
        self._train(player_id, _beginning(player_id, weights, learned, source))

    def _train(self, player_id: str, beginning: Beginning | None) -> None:
        model = self._roster.modelled_on(player_id, self._first)
        if beginning and (other := self._other_network(player_id, beginning)):
            return self._cannot(player_id, other)
        try:
            self._trained.add(player_id, model, beginning)
        except ValueError as error:
            return self._cannot(player_id, str(error))
        begins_with = beginning.text if beginning else "new weights"
        self._progress.message(f"league: {player_id} is new, and learns from {begins_with}", "info")

    def _cannot(self, player_id: str, why: str) -> None:
        self._progress.message(f"league: {player_id} cannot learn: {why}", "warning")
        self._failed(player_id)

    def _other_network(self, player_id: str, beginning: Beginning) -> str:
        """Why weights to begin with are not of a player's network, for people. "": they are, or
        only some are given, or nobody has been copied whose network is the player's."""
        if player_id not in beginning.whole:
            return ""
        model, known = self._roster.modelled_on(player_id, self._first), self._registry.frozen
        copies = (
            known[each.player_id]
            for each in self._roster.present()
            if each.player_id in known
            and each.parent
            and self._roster.modelled_on(each.parent, self._first) == model
        )
        if (copy := next(copies, None)) is None:
            return ""
        own, given = _shapes(copy.tree[WEIGHTS]), _shapes(beginning.weights[player_id])
        for path in {**own, **given}:
            has, gets = own.get(path, "nothing"), given.get(path, "nothing")
            if has != gets:
                return (
                    f"{beginning.text} are of another network: at {'.'.join(path)!r}, {player_id} "
                    f"has {has}, and they have {gets}"
                )
        return ""

    def _new_life(self, player_id: str, source: str) -> tuple[int, Beginning | None]:
        """The seed of a player that is reset, and where its weights are from; None: new weights."""
        life = self._roster.players[player_id].life
        seed = worker_seed(self._seed, player_id, index=life)
        if source == INITIAL:
            beginning = self._initial(player_id)
        else:
            beginning = self._of_frozen(player_id, source)
        if beginning is not None:
            named = {player_id: Source(f"league: {player_id}, reset to {beginning.text}")}
            beginning = replace(beginning, sources=named)
        return seed, beginning

    def _initial(self, player_id: str) -> Beginning | None:
        """What a player was before any training of this run: what it began with, or the one that it
        is modelled on; None: new weights."""
        model, first = self._roster.modelled_on(player_id, self._first), self._beginning
        if first is None or model not in first.weights:
            return None
        return Beginning(
            {player_id: first.weights[model]},
            (player_id,) if model in first.whole else (),
            {player_id: first.connectors.get(model, {})},
            first.text,
            (),
            {player_id: first.sources[model]},
        )

    def _of_frozen(self, player_id: str, source: str) -> Beginning:
        frozen = self._registry.frozen[self._module(source)]
        learned = connector_state(frozen.checkpoint, frozen.source)
        return _beginning(player_id, frozen.tree[WEIGHTS], learned, source)

    def _module(self, source: str) -> str:
        """With which a player plays that another one begins with."""
        player = self._roster.players.get(source)
        return source if player is None else module_of(player)

    def _begin_again(self, player: Player, resume: Checkpoint) -> None:
        """A player that was added a moment before the checkpoint, which has nothing of it yet."""
        player_id, source = player.player_id, player.source
        beginning = None
        if source == INITIAL:
            beginning = self._initial(player_id)
        elif self._module(source) in self._registry.frozen:
            beginning = self._of_frozen(player_id, source)
        elif source in resume.module_ids:
            weights, learned = weights_of(resume)[source], connector_state(resume, source)
            beginning = _beginning(player_id, weights, learned, source)
        else:
            self._progress.message(
                f"league: {player_id} begins again with new weights, since those of {source} are "
                "not in the checkpoint",
                "warning",
            )
        if beginning is not None:
            self._trained.begin_with(player_id, beginning)

    def _repeat_reset(self, player: Player) -> None:
        """A player was reset when its state for the checkpoint had been cut, and the league not."""
        player_id, source = player.player_id, player.reset_to
        if source != INITIAL and self._module(source) not in self._registry.frozen:
            has_left = self._roster.players[source].retired
            why = f"{source} has been retired" if has_left else f"the weights of {source} are lost"
            text = f"is reset to what it began with, since {why}"
            self._progress.message(f"league: {player_id} {text}", "warning")
            source = INITIAL
        self._trained.reset_first(player_id, *self._new_life(player_id, source))


def _shapes(weights: Tree) -> dict[Path, str]:
    """Those of arrays, for people, by path."""
    return {path: f"shape {list(array.shape)}" for path, array in flatten(weights)}


def _beginning(player_id: str, weights: Any, learned: State, source: str) -> Beginning:
    """What a player begins with: another one's arrays by name, and what its connectors learned."""
    text = f"the weights of {source}"
    named = {player_id: Source(f"league: {player_id}, new with {text}")}
    return Beginning({player_id: weights}, (player_id,), {player_id: learned}, text, (), named)
